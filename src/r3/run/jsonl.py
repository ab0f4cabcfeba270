"""One JSON object per line: strict JSON that any reader accepts, the same bytes for the same content.

JSON has no NaN and no infinity. A missing value (NaN, or None: the mean over no samples) is written as
`null` and read back as NaN; an infinity is written as the string "Infinity" or "-Infinity" and read back as a float.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_INFINITIES = {"Infinity": math.inf, "-Infinity": -math.inf}


def encode_line(record: Mapping[str, Any], first: str = "") -> bytes:
    """The line for one record: the key `first` leads, the others follow sorted, so that equal records are equal bytes.

    >>> encode_line({"b": float("nan"), "a": [1, float("inf")], "step": 3}, first="step")
    b'{"step":3,"a":[1,"Infinity"],"b":null}\\n'
    """
    keys = sorted(record, key=lambda key: (key != first, key))
    plain = {key: _plain(record[key], key) for key in keys}
    return json.dumps(plain, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def decode_line(line: bytes) -> dict[str, Any]:
    """The record of one line; ValueError for anything but a JSON object."""
    record = json.loads(line, parse_constant=_refuse)
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    return {key: _restored(value) for key, value in record.items()}


def _plain(value: Any, key: str) -> Any:
    """`value` in JSON's types; scalars of numpy and torch become numbers."""
    if isinstance(value, Mapping):
        return {str(name): _plain(value[name], f"{key}.{name}") for name in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_plain(item, key) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{key!r} is a {type(value).__name__}; log numbers, texts, lists and mappings of them")


def _restored(value: Any) -> Any:
    if value is None:
        return math.nan
    if isinstance(value, dict):
        return {name: _restored(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return _INFINITIES.get(value, value) if isinstance(value, str) else value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
