"""Thin adapters of `r3.method` for people who live in another trainer: `integrations.trl` and `integrations.verl`."""
