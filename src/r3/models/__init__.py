"""Models without a model hub: real ones from a package index, as Hugging Face folders, and a tiny untrained one."""
