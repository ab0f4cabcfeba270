"""The package as a user meets it: its import, exports and layers, and the wheel from an empty folder.

And as a newcomer reads it: docs/architecture.md names every module, every module of weight has a test file that is
named after it or says that it covers it, and two modules share a name only where it is the plain word for both.

Covers r3.commands.recipes.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

import r3
from tests.test_docs import chat_model, first_query
from tests.train.tiny import ROOT

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
    "run": {"errors", "settings", "locks"},
    "tasks": {"errors", "settings", "samples", "verify", "buffer", "run"},
    "view": {"config", "config_text", "errors", "method", "run", "buffer"},
    "evaluate": {"errors", "settings", "samples", "rollout", "judging", "tasks", "run", "verify"},
    "models": {"config", "errors", "settings", "policy"},
    "compare": {"config", "errors", "method", "run", "locks", "evaluate"},
    # Settings live with their rooms: the tree that composes them is below the rooms that are given it whole.
    "config": {
        *("settings", "config_text", "errors"),
        *("method", "policy", "rollout", "tasks", "evaluate", "run"),
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


# What a user of the wheel does from an empty folder: nothing of the clone is in reach, nothing is fetched.


REWARDS = """
import os, signal

def right(completions, answer, **columns):
    if os.environ.get("STOP") and not os.path.exists("stopped"):
        open("stopped", "w").close()
        os.kill(os.getpid(), signal.SIGTERM)
    return [float(ord(text[0]) % 2 == int(wanted) % 2) if text else 0.0 for text, wanted in zip(completions, answer)]

def brief(completion):
    return 1 / (1 + len(completion))

async def level(completion, level):
    return None if level == "easy" else 0.5
"""
SETTINGS = {
    "task.name": "file",
    "task.path": "sums.jsonl",
    "task.question_column": "question",
    "task.system": "You are a careful clerk.",
    "task.template": "'A {level} one: {question}'",
    "task.rewards": "[my_rewards.right, {function: my_rewards.brief, weight: 0.1, truncated: judge}, my_rewards.level]",
    "task.outcome": "right",
    "task.heldout": 8,
    "model.path": "model",
    "model.device": "cpu",
    "model.lora.enabled": "true",
    "model.lora.rank": 4,
    "model.lora.targets": "[q_proj, v_proj]",
    "method.reflection.max_prompt_tokens": 900,
    "rollout.group_size": 4,
    "rollout.max_tokens": 12,
    "train.queries_per_step": 4,
    "train.steps": 3,
    "train.learning_rate": "1e-3",
    "run.dir": "runs/mine",
    "run.threads": 1,
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the built wheel in it; what it needs is this environment's."""
    pytest.importorskip("hatchling", reason="builds the wheel: pip install hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"]
    subprocess.run([*pip, str(folder / "site"), str(wheel)], check=True, capture_output=True)
    return folder / "site"


