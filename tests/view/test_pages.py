"""Every page in a real Chromium, over a real run served by a real `r3 view`.

Covers r3.view.api, r3.view.pages, r3.view.queries, r3.commands.view.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from r3.run import RunFiles
from tests.train.tiny import ROOT, command, overrides, run_r3
from tests.view.browser import Page, browser, page, visit
from tests.view.conftest import Serve

__all__ = ["browser", "page"]


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
    run_r3("train", "--quiet", *settings)
    url = serve(tmp_path / "run")
    visit(page, url)
    assert "step 2" in page.locator(".status").inner_text()
    before = page.locator(".chart").nth(3).bounding_box()
    resumed = command("train", "--quiet", "--resume", tmp_path / "run", "train.steps=4000", "train.epochs=3000")
    with subprocess.Popen(resumed, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as going:
        page.wait_for_selector(".status[data-status=running]")
        page.wait_for_function("() => Number(document.querySelector('.tile b').textContent) > 3")
        assert page.locator(".chart").nth(3).bounding_box() == before
        page.keyboard.press("2")  # the newest step is followed
        page.wait_for_function("() => Number(document.querySelector('input[type=number]')?.value) > 4")
        going.terminate()
        going.wait()
    page.wait_for_selector(".status[data-status=stopped]")
