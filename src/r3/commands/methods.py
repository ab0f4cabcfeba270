"""`r3 methods`: what `method=` may name, one line each."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `r3 methods`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="one method, with what it sets and where it departs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the methods, or one; returns the exit code."""
    from r3.errors import ConfigError
    from r3.method.presets import METHODS

    if arguments.name is None:
        width = max(map(len, METHODS))
        for name, preset in METHODS.items():
            print(f"{name:{width}}  {preset.summary}; needs {preset.needs}; {preset.source}")
        return 0
    if arguments.name not in METHODS:
        raise ConfigError(f"no method {arguments.name!r}; there are {', '.join(METHODS)}")
    print(_told(arguments.name))
    return 0


def _told(name: str) -> str:
    from functools import reduce

    from r3.method.presets import METHODS, governed
    from r3.method.settings import MethodSettings, RewardSettings

    method = MethodSettings.model_validate(name)
    preset, reward = METHODS[method.name], RewardSettings().of(method.name)
    values = {key: reduce(getattr, key.split("."), method) for key in governed(name)}
    lines = [
        f"{name}: {preset.summary}",
        f"source      {preset.source}",
        f"needs       {preset.needs}",
        f"departures  {preset.departures or 'none beyond those that all share (docs/methods.md)'}",
        "sets",
        *(f"  method.{key}={_written(value)}" for key, value in values.items()),
        f"  reward.length_bonus={_written(reward.length_bonus)} and",
        f"  reward.overlong.enabled={_written(reward.overlong.enabled)}, where they are auto",
    ]
    return "\n".join(lines)


def _written(value: object) -> str:
    """As it would be written in a recipe."""
    from r3.settings import Settings

    if isinstance(value, Settings):
        return "{" + ", ".join(f"{name}: {_written(field)}" for name, field in value) + "}"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
