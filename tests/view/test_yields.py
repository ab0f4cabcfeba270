"""What the mechanisms bring, over a run: charts of the yields that a run has metrics of."""

from __future__ import annotations

import json
from pathlib import Path

from tests.train.tiny import overrides, run_r3
from tests.view.browser import Page, browser, page, visit
from tests.view.conftest import Serve

__all__ = ["browser", "page"]


def test_each_mechanism_has_its_yields(finished: Path, serve: Serve, page: Page) -> None:
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    pairs, in_order = (sum(line.get(f"ranking/{name}", 0) for line in lines) for name in ("pairs", "pairs_in_order"))
    asked = lines[-1]["reflection/built"]
    assert pairs
    visit(page, serve(finished))
    yields = page.locator(".yields .chart")
    titles = [text.split("\n")[0] for text in yields.locator("h3").all_inner_texts()]
    for title in ("Lift of reflection", "Right answers per 1,000 tokens", "Reflection on hard queries", "AUC of the"):
        assert any(text.startswith(title) for text in titles), title
    assert yields.locator("canvas").count() == yields.count()
    page.keyboard.press("ArrowLeft")  # the cursor on the last step
    page.wait_for_function("() => document.querySelector('.yields .legend b').textContent.trim() !== ''")
    last = page.locator(".yields .chart", has_text="AUC of the ranking").locator(".legend b")
    assert abs(float(last.inner_text()) - in_order / pairs) < 0.001
    reflections = page.locator(".yields .chart", has_text="Reflection on hard queries").locator(".legend b").first
    assert reflections.inner_text() == str(asked)


def test_whatever_lies_below_yield_is_drawn(copy: Path, serve: Serve, page: Page) -> None:
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line |= {"yield/replay/right_per_1k": line["step"], "yield/replay/fresh": 2.0, "yield/pauses": 1}
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    visit(page, serve(copy))
    chart = page.locator(".yields .chart", has_text="Yield: replay")
    assert chart.locator(".entry").count() == 2
    assert "right per 1k" in chart.inner_text()
    assert page.locator(".yields .chart", has_text="Yield: pauses").count() == 1


def test_a_run_without_mechanisms_has_no_such_charts(model: Path, tmp_path: Path, serve: Serve, page: Page) -> None:
    settings = overrides(model, method="grpo", train__steps=2, run__dir=tmp_path / "run")
    run_r3("train", "--quiet", *[setting for setting in settings if not setting.startswith("method.")])
    visit(page, serve(tmp_path / "run"))
    titles = page.locator(".yields h3").all_inner_texts()
    # What GRPO's own answers tell: the AUC that a ranking would have, and right answers per token.
    assert {title.split("\n")[0].partition(" of the")[0] for title in titles} <= {"AUC", "Yield: plain"}, titles
