"""Real runs made by the real trainer, once a session; a server over any of them; a real Chromium to look with.

One browser a module, driven by playwright; a fresh page a test, with no way out to a network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.train.tiny import ROOT, command, overrides, run_r3, save_model

Serve = Callable[..., str]
Browser = Page = Any  # playwright's, imported where a browser starts: tests that need none run without it
READY = "a => document.getElementById('main').dataset.ready === a"
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    reason = "browser tests need playwright: pip install -e '.[dev]'"
    sync_api = pytest.importorskip("playwright.sync_api", reason=reason)
    if CHROMIUM is None:
        pytest.skip("no Chromium found: make browser installs one, or set CHROMIUM to its path")
    with sync_api.sync_playwright() as playwright:
        # Every name but localhost is unknown to it: a page that reaches out fails.
        rules = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1"
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", rules])
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that must not meet an error of its own scripts, nor of its content policy."""
    errors: list[str] = []
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.set_default_timeout(30_000)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on(
        "console",
        # What the server refuses with a reason is shown on the page; Chromium notes it in the console as well.
        lambda said: None if said.type != "error" or "Failed to load" in said.text else errors.append(said.text),
    )
    yield opened
    opened.close()
    assert errors == []


def visit(page: Page, url: str, address: str = "#/0/overview") -> None:
    """Open a page of the viewer and wait until it is drawn."""
    page.goto(url + address)
    page.wait_for_function(READY, arg=address)
