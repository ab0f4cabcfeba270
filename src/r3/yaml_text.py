"""YAML from people: what Python's reader would choke on, or blow up to gigabytes, becomes one line."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.nodes import Node

from r3.errors import ConfigError

MOST_CHARACTERS = 1_000_000
MOST_ALIASES = 100
"""Repeated use of a named part (`*name`) multiplies: nine lines of ten such uses each are a billion values."""


class _Loader(yaml.SafeLoader):
    """The safe loader with a limit on aliases, which a recipe hardly needs."""

    aliases = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        if self.check_event(yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > MOST_ALIASES:
                raise ConfigError(f"more than {MOST_ALIASES} uses of named parts (*name); write them out")
        return super().compose_node(parent, index)


def load_yaml(text: str, where: str) -> Any:
    """The value of a text; ConfigError says that `where` is not valid, and why."""
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"{where} has {len(text):,} characters; a recipe has at most {MOST_CHARACTERS:,}")
    try:
        value = yaml.load(text, _Loader)  # derived from the safe one
        _count(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{where} is not valid YAML: nested too deeply") from error
    except (yaml.YAMLError, ValueError, OverflowError, TypeError, AttributeError) as error:
        # The last four come from PyYAML's own conversions: numbers of 5,000 digits, a 13th month, odd keys.
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())[:300]}") from error
    return value


def _count(value: Any, left: int = 100_000) -> int:
    """Walk through it as a reader would, aliases followed; ConfigError where it goes on and on."""
    if left <= 0:
        raise ConfigError("its named parts add up to more than 100,000 values; write less")
    if isinstance(value, dict):
        for key, below in value.items():
            left = _count(below, _count(key, left))
    elif isinstance(value, list | tuple | set):
        for below in value:
            left = _count(below, left)
    return left - 1
