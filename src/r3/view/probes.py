"""Results of `r3 probe`, shown beside the runs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from r3.errors import ViewError
from r3.run.disk import read_regular
from r3.view.runs import ViewedRun, holds_a_run, open_runs, runs_in

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
