"""Thin adapters of `r3.algorithm` for other trainers: `integrations.trl` and `integrations.verl`."""
