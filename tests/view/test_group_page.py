"""A group in a real Chromium: what answers were compared with, what each was worth, where past ones come from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from r3.run import RunFiles
from tests.train.tiny import helped, overrides, run_r3
from tests.view.browser import Page, browser, page, visit
from tests.view.conftest import Serve

__all__ = ["browser", "page"]


def test_the_reference_answer_and_every_reward_stand_beside_the_answer(
    finished: Path, serve: Serve, page: Page
) -> None:
    rows = [row for row in RunFiles(finished).rollouts.read(5) if row["group"] == 0]
    table = RunFiles(finished).rollouts.contents(5)
    assert table is not None
    url = serve(finished)
    visit(page, url, "#/0/group/5/0/0")
    assert page.locator(".reference pre").inner_text() == table.summaries[0]["answer"]
    rewards = page.locator(".factrow").inner_text()
    for name in rows[0]["reward_parts"]:
        assert re.search(rf"\b{name} [\d−]", rewards), name
    summary_only = len(table.summaries) - 1
    assert table.places[summary_only] is None
    visit(page, url, f"#/0/group/5/{summary_only}")
    assert page.locator(".reference pre").inner_text() == table.summaries[summary_only]["answer"]
    assert "undefined" not in page.inner_text("main")


def test_answers_of_an_earlier_run_say_so(finished: Path, tmp_path: Path, serve: Serve, page: Page) -> None:
    """They have no step and no id in this run, and its updates do not tell their age."""
    settings = overrides(
        finished.parent, method="rlep", buffer__successes_from=finished, train__steps=2, run__dir=tmp_path / "run"
    )
    run_r3("train", "--quiet", *settings)
    table = RunFiles(tmp_path / "run").rollouts.contents(1)
    assert table is not None
    group = next(i for i, about in enumerate(table.summaries) if len(about["outcomes"]) > about["fresh"])
    about = table.summaries[group]
    past = len(about["outcomes"]) - about["fresh"]
    assert set(about["steps"][about["fresh"] :]) == {0}
    visit(page, serve(tmp_path / "run"), f"#/0/group/1/{group}/{about['fresh']}")
    assert page.locator(".samples li.chosen .badge").inner_text() == "an earlier run"
    assert f"{past} replayed from an earlier run" in page.locator(".head .badges").inner_text()
    for text in ("step 0", "age", "null", "undefined"):
        assert text not in re.sub("advantage|page", "", page.inner_text("main"), flags=re.IGNORECASE), text
    shown = run_r3("show", tmp_path / "run", "--group", f"1/{about['query']}").stdout
    assert "replayed from an earlier run: reward" in shown


@pytest.mark.parametrize(
    ("method", "badge", "story"),
    [
        ("luffy", "a demonstration from the data joined", "It was joined by a demonstration from the data."),
        ("sage", "asked with a hint", "It was asked with a hint, since no answer to the plain prompt was right."),
        ("critique", "refines a failure of this step", "A failure of this step was shown"),
    ],
)
def test_groups_that_were_helped_say_how(
    tmp_path: Path, serve: Serve, page: Page, method: str, badge: str, story: str
) -> None:
    settings = overrides(tmp_path, method=method, reward__length_bonus="auto", train__steps=1)
    run_r3("train", "--quiet", *settings, *helped(tmp_path), "method.demonstration.trusted=true")
    table = RunFiles(tmp_path / "run").rollouts.contents(1)
    assert table is not None
    kind = {"sage": "hint"}.get(method, method)
    group, about = next(
        (i, about)
        for i, about in enumerate(table.summaries)
        if about["context"] == kind or (method == "luffy" and about["origins"])
    )
    url = serve(tmp_path / "run")
    visit(page, url, f"#/0/group/1/{group}")
    assert badge in page.locator(".head .badges").inner_text()
    assert story in page.inner_text("main")
    assert "undefined" not in page.inner_text("main")
    shown = run_r3("show", tmp_path / "run", "--group", f"1/{about['query']}").stdout
    if method == "luffy":
        visit(page, url, f"#/0/group/1/{group}/{about['fresh']}")
        assert page.locator(".samples li.chosen .badge").inner_text() == "a demonstration from the data"
        assert "right, a demonstration from the data: reward 1.000" in re.sub(r" \([^)]*\)", "", shown)
