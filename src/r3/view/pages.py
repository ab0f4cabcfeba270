"""What the viewer shows besides steps and queries: the buffer, results of `r3 probe`, and settings.

The buffer's page and a query's ledger come from the buffer's read side. Settings are shown resolved, beside their
defaults: what `config.yaml` says, and where it differs.
"""

from __future__ import annotations

import json
import math
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from r3.buffer import SampleBuffer, SampleBufferError
from r3.config import Config, defaults_of, validate
from r3.errors import ConfigError, ViewError
from r3.run.disk import read_regular
from r3.view.runs import ViewedRun, holds_a_run, open_runs, runs_in

# ------------------------------------------------------------------- the buffer


_REMEMBERED = 10.0
"""Seconds for which an overview is reused: making one reads every row of a large buffer."""
_MOST_POINTS = 400
_HARDEST = 25


class BufferPages:
    """What a run's buffer holds. Opened for each question: an open reader keeps its log from shrinking."""

    def __init__(self, run: ViewedRun) -> None:
        self._run = run
        self._turn = threading.Lock()
        self._known: tuple[float, dict[str, Any]] | None = None

    def page(self) -> dict[str, Any]:
        """Size, age, balance, eviction and the hardest queries; `problem` says why it cannot be read."""
        with self._turn:
            if self._known is not None and time.monotonic() - self._known[0] < _REMEMBERED:
                return self._known[1]
            page = self._read()
            if "problem" not in page:
                self._known = (time.monotonic(), page)
            return page

    def _read(self) -> dict[str, Any]:
        path = self._run.files.buffer_path
        if not path.exists():
            return {"problem": "the run has no buffer.sqlite (yet)"}
        try:
            with SampleBuffer.open_reader(path) as buffer:
                stats, overview = buffer.stats(), buffer.overview(_HARDEST)
        except SampleBufferError as error:
            return {"problem": str(error)}
        return {
            "stats": asdict(stats),
            "limits": {
                "per_query": self._run.setting("buffer.per_query"),
                "total": self._run.setting("buffer.total"),
                "max_age": self._run.setting("method.replay.max_age"),
            },
            "over_time": _columns(_thinned(overview.over_time), ("step", "right", "wrong", "unverified", "evicted")),
            "by_age": _columns(_binned(overview.by_age), ("step", "right", "wrong")),
            "hardest": [
                {**rate._asdict(), "query": rate.query_id, "question": self._run.queries.question(rate.query_id)}
                for rate in overview.hardest
            ],
            "never_solved": overview.never_solved,
        }

    def ledger(self, query: str) -> list[dict[str, Any]]:
        """Every attempt at a query by step; empty where there is no readable buffer."""
        with suppress(SampleBufferError), SampleBuffer.open_reader(self._run.files.buffer_path) as buffer:
            return [entry._asdict() for entry in buffer.ledger(query)]
        return []


def _thinned(rows: list[Any]) -> list[Any]:
    """At most `_MOST_POINTS` rows, evenly chosen, always with the last."""
    if len(rows) <= _MOST_POINTS:
        return rows
    every = -(-len(rows) // _MOST_POINTS)
    return rows[len(rows) - 1 :: -every][::-1]


def _binned(rows: list[Any], most: int = 60) -> list[tuple[int, int, int]]:
    """Counts by the step in which samples were drawn, in bins of equal width."""
    if not rows:
        return []
    first, last = rows[0].step, rows[-1].step
    width = max(1, -(-(last - first + 1) // most))
    bins: dict[int, list[int]] = {at: [0, 0] for at in range(first, last + 1, width)}
    for row in rows:
        at = first + (row.step - first) // width * width
        bins[at][0] += row.right
        bins[at][1] += row.wrong
    return [(at, right, wrong) for at, (right, wrong) in bins.items()]


def _columns(rows: list[Any], names: tuple[str, ...]) -> dict[str, list[int]]:
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


# ----------------------------------------------------------------------- probes


FILE = "probe.json"


class ViewedProbe:
    """A result of `r3 probe`. Its file is read for each question."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name

    def about(self) -> dict[str, Any]:
        return {"name": self.name, "path": str(self.path)}

    def content(self) -> dict[str, Any]:
        """What `r3 probe` wrote, with the advised settings as YAML; `problem` says why it cannot be read."""
        import yaml

        try:
            report = json.loads(read_regular(self.path))
        except (OSError, ValueError) as error:
            return {"problem": f"{self.path} cannot be read ({error}): run r3 probe again"}
        if not isinstance(report, dict) or not {"findings", "advice", "settings", "tokens"} <= report.keys():
            return {"problem": f"{self.path} holds no result of r3 probe"}
        recipe = self.path.parent / "recipe.yaml"
        return {
            **_finite(report),
            "settings": yaml.safe_dump(report["settings"], sort_keys=False),
            "recipe_file": str(recipe) if recipe.is_file() else None,
        }


def open_all(paths: Sequence[str | Path]) -> tuple[list[ViewedRun], list[ViewedProbe]]:
    """The runs and the probes at those paths or in those folders; `ViewError` for a path that has neither."""
    at = [(Path(path), _probes_at(Path(path))) for path in paths]
    files = list(dict.fromkeys(file for _, files in at for file in files))
    # A folder with nothing but probes is not searched for runs, which would be an error.
    run_paths = [path for path, files in at if not files or any(map(holds_a_run, runs_in(path)))]
    names = [_name(file) for file in files]
    if len(set(names)) < len(names):
        names = [str(file) for file in files]
    probes = [ViewedProbe(file, name) for file, name in zip(files, names, strict=True)]
    return (open_runs(run_paths) if run_paths else []), probes


def _probes_at(path: Path) -> list[Path]:
    """The probe results at a path: the file itself, or those in the folder and its subfolders."""
    if path.is_file() and path.suffix == ".json":
        return [path]
    if holds_a_run(path):
        return []
    try:
        return sorted(path.glob(FILE)) or sorted([*path.glob(f"*/{FILE}"), *path.glob(f"*/*/{FILE}")])
    except OSError as error:
        raise ViewError(f"{path}: cannot be read ({error.strerror})") from error


def _name(file: Path) -> str:
    return file.resolve().parent.name if file.name == FILE else file.stem


def _finite(value: Any) -> Any:
    """The value with None for NaN and infinities, which are not JSON to a browser."""
    if isinstance(value, dict):
        return {key: _finite(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_finite(below) for below in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --------------------------------------------------------------------- settings


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
