"""A real Chromium, driven by playwright: one browser a module, a fresh page a test, no way out to a network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.view.conftest import CHROMIUM

Browser = Page = Any  # playwright's, imported where a browser starts: tests that need none run without it
READY = "a => document.getElementById('main').dataset.ready === a"


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