class Desk:
    """An empty folder, and `r3` as it was installed."""

    def __init__(self, folder: Path, site: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{folder}", "HF_HUB_OFFLINE": "1"}

    def python(self, *arguments: str | Path, code: int = 0, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=self.folder,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def r3(self, *arguments: str | Path, code: int = 0, **environment: str) -> str:
        return self.python("-m", "r3", *arguments, code=code, **environment)


@pytest.fixture
def desk(tmp_path: Path, site: Path) -> Desk:
    desk = Desk(tmp_path, site)
    assert Path(desk.python("-c", "import r3; print(r3.__file__)").strip()).is_relative_to(site)
    return desk


def settings(more: Sequence[str] = ()) -> list[str]:
    return [*(f"{key}={value}" for key, value in SETTINGS.items()), *more]


def test_own_data_from_training_to_a_model_that_transformers_loads(desk: Desk) -> None:
    """Own rows, three reward functions, a system prompt, LoRA: train, stop, resume, evaluate, view, merge, load."""
    folder = desk.folder
    rows = [
        {"question": f"What is {a}+{b}?", "answer": str(a + b), "level": "easy" if a < 4 else "hard"}
        for a in range(2, 6)
        for b in range(2, 7)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text(REWARDS)
    chat_model(folder / "model")

    assert "dry run passed" in desk.r3("train", "--dry-run", *settings())
    assert not (folder / "runs").exists()
    desk.r3("train", *settings(), code=143, STOP="1")
    resumed = desk.r3("train", "--resume", "runs/mine")
    assert "Held-out accuracy" in resumed
    assert "Held-out rewards by name" in resumed
    lines = [json.loads(line) for line in (folder / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all("reward/brief" in line for line in lines[1:])

    desk.r3("eval", "runs/mine", "--samples", "2", "--device", "cpu")
    found = json.loads((folder / "evals/mine/step-000003/results.json").read_text())["tasks"]["task"]
    assert found["problems"] == 8
    assert "brief" in found["rewards"]
    measured = "import r3; print(r3.Run('runs/mine').evaluate()['total'])"
    assert desk.python("-c", measured).strip() == "8"

    desk.r3("view", "runs/mine", "--export", "report.html")
    assert "<html" in (folder / "report.html").read_text()
    assert "mine" in desk.r3("show", "runs/mine")
    with_system = desk.r3("show", "runs/mine", "--group", f"1/{first_query(folder / 'runs' / 'mine')}")
    assert "You are a careful clerk." in with_system

    desk.r3("models", "merge", "runs/mine/checkpoints/step-000003/policy", "--to", "merged")
    load = "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; M.from_pretrained('merged'); "
    assert desk.python("-c", load + "print(len(T.from_pretrained('merged')('7+5=').input_ids))").strip() != "0"


def test_its_recipes_are_there(desk: Desk) -> None:
    names = [line.split()[0] for line in desk.r3("recipes").splitlines()]
    assert names == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    desk.r3("recipes", "copy", *names)
    for name in names:
        copy = desk.folder / "recipes" / f"{name}.yaml"
        assert copy.read_bytes() == (ROOT / "recipes" / f"{name}.yaml").read_bytes()
    desk.r3("train", "recipes/compare-embedded.yaml", "--dry-run")


# Whether a newcomer finds things.

MODULES = sorted(path for path in SOURCE.glob("**/*.py") if path.name not in ("__init__.py", "__main__.py"))
PACKAGES = [SOURCE / "algorithm", *sorted(path.parent for path in SOURCE.glob("*/*/**/__init__.py"))]
OF_WEIGHT = 60
"""Lines from which a module needs tests that can be found."""
PLAIN_WORDS = {
    *("settings", "errors", "config"),  # of a room
    *("sft", "show", "data", "models"),  # a command, and what it runs
    *("code", "reward"),  # where it comes from, and who judges it or how it counts
    *("engine", "trainer", "dataset", "record"),  # one for each library that r3 works with
    "api",  # called from Python, or by the pages
    *("counts", "groups", "prompts", "weights"),  # of a step, of the buffer, of another trainer, of the model
}


def dotted(path: Path) -> str:
    """`r3.buffer.store` for its file."""
    return ".".join(("r3", *path.relative_to(SOURCE).with_suffix("").parts))


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


def test_the_architecture_names_every_module() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = page.split("```\nsrc/r3/")[1].split("```")[0]
    named = {*re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`", page))), *re.findall(r"(\w+)\.py", tree)}
    commands = [path for path in MODULES if room(path) == "commands"]  # the page has them in a line: one per command
    missing = [dotted(path) for path in MODULES if path.stem not in named and path not in commands]
    assert not missing, "docs/architecture.md does not say what these are for"


def test_the_architecture_names_no_module_that_is_not_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    stems = {path.name for path in ROOT.glob("**/*.py") if ".venv" not in path.parts}
    named = set(re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", page)) | set(re.findall(r"^  (\w+\.py) ", page, re.MULTILINE))
    assert named
    assert named <= stems


def test_every_module_of_weight_has_tests_that_can_be_found() -> None:
    covered = set()
    for test in ROOT.glob("tests/**/test_*.py"):
        docstring = test.read_text(encoding="utf-8").split('"""')[1]
        covered |= set(re.findall(r"\br3(?:\.\w+)+", docstring))
        name, folder = test.stem.removeprefix("test_"), test.relative_to(ROOT / "tests").parts[0]
        named = [path for path in (*MODULES, *PACKAGES) if path.stem == name and folder in (test.name, room(path))]
        covered |= {dotted(path) for path in named}
    whole = {dotted(path) for path in PACKAGES} & covered  # whose tests cover all of their modules
    covered |= {dotted(path) for path in MODULES if dotted(path).rpartition(".")[0] in whole}
    heavy = {dotted(path) for path in MODULES if len(path.read_text(encoding="utf-8").splitlines()) >= OF_WEIGHT}
    assert heavy - covered == set(), "name a test file after these, or say in its first lines that it covers them"
    known = {dotted(path) for path in (*MODULES, *PACKAGES)}
    assert {name for name in covered if name.count(".") > 1} <= known


def test_modules_of_different_rooms_share_a_name_only_where_it_is_the_plain_word() -> None:
    rooms = defaultdict(set)
    for path in MODULES:
        rooms[path.stem].add(room(path))
    shared = {name for name, where in rooms.items() if len(where) > 1}
    assert shared <= PLAIN_WORDS
