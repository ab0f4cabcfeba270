"""A run's resolved settings beside their defaults: what `config.yaml` says, and where it differs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from r3.config import Config, defaults_of, validate
from r3.errors import ConfigError
from r3.view.runs import ViewedRun

Tree = Mapping[str, Any]


def settings_view(run: ViewedRun) -> dict[str, Any]:
    """Every setting by section, with its default, its help and whether it differs; and how the run was started.

    Settings that this version does not know (of another version, of another trainer) are shown as they are, and
    compared with their defaults where run.json has those.
    """
    given, (info, _) = run.config(), run.info()
    recorded = info.get("defaults")
    problems: list[str] = []
    sections = []
    known = _known(given, problems)
    for name, values in given.items():
        section, defaults = known.get(name, (None, _below(recorded, name)))
        rows = values if isinstance(values, dict) else {"": values}
        help_text = "" if section is None else (type(section).__doc__ or "").split("\n")[0]
        settings = list(_rows(rows, section, defaults, f"{name}."))
        sections.append({"name": str(name), "help": help_text, "settings": settings})
    return {
        "sections": sections,
        "problems": problems,
        "command": _command([str(word) for word in _list(info.get("command"))]),
        "created": str(info.get("created") or ""),
        "versions": info.get("versions") or {},
        "resumed_from": [resume.get("step") for resume in _list(info.get("resumes")) if isinstance(resume, dict)],
    }


def _known(given: Tree, problems: list[str]) -> dict[str, tuple[BaseModel, Tree]]:
    """The sections that this version can read, each with its defaults; errors of the others are added to `problems`."""
    ours = {name: values for name, values in given.items() if name in Config.model_fields}
    try:
        return _beside_defaults(validate(ours), ours)
    except ConfigError:  # a section of another version does not hide the others
        sections: dict[str, tuple[BaseModel, Tree]] = {}
        for name, values in ours.items():
            try:
                sections |= _beside_defaults(validate({name: values}), {name: values})
            except ConfigError as error:
                problems.append(f"{name} is shown without its defaults: {str(error).splitlines()[0]}")
        return sections


def _beside_defaults(config: Config, given: Tree) -> dict[str, tuple[BaseModel, Tree]]:
    beside = defaults_of(config)
    return {name: (getattr(config, name), _defaults(getattr(config, name), getattr(beside, name))) for name in given}


def _defaults(section: BaseModel, beside: Any) -> dict[str, Any]:
    """The default of each setting: from `beside`, or from its class if `beside` is another kind of section."""
    tree: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if type(beside) is type(section) or (name == "name" and hasattr(beside, name)):  # which kind of section it is
            default = getattr(beside, name)
        elif field.is_required():
            continue
        else:
            default = field.get_default(call_default_factory=True)
        tree[name] = _defaults(value, default) if isinstance(value, BaseModel) else to_jsonable_python(default)
    return tree


def _rows(values: Tree, section: BaseModel | None, defaults: Any, prefix: str) -> Iterator[dict[str, Any]]:
    for name, value in values.items():
        field = None if section is None else type(section).model_fields.get(name)
        inner = None if field is None else getattr(section, name)
        if isinstance(value, dict) and value and (field is None or isinstance(inner, BaseModel)):
            section_below = inner if isinstance(inner, BaseModel) else None
            yield from _rows(value, section_below, _below(defaults, name), f"{prefix}{name}.")
            continue
        has_default = isinstance(defaults, Mapping) and name in defaults
        shown = _plain(value)
        row = {"key": f"{prefix}{name}".rstrip("."), "value": shown}
        if has_default:
            row |= {"default": _plain(defaults[name]), "changed": shown != _plain(defaults[name])}
        elif field is not None:  # it has none: a recipe must set it
            row |= {"changed": True}
        yield row | ({} if field is None else {"help": " ".join((field.description or "").split())})


def _command(words: list[str]) -> str:
    """As it was typed, without the folder that r3 is installed in."""
    program = [PurePath(word).name for word in words[:1]]
    return shlex.join([*("r3" if name == "__main__.py" else name for name in program), *words[1:]])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _below(tree: Any, name: str) -> Any:
    return tree.get(name) if isinstance(tree, Mapping) else None


def _plain(value: Any) -> Any:
    """The value in JSON's types; others that YAML has (dates, .inf) as text."""
    if isinstance(value, dict):
        return {str(key): _plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(below) for below in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    return value if isinstance(value, float) and abs(value) < float("inf") else str(value)
