"""Training: the loop, the run around it, resuming, records of steps, and the supervised warm start."""

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """`r3.train` is this package and what one calls from Python: Python binds a package's name to the package."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        from r3.api import train

        return train(*arguments, **settings)


sys.modules[__name__].__class__ = _CallableModule
