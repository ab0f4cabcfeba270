"""Thin adapters of `r3.method` for people who live in another trainer: `r3.integrations.trl`."""
