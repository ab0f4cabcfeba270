"""`r3` whose sharded copy has compiled layers, as on a card: `python -m tests.train.compiled_shards train …`."""

from __future__ import annotations

import sys
from typing import Any

import torch._dynamo

from r3.cli import main
from r3.policy.layers import CompiledLayers
from r3.policy.world import ShardedPolicy

whole = ShardedPolicy.__init__


def compiled(self: ShardedPolicy, *given: Any) -> None:
    whole(self, *given)
    self._compiled = CompiledLayers(self.base, "update")


if __name__ == "__main__":
    ShardedPolicy.__init__ = compiled  # type: ignore[method-assign]
    code = main()
    print(f"compiled graphs: {torch._dynamo.utils.counters['stats']['unique_graphs']}")
    sys.exit(code)
