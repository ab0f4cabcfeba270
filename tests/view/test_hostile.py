"""Model text that would rather be something else: on every page, in the export and in the terminal it stays text."""

from __future__ import annotations

from pathlib import Path

import pytest

from r3.run import RunFiles
from r3.view.show import one_line, visible
from tests.train.tiny import run_r3
from tests.view.browser import Page, browser, page, visit
from tests.view.conftest import Serve

__all__ = ["browser", "page"]

SCRIPT = "</script><script>window.stolen = 1</script><img src=x onerror='window.stolen = 2'><!--"
TERMINAL = "\x1b[2J\x1b]0;owned\x07\x9b31m\r"
BACKWARDS = "user\u202etxt.exe\u2066\u200f"
LONG = "x" * 100_000
HOSTILE = [SCRIPT, TERMINAL, BACKWARDS, LONG]


@pytest.fixture
def hostile(copy: Path) -> Path:
    """A real run whose fourth step was answered by an adversary: texts, ids, verdicts, prompts."""
    rollouts = RunFiles(copy).rollouts
    table, rows = rollouts.contents(4), list(rollouts.read(4))
    assert table is not None
    for row, text in zip([row for row in rows if row["group"] == 0], HOSTILE, strict=False):
        row |= {"response": text, "verdict": text[:200], "prompt": SCRIPT + TERMINAL, "query": SCRIPT}
        row |= {"tokens": [7] * len(text), "widths": [1] * len(text)}
        row |= {name: [0.5] * len(text) for name in ("entropies", "logprobs", "ratios")}
    table.summaries[0] |= {"query": SCRIPT, "question": TERMINAL + BACKWARDS}
    rollouts.write(4, rows, table.summaries)
    return copy


def check(page: Page, url: str) -> None:
    """Look at every page that shows such text."""
    shown = []
    for sample in range(4):
        visit(page, url, f"#/0/group/4/0/{sample}")
        shown.append(page.locator(".response").text_content() or "")
    assert SCRIPT in shown[0]
    assert "␛[2J␛]0;owned␇⟨U+009B⟩31m" in shown[1]
    assert "user⟨U+202E⟩txt.exe⟨U+2066⟩⟨U+200F⟩" in shown[2]
    assert shown[3].startswith("x" * 2000)
    assert SCRIPT in (page.locator(".prompt pre").text_content() or "")
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    for address in ("steps/4", "queries", f"query/{page.evaluate('encodeURIComponent', SCRIPT)}"):
        visit(page, url, f"#/0/{address}")
        assert SCRIPT in page.inner_text("main")
    assert page.evaluate("() => window.stolen") is None
    assert page.locator("main script, main img").count() == 0


def test_hostile_text_is_text_on_every_page(hostile: Path, serve: Serve, page: Page) -> None:
    check(page, serve(hostile))


def test_hostile_text_is_text_in_an_export(hostile: Path, tmp_path: Path, page: Page) -> None:
    target = tmp_path / "report.html"
    run_r3("view", hostile, "--export", target, "--steps", "6")
    check(page, target.as_uri())


def test_hostile_text_is_text_in_a_terminal(hostile: Path) -> None:
    shown = run_r3("show", hostile, "--group", f"4/{SCRIPT}").stdout
    assert "␛[2J␛]0;owned␇⟨U+009B⟩31m␍" in shown
    assert "user⟨U+202E⟩txt.exe⟨U+2066⟩⟨U+200F⟩" in shown
    assert not set(shown) & {"\x1b", "\x07", "\x9b", "\r", "\u202e"}
    refused = run_r3("show", hostile, "--group", f"4/{TERMINAL}", check=False)
    assert refused.returncode == 2
    assert "\x1b" not in refused.stderr


def test_every_control_is_made_visible() -> None:
    steering = [chr(code) for code in (*range(32), *range(0x7F, 0xA0), 0x200E, 0x202E, 0x2066, 0xFEFF, 0x2028, 0xD800)]
    shown = visible("".join(steering))
    assert not set(shown) & (set(steering) - {"\t", "\n"})
    assert len(one_line(LONG, 80)) == 80
