"""The fast engine: the policy's own weights on a CUDA card."""

from r3.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine"]
