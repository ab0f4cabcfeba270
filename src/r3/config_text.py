"""Settings as text: YAML from people read safely, errors explained, every setting written out with its help.

What Python's YAML reader would choke on, or blow up to gigabytes, becomes one line.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from yaml.nodes import MappingNode, Node, ScalarNode

from r3.errors import ConfigError


def explain(problem: dict[str, Any], tree: type[BaseModel]) -> str:
    """One of pydantic's complaints as one line, with the setting that was probably meant."""
    where, sections = _located([str(part) for part in problem["loc"]], tree)
    key = ".".join(where) or "config"
    if problem["type"] == "extra_forbidden":
        return f"{key}: no such setting{_kind(where, sections[-1])}; {_meant(where, sections[-1], tree)}"
    if problem["type"] == "missing":
        described = sections[-1].model_fields[where[-1]].description or ""
        return f"{key}: needed{_kind(where, sections[-1])}: {' '.join(described.split())}"
    reason = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "union_tag_invalid":
        key, reason = f"{key}.name", f"one of {problem['ctx']['expected_tags']} is needed"
        return f"{key}: {reason} (got {problem['ctx']['tag']!r})"
    given = problem.get("input")
    if problem["type"] == "string_type" and isinstance(given, dict):  # YAML reads `a: b` as a mapping
        return f"{key}: a text is needed; one with a colon and a space in it goes into quotes: {key}=\"'…: …'\""
    shown = "" if isinstance(given, dict) else f" (got {repr(given)[:200]})"
    return f"{key}: {reason}{shown}"


def _located(loc: list[str], tree: type[BaseModel]) -> tuple[list[str], list[type[BaseModel]]]:
    """The key that a complaint is about, and the sections on the way; pydantic also names the member of a union."""
    where: list[str] = []
    sections = [tree]
    choices: dict[str, type[BaseModel]] = {}
    for part in loc:
        if part in choices:
            sections, choices = [*sections, choices[part]], {}
            continue
        where.append(part)
        field = sections[-1].model_fields.get(part)
        below = _sections(field) if field is not None else {}
        if len(below) == 1:
            sections.append(next(iter(below.values())))
        else:
            choices = below
    return where, sections


def _meant(where: list[str], section: type[BaseModel], tree: type[BaseModel]) -> str:
    near = difflib.get_close_matches(where[-1], section.model_fields, n=1)
    if near:
        return f"did you mean {'.'.join([*where[:-1], near[0]])}?"
    keys = sorted(_all_keys(tree), key=lambda key: key[0].split(".")[:-1] != where[:-1])  # the same section first
    elsewhere = next((text for key, text in keys if key.split(".")[-1] == where[-1]), None)
    return f"did you mean {elsewhere}?" if elsewhere else f"valid here: {', '.join(section.model_fields)}"


def _kind(where: list[str], section: type[BaseModel]) -> str:
    """Where a section can be of several kinds, how a person says which: " with task.name=file"."""
    field = section.model_fields.get("name")
    kinds = get_args(field.annotation) if field is not None else ()
    return f" with {'.'.join([*where[:-1], 'name'])}={kinds[0]}" if len(kinds) == 1 else ""


def _all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key below a section, and how to tell a person of it."""
    for name, field in section.model_fields.items():
        yield prefix + name, f"{prefix}{name}{_kind((prefix + name).split('.'), section)}"
        for below in _sections(field).values():
            yield from _all_keys(below, f"{prefix}{name}.")


def all_keys(tree: type[BaseModel]) -> list[str]:
    """Every dotted key that a tree of settings knows."""
    return [key for key, _ in _all_keys(tree)]


def schema(tree: type[BaseModel]) -> dict[str, Any]:
    """The tree as a JSON schema for editors, with the short forms of sections (`replay: off`, `method: grpo`)."""
    whole = tree.model_json_schema()
    for section in dict.fromkeys(_all_sections(tree)):  # several families of tasks share one
        definition = whole["$defs"][section.__name__]
        short = [value for value in (True, False, "on", "off") if _accepts(section, value)]
        names = definition["properties"].get("name", {}).get("enum", [])
        short += [name for name in names if _accepts(section, name)]
        if short:
            whole["$defs"][section.__name__] = {"anyOf": [definition, {"enum": short}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole, "title": "A recipe of r3"}


def _accepts(section: type[BaseModel], value: Any) -> bool:
    try:
        section.model_validate(value)
    except ValidationError:
        return False
    return True


def _all_sections(tree: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for field in tree.model_fields.values():
        for section in _sections(field).values():
            yield section
            yield from _all_sections(section)


def _sections(field: FieldInfo) -> dict[str, type[BaseModel]]:
    """The kinds of section that a field may hold, by the tag that pydantic tells them apart by; most have one kind."""
    kinds = get_args(field.annotation) or (field.annotation,)
    sections = {}
    for kind in kinds:
        annotation = get_args(kind)[0] if get_args(kind) and not isinstance(kind, type) else kind
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            name = annotation.model_fields.get("name")
            tags = get_args(name.annotation) if name is not None else ()
            sections[str(tags[0]) if len(tags) == 1 else annotation.__name__] = annotation
    return sections


def describe(config: BaseModel, indent: str = "", *, beside: BaseModel | None = None) -> str:
    """The resolved config as YAML, each setting under its help text; with `beside`, only where it differs from that."""
    lines: list[str] = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        other = None if beside is None else getattr(beside, name)
        if isinstance(value, BaseModel) and type(other) is not type(value):  # another kind of section is all different
            other = None
        if beside is not None and value == other and name != "enabled":  # a section with changes says whether it acts
            continue
        if isinstance(value, BaseModel):
            help_text = (type(value).__doc__ or "").split("\n")[0]
            lines += [f"{indent}# {help_text}", f"{indent}{name}:", describe(value, indent + "  ", beside=other)]
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


MOST_CHARACTERS = 1_000_000
MOST_ALIASES = 100
"""Repeated use of a named part (`*name`) multiplies: nine lines of ten such uses each are a billion values."""


class _Loader(yaml.SafeLoader):
    """The safe loader with a limit on aliases, which a recipe hardly needs, and none of two keys passed over."""

    aliases = 0

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, ScalarNode) or key.value == "<<":
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                where = f"in lines {lines[key.value]} and {line}" if lines[key.value] != line else f"in line {line}"
                raise ConfigError(f"{key.value} is there twice, {where}: the second would replace the first; join them")
            lines[key.value] = line
        return node

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
    """Walk through the value as a reader would, following aliases; ConfigError where that never ends."""
    if left <= 0:
        raise ConfigError("its named parts add up to more than 100,000 values; write less")
    if isinstance(value, dict):
        for key, below in value.items():
            left = _count(below, _count(key, left))
    elif isinstance(value, list | tuple | set):
        for below in value:
            left = _count(below, left)
    return left - 1
