"""What a tree of settings says of itself: every setting with its help, and what is wrong with what was given."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo


def explain(problem: dict[str, Any], tree: type[BaseModel]) -> str:
    """One of pydantic's complaints in a line, with the setting that was probably meant."""
    where = [str(part) for part in problem["loc"]]
    key = ".".join(where) or "config"
    if problem["type"] == "extra_forbidden":
        valid = _keys_at(tree, where[:-1])
        near = difflib.get_close_matches(where[-1], valid, n=1)
        elsewhere = [] if near else [k for k in _all_keys(tree) if k.split(".")[-1] == where[-1]]
        hint = f"did you mean {'.'.join([*where[:-1], near[0]])}?" if near else ""
        hint = hint or (f"did you mean {elsewhere[0]}?" if elsewhere else f"valid here: {', '.join(valid)}")
        return f"{key}: no such setting; {hint}"
    reason = str(problem["msg"]).removeprefix("Value error, ")
    given = problem.get("input")
    shown = "" if isinstance(given, dict) else f" (got {repr(given)[:200]})"
    return f"{key}: {reason}{shown}"


def _keys_at(tree: type[BaseModel], where: Sequence[str]) -> list[str]:
    section: Any = tree
    for part in where:
        field = section.model_fields.get(part)
        section = _section(field) if field is not None else None
        if section is None:
            return []
    return list(section.model_fields)


def _all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        if below := _section(field):
            yield from _all_keys(below, f"{prefix}{name}.")


def _section(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def describe(config: BaseModel, indent: str = "") -> str:
    """The resolved config as YAML, each setting under its help text."""
    lines: list[str] = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            help_text = (type(value).__doc__ or "").split("\n")[0]
            lines += [f"{indent}# {help_text}", f"{indent}{name}:", describe(value, indent + "  ")]
            continue
        lines.append(f"{indent}# {' '.join((field.description or '').split())}{_choices(field)}")
        if isinstance(value, str) and "\n" in value:  # JSON's quoting is YAML's too, and keeps it on one line
            lines.append(f"{indent}{name}: {json.dumps(value, ensure_ascii=False)}")
            continue
        dumped = yaml.safe_dump({name: config.model_dump(mode="json")[name]}, allow_unicode=True, width=10_000)
        lines.append("\n".join(indent + line for line in dumped.rstrip().split("\n")))
    return "\n".join(lines)


def _choices(field: FieldInfo) -> str:
    options = [a for a in get_args(field.annotation) if isinstance(a, str)]
    return f" One of: {', '.join(options)}." if len(options) > 1 else ""
