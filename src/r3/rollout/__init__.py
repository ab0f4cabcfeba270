"""Rollout: prompts in, responses with their log-probs and entropies out. One protocol, several engines."""

from r3.rollout.protocol import Engine, Request, Response, Sampling

__all__ = ["Engine", "Request", "Response", "Sampling"]
