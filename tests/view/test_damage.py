"""Runs that are cut, empty, old, damaged or just beginning: something sensible is shown, and never a traceback.

Covers r3.view.runs.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from r3.run import MetricsLog, RunDirectory, RunFiles
from r3.view.api import Api
from r3.view.runs import ViewedRun, open_runs
from tests.train.tiny import run_r3
from tests.view.browser import Page, browser, page, visit
from tests.view.conftest import Serve

__all__ = ["browser", "page"]


def cut(path: Path, share: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def lose_metrics(run: Path) -> None:
    (run / "metrics.jsonl").unlink()


def damage_metrics(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([*lines[:3], "{broken\n", *lines[3:]]))


def damage_rollouts(run: Path) -> None:
    cut(run / "rollouts" / "step-000005.jsonl.gz", 0.6)
    (run / "rollouts" / "step-000006.jsonl.gz").write_bytes(b"not gzip")


def lose_rollouts(run: Path) -> None:
    shutil.rmtree(run / "rollouts")


def damage_buffer(run: Path) -> None:
    (run / "buffer.sqlite").write_bytes(b"not a database" * 100)


def lose_buffer(run: Path) -> None:
    for path in run.glob("buffer.sqlite*"):
        path.unlink()


def lose_info(run: Path) -> None:
    (run / "run.json").unlink()
    (run / "config.yaml").write_text("method: [unclosed")


def newer_format(run: Path) -> None:
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**info, "format": 9}))


def older_rows(run: Path) -> None:
    """Rollouts as earlier versions wrote them: one gzip member, no table of contents, fewer fields."""
    rollouts = RunFiles(run).rollouts
    for step in rollouts.steps():
        lines = gzip.decompress(rollouts.path(step).read_bytes()).splitlines()
        rows = [json.loads(line) for line in lines]
        for row in rows:
            for name in ("widths", "ratios", "epoch", "drawn_in", "attempt"):
                row.pop(name, None)
            row["id"] = None
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        rollouts.path(step).write_bytes(gzip.compress(data, mtime=0))


CASES: dict[Callable[[Path], None], str] = {
    lose_metrics: "there is no metrics.jsonl yet",
    damage_metrics: "metrics.jsonl is damaged after step 2",
    damage_rollouts: "step-000006.jsonl.gz: damaged",
    lose_rollouts: "",
    damage_buffer: "",
    lose_buffer: "",
    lose_info: "not a run directory (it has no run.json)",
    newer_format: "written in format 9",
    older_rows: "",
}


@pytest.mark.parametrize("harm", CASES, ids=lambda harm: harm.__name__)
def test_a_harmed_run_is_shown_with_what_is_wrong(
    harm: Callable[[Path], None], copy: Path, serve: Serve, page: Page
) -> None:
    harm(copy)
    url = serve(copy)
    for address in ("overview", "steps", "steps/6", "steps/5", "group/5/0/0", "queries", "query/q1", "buffer"):
        visit(page, url, f"#/0/{address}")
        assert page.inner_text("main").strip()
    if CASES[harm]:
        page.wait_for_function("t => document.getElementById('problems').innerText.includes(t)", arg=CASES[harm])
    shown = run_r3("show", copy)
    assert shown.stdout.startswith("Run ")
    assert CASES[harm] in shown.stdout or harm is damage_rollouts
    assert "Traceback" not in shown.stderr


def test_an_older_run_still_has_its_samples(copy: Path, serve: Serve, page: Page) -> None:
    older_rows(copy)
    visit(page, serve(copy), "#/0/group/5/0/0")
    rows = [row for row in RunFiles(copy).rollouts.read(5) if row["group"] == 0]
    assert page.locator(".samples li").count() == len(rows)
    assert page.locator(".response .tok").count() == len(rows[0]["tokens"])
    assert rows[0]["response"] in (page.locator(".response").text_content() or "")


def test_an_empty_run_says_so_and_fills_itself(tmp_path: Path, serve: Serve, page: Page) -> None:
    with RunDirectory.create(tmp_path / "run", "method: {name: r3}\n", seed=0) as run:
        url = serve(tmp_path / "run")
        for name, says in (
            ("overview", "No steps yet"),
            ("steps", "No saved rollouts"),
            ("queries", "No query found"),
            ("buffer", "No buffer to show"),
        ):
            visit(page, url, f"#/0/{name}")
            assert says in page.inner_text("main")
        assert "No steps yet" in run_r3("show", tmp_path / "run").stdout
        visit(page, url)
        run.metrics.append(1, {"accuracy": 0.5, "solve_none": 0.25, "solve_all": 0.25})
        page.wait_for_selector(".chart canvas")
        assert page.locator(".status").get_attribute("data-status") == "running"  # this process holds its lock


def test_a_summary_made_from_rows_is_the_one_that_was_written(copy: Path) -> None:
    """An older file is listed as a newer one is, but for what its rows do not hold."""
    rollouts = RunFiles(copy).rollouts
    written = {step: rollouts.contents(step) for step in rollouts.steps()}
    for step in rollouts.steps():
        rollouts.write(step, list(rollouts.read(step)))  # without a table
    tables = ViewedRun(copy, "run").tables
    for step, table in written.items():
        assert table is not None
        found = tables.table(step).summaries
        for made, kept in zip(found, table.summaries, strict=False):
            assert {**made, "question": kept["question"], "answer": kept["answer"]} == kept


def test_metrics_are_followed_and_going_back_is_noticed(tmp_path: Path) -> None:
    run = ViewedRun(tmp_path, "run")
    run.refresh()
    assert run.metrics.problem
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        log.append(step, {"accuracy": step / 10, "late" if step > 2 else "early": step})
    run.refresh()
    assert run.metrics.problem is None
    assert run.metrics.steps == [1, 2, 3]
    assert run.metrics.columns["late"] == [None, None, 3]
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":4,"accu')  # half a line, as a reader may meet it
    run.refresh()
    assert run.metrics.steps == [1, 2, 3]
    log.close()
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.rewind(1)
    log.append(2, {"accuracy": 0.9})
    log.close()
    before = run.metrics.generation
    run.refresh()
    assert run.metrics.steps == [1, 2]
    assert run.metrics.columns["accuracy"] == [0.1, 0.9]
    assert run.metrics.generation > before


def test_the_index_grows_and_starts_again_when_the_run_goes_back(copy: Path) -> None:
    rollouts = RunFiles(copy).rollouts
    aside = copy / "aside.gz"
    rollouts.path(6).rename(aside)
    run = open_runs([copy])[0]
    assert run.queries.refresh(most=2)
    assert run.queries.indexed == 2
    assert not run.queries.refresh()
    assert run.queries.indexed == 5
    before = {one["query"]: one["tried"] for one in run.queries.listing()["queries"]}
    aside.rename(rollouts.path(6))
    run.queries.refresh()
    assert run.queries.indexed == 6
    after = {one["query"]: one["tried"] for one in run.queries.listing()["queries"]}
    assert sum(after.values()) > sum(before.values())
    rollouts.rewind(5)
    run.queries.refresh()
    assert {one["query"]: one["tried"] for one in run.queries.listing()["queries"]} == before


def test_the_index_agrees_with_the_buffers_ledger(finished: Path) -> None:
    api = Api(open_runs([finished]))
    api.runs[0].queries.refresh()
    for listed in api.answer("queries", {})["queries"]:
        answer = api.answer("query", {"id": listed["query"]})
        visits = [(v["step"], v["context"], v["tried"], v["solved"]) for v in answer["visits"]]
        assert sorted(visits) == sorted((e["step"], e["context"], e["tried"], e["solved"]) for e in answer["ledger"])


def test_opening_one_group_reads_only_its_bytes(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_runs([finished])[0]
    whole = []
    monkeypatch.setattr(run.files.rollouts, "read", whole.append)
    table = run.tables.table(6)
    assert len(run.tables.rows(6, 2)) == len(table.summaries[2]["outcomes"])
    assert run.tables.search(6, "no such text") == []
    assert whole == []
