"""`r3 probe`: on a small budget of tokens, which mechanism is expected to pay on this model and data."""
