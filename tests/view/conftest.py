"""Real runs made by the real trainer, once a session; a server over any of them; Chromium to look with."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.train.tiny import ROOT, command, overrides, run_r3, save_model

Serve = Callable[..., str]
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished tiny run, in which every mechanism acted. To be read only: tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("view")
    run_r3("train", "--quiet", *overrides(folder, run__rollouts_groups=5))
    return folder / "run"


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """The same run to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(run, …)`: the address of a real `r3 view` over runs, ended with the test."""
    with ExitStack() as stack:

        def start(*arguments: str | Path, port: str = "0") -> str:
            line = command("view", *arguments, "--no-browser", "--port", port)
            server = stack.enter_context(subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True))
            stack.callback(server.terminate)
            assert server.stdout is not None
            said = server.stdout.readline()
            assert said.startswith("r3 view: http://"), said
            return said.split()[-1]

        yield start


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model in it, for tests that train."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder / "model")
    return folder
