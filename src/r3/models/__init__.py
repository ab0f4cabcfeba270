"""Real language models that a package index carries, turned into Hugging Face folders: no model hub is needed."""
