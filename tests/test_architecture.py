"""Whether a newcomer finds things: docs/architecture.md names every module, every module of weight has a test file that
is named after it or says that it covers it, and two modules share a name only where it is the plain word for both.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from tests.train.tiny import ROOT

SOURCE = ROOT / "src" / "r3"
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
