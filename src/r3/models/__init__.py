"""Models without a hub: real ones that a package index carries, as Hugging Face folders, and a tiny one to teach."""
