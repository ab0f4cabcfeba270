"""Runs that are cut, empty, old, damaged, hostile or just beginning: something sensible is shown, never a traceback.

Covers r3.view.runs.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from r3.cli import main
from r3.run import MetricsLog, RunDirectory, RunFiles
from r3.view.api import Api
from r3.view.runs import ViewedRun, open_runs
from r3.view.show import one_line, visible
from tests.train.tiny import run_r3, save_model
from tests.view.conftest import Page, Serve, visit


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


# What a run directory may hold besides runs, and more visitors than there are threads.


NAMES = ["run.json", "config.yaml", "metrics.jsonl", "buffer.sqlite", "lock", "rollouts/step-000002.jsonl.gz"]


def pipe(path: Path) -> None:
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("special", [pipe, zeros])
@pytest.mark.parametrize("name", NAMES)
def test_special_files_neither_hang_nor_fill_memory(name: str, special: object, copy: Path, tmp_path: Path) -> None:
    """Each command ends by itself within 2 GB more than Python and torch take, with a line if with an error."""
    (copy / name).unlink()
    special(copy / name)  # type: ignore[operator]
    shown = limited("show", str(copy))
    assert shown.returncode in (0, 1), shown.stderr
    assert "Traceback" not in shown.stderr
    exported = limited("view", str(copy), "--export", str(tmp_path / "page.html"))
    assert exported.returncode in (0, 1), exported.stderr
    assert "Traceback" not in exported.stderr
    assert "unexpected" not in shown.stderr + exported.stderr


def limited(*arguments: str) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (2 * 2**30, 2 * 2**30))

    return subprocess.run(
        [sys.executable, "-m", "r3", *arguments],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )


def test_a_thousand_connections_at_once_all_get_an_answer(finished: Path, serve: Serve) -> None:
    """Those beyond the threads are told that it is busy; afterwards it serves as before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4000:
        pytest.skip("needs two thousand open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4000, hard))
    address = urlsplit(serve(finished))
    assert address.hostname is not None
    assert address.port is not None
    place = (address.hostname, address.port)
    request = f"GET /api/runs HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode()
    sockets = []
    try:
        for _ in range(1000):
            connection = socket.create_connection(place, timeout=120)
            connection.sendall(request)
            sockets.append(connection)
        answers = Counter(connection.recv(12) for connection in sockets)
    finally:
        for connection in sockets:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sum(answers.values()) == 1000
    assert set(answers) <= {b"HTTP/1.1 200", b"HTTP/1.1 404", b"HTTP/1.1 503"}, answers
    assert answers[b"HTTP/1.1 503"] < 1000
    with socket.create_connection(place, timeout=120) as connection:
        connection.sendall(request)
        assert connection.recv(8) == b"HTTP/1.1"


def test_a_models_own_code_is_not_run_unless_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(tmp_path / "model")
    trace = tmp_path / "it-ran"
    (folder / "configuration_own.py").write_text(
        f"open({str(trace)!r}, 'w').close()\nfrom transformers import LlamaConfig\nclass Own(LlamaConfig):\n    pass\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["train", "--dry-run", f"model.path={folder}", "task.name=arithmetic"]) == 2
    line = capsys.readouterr().err.strip()
    assert "model.trust_remote_code=true" in line
    assert "\n" not in line
    assert not trace.exists()


# Model text that would rather be something else: on every page, in the export and in the terminal it stays text.


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
