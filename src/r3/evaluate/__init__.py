"""Evaluation: how often a policy is right on held-out problems, with intervals."""
