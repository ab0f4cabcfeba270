"""The policy and its update: packing, log-probs and entropies in chunks, the optimiser, checkpoints, and the loop."""

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """`r3.train` is this package and what one calls from Python: Python binds a package's name to the package."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        from r3.api import train

        return train(*arguments, **settings)


sys.modules[__name__].__class__ = _CallableModule
