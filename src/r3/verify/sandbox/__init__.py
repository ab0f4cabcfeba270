"""Code of unknown origin, run against tests behind walls (docs/code.md)."""

from __future__ import annotations

from r3.verify.sandbox.pool import Job, Outcome, Sandbox, SandboxSettings, Walls

__all__ = ["Job", "Outcome", "Sandbox", "SandboxSettings", "Walls"]
