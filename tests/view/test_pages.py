"""Every page in a real Chromium, over a real run served by a real `r3 view`.

Covers r3.commands.view, r3.view.api, r3.view.pages, r3.view.queries.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from r3.cli import main
from r3.run import RunFiles
from tests.train.tiny import ROOT, command, helped, overrides, run_r3
from tests.view.conftest import Page, Serve, visit


def groups_of(run: Path) -> list[tuple[int, int, dict]]:  # type: ignore[type-arg]
    """Step, number and summary of every group saved in full."""
    rollouts = RunFiles(run).rollouts
    tables = {step: rollouts.contents(step) for step in rollouts.steps()}
    return [
        (step, i, about)
        for step, table in tables.items()
        if table
        for i, about in enumerate(table.summaries)
        if table.places[i]
    ]


def test_the_overview_draws_every_chart_and_opens_a_step(finished: Path, serve: Serve, page: Page) -> None:
    visit(page, serve(finished))
    assert page.locator(".grid").first.locator(".chart").count() == 17
    titles = page.locator(".chart h3").all_inner_texts()
    for title in ("Accuracy", "Reward", "Groups", "Truncated", "Entropy", "Length", "Seconds per step", "What R³ did"):
        assert any(text.startswith(title) for text in titles)
    assert page.locator(".grid").first.locator("canvas").count() == 17
    assert "finished · step 6 of 6" in page.locator(".status").inner_text()
    page.keyboard.press("ArrowRight")  # the cursor is one for all charts
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => new Set([...document.querySelectorAll('.chart')].map(c => c.dataset.step)).size <= 2")
    before = page.locator(".chart").first.bounding_box()
    page.locator("#smoothing").fill("0.6")
    assert page.locator("output").inner_text() == "0.60"
    assert page.locator(".chart").first.bounding_box() == before  # nothing moved
    page.keyboard.press("Escape")
    page.locator("h3").first.click()
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-page=steps]")


def test_a_chart_zooms_with_all_others_and_back(finished: Path, serve: Serve, page: Page) -> None:
    visit(page, serve(finished))
    box = page.locator(".chart .u-over").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=4)
    page.mouse.up()
    page.wait_for_selector("#reset-zoom:enabled")
    assert page.locator("[data-page=overview]").count() == 1  # a drag is not a click
    page.locator("#reset-zoom").click()
    page.wait_for_selector("#reset-zoom:disabled")


def test_steps_list_every_group_and_filters_choose(finished: Path, serve: Serve, page: Page) -> None:
    url = serve(finished)
    table = RunFiles(finished).rollouts.contents(5)
    assert table is not None
    visit(page, url, "#/0/steps/5")
    rows = page.locator("tr[data-row]")
    assert rows.count() == len(table.summaries)  # also those of which only the summary was saved
    assert page.locator("tr[data-row]").first.locator(".dots svg").count() == len(table.summaries[0]["outcomes"])
    none = sum(not any(about["outcomes"][: about["fresh"]]) for about in table.summaries)
    page.locator("button[data-value=solve-none]").click()
    assert page.locator("tr[data-row]").count() == none
    page.locator("button[data-value=all]").click()
    query = table.summaries[0]["query"]
    page.keyboard.press("/")
    page.keyboard.type(table.summaries[0]["question"].upper())
    page.wait_for_function("n => document.querySelectorAll('tr[data-row]').length < n", arg=len(table.summaries))
    assert query in page.locator("tr[data-row]").first.inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-page=group]")
    page.keyboard.press("Escape")
    page.wait_for_selector("[data-page=steps]")


def test_a_replayed_sample_tells_its_age(finished: Path, serve: Serve, page: Page) -> None:
    step, number, about = next(g for g in groups_of(finished) if len(g[2]["outcomes"]) > g[2]["fresh"])
    place = about["fresh"]
    visit(page, serve(finished), f"#/0/group/{step}/{number}/{place}")
    age = about["versions"][0] - about["versions"][place]
    assert f"step {about['steps'][place]}, age {age}" in page.locator(".samples li.chosen").inner_text()
    assert "Replay brought in" in page.locator(".story").inner_text()
    page.keyboard.press("k")
    page.wait_for_selector(f".samples li:nth-child({place}).chosen")


def test_a_sample_is_coloured_by_token(finished: Path, serve: Serve, page: Page) -> None:
    step, number, about = next(g for g in groups_of(finished) if g[2]["advantages"][0])
    visit(page, serve(finished), f"#/0/group/{step}/{number}/0")
    row = next(row for row in RunFiles(finished).rollouts.read(step) if row["group"] == number)
    tokens = page.locator(".response .tok")
    assert tokens.count() == len(row["tokens"])
    assert "".join(tokens.all_inner_texts()).startswith(row["response"].rstrip()[:4])
    assert page.locator(".response .tok.peak").count() == max(1, int(0.25 * len(row["tokens"])))
    paints = set()
    for measure in ("entropies", "logprobs", "ratios", "advantage", "none"):
        page.locator(f".heat button[data-value={measure}]").click()
        paints.add(
            page.evaluate("() => [...document.querySelectorAll('.tok')].map(t => t.style.backgroundColor).join()")
        )
    assert len(paints) == 5
    tokens.first.hover()
    assert f"id {row['tokens'][0]}" in page.locator(".facts").inner_text()
    assert row["verdict"] in page.locator(".factrow").inner_text()
    assert f"{about['advantages'][0]:.2f}"[-4:] in page.locator(".factrow").inner_text()


def test_the_ranking_is_drawn_in_its_dominance_order(finished: Path, serve: Serve, page: Page) -> None:
    ranked = [g for g in groups_of(finished) if any(paid is not None for paid in g[2]["ranking"])]
    step, number, about = ranked[0]
    best = max((paid, i) for i, paid in enumerate(about["ranking"]) if paid is not None)[1]
    visit(page, serve(finished), f"#/0/group/{step}/{number}/{best}")
    count = sum(paid is not None for paid in about["ranking"])
    assert page.locator(".scatter .point.ranked").count() == count
    told = page.locator(".ranking p").inner_text()
    match = re.search(rf"Sample {best} dominates (\d) of the {count} ranked", told)
    assert match
    assert page.locator(".scatter .beats.mine").count() == int(match[1]) > 0


def test_a_reflection_shows_the_attempt_and_what_changed(finished: Path, serve: Serve, page: Page) -> None:
    step, number, about = next(g for g in groups_of(finished) if g[2]["context"] == "reflection")
    visit(page, serve(finished), f"#/0/group/{step}/{number}/1")
    card = page.locator("section.card", has_text="Reflection")
    assert f"attempt #{about['shown']}" in card.inner_text()
    rows = [row for row in RunFiles(finished).rollouts.read(step) if row["group"] == number]
    assert card.locator("pre").inner_text().strip() == rows[0]["attempt"]["response"].strip()
    kept = "".join(card.locator(".diff > :not(del)").all_text_contents())
    assert kept == rows[1]["response"]


def test_a_query_through_time(finished: Path, serve: Serve, page: Page) -> None:
    url = serve(finished)
    visit(page, url, "#/0/queries")
    assert page.locator("tr[data-row]").count() == 8
    page.locator("button[data-value=easiest]").click()
    page.wait_for_selector("button[data-value=easiest][aria-pressed=true]")
    page.locator("tr[data-row] a").first.click()
    page.wait_for_selector("[data-page=query]")
    assert "First solved at step" in page.locator(".story").inner_text()
    assert page.locator("tr[data-row]").count() >= 3  # one a group, three epochs
    assert page.locator(".chart canvas").count() == 1


def test_the_buffer_page(finished: Path, serve: Serve, page: Page) -> None:
    visit(page, serve(finished), "#/0/buffer")
    assert page.locator(".chart canvas").count() == 3
    assert page.locator(".tile").first.inner_text().startswith("samples")
    page.locator("tr[data-row] a").first.click()
    page.wait_for_selector("[data-page=query]")


def test_two_runs_are_drawn_over_each_other(finished: Path, copy: Path, serve: Serve, page: Page) -> None:
    visit(page, serve(finished, copy))
    assert page.locator(".run").count() == 2
    page.locator(".run input").first.uncheck()
    assert page.locator(".chart").nth(1).locator(".legend .entry").count() == 1
    page.locator("header select").select_option("1")
    page.wait_for_function("() => location.hash.startsWith('#/1/')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_a_phone(finished: Path, serve: Serve, page: Page, scheme: str) -> None:
    page.set_viewport_size({"width": 390, "height": 780})
    page.emulate_media(color_scheme=scheme)
    url = serve(finished)
    for address in ("overview", "steps/5", "group/5/0/0", "queries", "query/q1", "buffer", "settings"):
        visit(page, url, f"#/0/{address}")
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390, address


def test_the_theme_and_the_list_of_keys(finished: Path, serve: Serve, page: Page) -> None:
    visit(page, serve(finished))
    light = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") != light
    page.keyboard.press("?")
    assert page.locator("dialog[open] tr").count() == 10
    page.keyboard.press("Escape")
    for key, name in (("2", "steps"), ("3", "queries"), ("4", "buffer"), ("5", "settings"), ("1", "overview")):
        page.keyboard.press(key)
        page.wait_for_selector(f"[data-page={name}]")


def test_a_run_in_progress_appears_as_it_goes_on(model: Path, tmp_path: Path, serve: Serve, page: Page) -> None:
    """The viewer is open before the second half of the run: new steps come without a reload, and nothing moves."""
    settings = overrides(model, run__dir=tmp_path / "run", train__steps=2)
    assert main(["train", "--quiet", *settings]) == 0
    url = serve(tmp_path / "run")
    visit(page, url)
    assert "step 2" in page.locator(".status").inner_text()
    before = page.locator(".chart").nth(3).bounding_box()
    resumed = command("train", "--quiet", "--resume", tmp_path / "run", "train.steps=4000", "train.epochs=3000")
    with subprocess.Popen(resumed, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as going:
        try:
            page.wait_for_selector(".status[data-status=running]")
            page.wait_for_function("() => Number(document.querySelector('.tile b').textContent) > 3")
            assert page.locator(".chart").nth(3).bounding_box() == before
            page.keyboard.press("2")  # the newest step is followed
            page.wait_for_function("() => Number(document.querySelector('input[type=number]')?.value) > 4")
        finally:
            going.terminate()  # or a test that fails would wait for four thousand steps
    page.wait_for_selector(".status[data-status=stopped]")


# A group in a real Chromium: what answers were compared with, what each was worth, where past ones come from.


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
    assert main(["train", "--quiet", *settings]) == 0
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
    assert main(["train", "--quiet", *settings, *helped(tmp_path), "method.demonstration.trusted=true"]) == 0
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


# What the mechanisms bring, over a run: charts of the yields that a run has metrics of.


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
    assert main(["train", "--quiet", *[setting for setting in settings if not setting.startswith("method.")]]) == 0
    visit(page, serve(tmp_path / "run"))
    titles = page.locator(".yields h3").all_inner_texts()
    # What GRPO's own answers tell: the AUC that a ranking would have, and right answers per token.
    assert {title.split("\n")[0].partition(" of the")[0] for title in titles} <= {"AUC", "Yield: plain"}, titles
