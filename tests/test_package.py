"""The package as a user meets it: what importing it costs, what it exports, that its layers look one way only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import r3

SOURCE = Path(r3.__file__).parent
# Who may import whom: a room only rooms to its left on the street (docs/architecture.md).
ALLOWED = {
    "errors": set(),
    "settings": set(),
    "samples": set(),
    "locks": set(),
    "config_text": {"errors"},
    "method": {"settings", "samples"},
    "buffer": {"errors", "samples", "locks"},
    "algorithm": {"errors", "samples", "method", "buffer"},
    "policy": {"errors", "settings", "samples", "method"},
    "rollout": {"errors", "settings", "samples", "policy"},
    "verify": {"errors", "samples"},
    "judging": {"samples", "rollout", "verify"},
    "run": {"errors", "locks"},
    "tasks": {"errors", "settings", "samples", "verify", "buffer", "run"},
    "view": {"config", "config_text", "errors", "method", "run", "buffer"},
    "evaluate": {"errors", "samples", "rollout", "judging", "tasks", "run", "verify"},
    "models": {"config", "errors", "policy"},
    "compare": {"config", "errors", "method", "run", "locks", "evaluate"},
    # Large settings live with their rooms: the tree that composes them is below the rooms that are given it whole.
    "config": {
        *("settings", "config_text", "errors"),
        *("method", "policy", "rollout", "tasks"),
    },
    "train": {
        *("config", "errors", "samples", "method", "buffer", "algorithm"),
        *("policy", "rollout", "judging", "verify", "tasks", "evaluate", "run"),
    },
    "probe": {
        *("config", "errors", "samples", "method", "buffer", "algorithm"),
        *("rollout", "verify", "judging", "tasks", "evaluate", "run", "train"),
    },
    "integrations": {
        *("config", "errors", "settings", "samples", "method", "buffer", "algorithm", "tasks", "verify"),
        *("policy", "run", "train"),  # to write down what another trainer did as r3's own loop does
    },
    "embedded": {"config", "models", "rollout", "tasks"},
}
ENDS = {"api", "commands", "cli", "__init__", "__main__"}
"""Where the street ends: they may import any room, and none imports them, but for the room that is called `train`."""


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after the statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_r3_costs_no_torch() -> None:
    assert not loaded_by("import r3") & {"torch", "transformers", "numpy", "pydantic"}
    light = "import r3; r3.group_advantages([1, 0]); r3.structural_entropy_rewards; r3.SampleBuffer; r3.Algorithm"
    assert not loaded_by(light) & {"torch", "transformers", "pyarrow"}


def test_help_costs_no_torch() -> None:
    code = "import sys; sys.argv = ['r3', '--help']\nfrom r3.cli import main\ntry: main()\nexcept SystemExit: pass"
    assert not loaded_by(code) & {"torch", "transformers", "numpy", "pydantic"}


@pytest.mark.parametrize("name", r3.__all__)
def test_every_export_resolves(name: str) -> None:
    assert getattr(r3, name) is not None
    assert name in dir(r3)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="repaly"):
        r3.repaly  # noqa: B018


def test_every_room_is_on_the_street() -> None:
    rooms = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms == ALLOWED.keys() | ENDS


def test_the_street_is_one_way() -> None:
    for room, allowed in ALLOWED.items():
        for path in [SOURCE / f"{room}.py", *(SOURCE / room).glob("**/*.py")]:
            if path.exists():
                known = {m.split(".")[1] for m in _imports(path) if m.startswith("r3.")}
                if path == SOURCE / "train" / "__init__.py":
                    known -= {"api"}  # which is what calling the room does
                assert known <= allowed | {room}, f"{path.relative_to(SOURCE)} reaches into {known - allowed - {room}}"


def _imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return modules | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
