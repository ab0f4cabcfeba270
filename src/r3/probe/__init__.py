"""What a model and its data promise, for a small budget of tokens, before a long run."""
