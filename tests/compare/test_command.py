"""`r3 compare` from the command line: equal tokens, resuming, failing cells, and a report from the raw files alone.

Covers r3.compare.runner, r3.compare.records, r3.compare.report, r3.commands.compare.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from r3.cli import main
from r3.compare.analysis import Comparison
from r3.compare.records import condense, read_records
from r3.compare.report import markdown
from r3.compare.runner import held
from r3.run import RunError
from r3.view.runs import MetricsTail
from tests.train.tiny import ROOT, command, overrides, read_metrics, run_r3

TOKENS = 900
OWN = ("run.dir", "run.seed", "train.epochs", "method=")


def settings(folder: Path) -> list[str]:
    """The tiny setting without what a comparison sets itself."""
    return [*(text for text in overrides(folder) if not text.startswith(OWN)), "evaluate.samples=4"]


def arguments(folder: Path, out: Path, *more: str, methods: str = "grpo,r3") -> list[str]:
    budget = ["--tokens", str(TOKENS), "--evaluations", "3", "--methods", methods]
    return ["compare", *settings(folder), *budget, "--jobs", "2", "--out", str(out), *more]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A comparison of two methods and two seeds, stopped by a signal and gone on with: its folders, what it printed."""
    folder = tmp_path_factory.mktemp("compared")
    arguments_ = arguments(folder, folder / "out", "--seeds", "2")
    process = subprocess.Popen(command(*arguments_), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()  # a cell is finished, others are not
    process.terminate()
    rest, _ = process.communicate()
    assert process.returncode == 143
    assert "the same command goes on" in rest
    return folder, folder / "out", first + rest + run_r3(*arguments_).stdout


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((out / "raw").glob("*-seed*.json"))]


def test_every_cell_spends_its_tokens_and_is_evaluated_on_the_grid(compared: tuple[Path, Path, str]) -> None:
    _, out, printed = compared
    assert len(records(out)) == 4
    for record in records(out):
        lines = read_metrics(out / "cells" / record["variant"] / f"seed-{record['seed']}")
        generated = [line.get("tokens/generated", 0) for line in lines]
        assert sum(generated) == record["totals"]["tokens/generated"] >= TOKENS
        assert sum(generated[:-1]) < TOKENS  # it ended with the step that reached the budget
        at = [point["tokens"] for point in record["evaluations"]]
        assert at[0] == 0
        assert at[-1] == sum(generated)
        running = 0
        for line in lines[1:]:  # an evaluation just where a third of the budget was crossed, or at the end
            crossed = running // 300 < (running + line["tokens/generated"]) // 300
            running += line["tokens/generated"]
            assert ("heldout/accuracy" in line) == (crossed or line is lines[-1])
            assert line["tokens/total"] == running
        assert record["problems"] == 4
        assert record["k"] == 4
        for point in record["evaluations"]:  # the results of each problem, which intervals over problems need
            assert len(point["right"]) == 4
            assert sum(point["right"]) / 16 == pytest.approx(point["pass@1"], rel=1e-5)
            assert sum(right > 0 for right in point["right"]) / 4 == point["pass@4"]
    assert printed.count("held-out pass@1") == 4  # no cell was run twice
    assert not list((out / "cells").glob("*/*/checkpoints/*"))


def test_results_of_each_problem_are_no_chart(compared: tuple[Path, Path, str]) -> None:
    path = compared[1] / "cells" / "r3" / "seed-0" / "metrics.jsonl"
    assert any("heldout/right_each" in line for line in read_metrics(path.parent))
    tail = MetricsTail(path)
    tail.refresh()
    assert "heldout/right" in tail.columns
    assert "heldout/right_each" not in tail.columns


def test_cells_with_one_seed_start_from_the_same_accuracy(compared: tuple[Path, Path, str]) -> None:
    starts = defaultdict(set)
    for record in records(compared[1]):
        starts[record["seed"]].add((record["evaluations"][0]["pass@1"], record["evaluations"][0]["pass@4"]))
    assert all(len(values) == 1 for values in starts.values())


def test_finished_cells_are_not_run_again_and_new_ones_join(compared: tuple[Path, Path, str], tmp_path: Path) -> None:
    folder, finished, _ = compared
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    before = {path: path.stat().st_mtime_ns for path in out.glob("cells/*/*/metrics.jsonl")}
    lost = out / "raw" / "r3-seed1.json"  # as if the comparison had been killed before it was written
    numbers = json.loads(lost.read_text())
    lost.unlink()
    done = run_r3(*arguments(folder, out, "--seeds", "2", methods="grpo,r3"))
    assert "3 of 4 cells are finished already" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in before} == before  # the run was over: only its numbers were taken
    assert json.loads(lost.read_text()) == numbers
    refused = run_r3(*arguments(folder, out, "train.learning_rate=0.5"), check=False)
    assert refused.returncode == 2
    assert re.fullmatch(r"r3: .*made otherwise \(common.train.learning_rate 0.001 → 0.5\).*\n", refused.stderr)


def test_a_failing_cell_leaves_the_others_alone(compared: tuple[Path, Path, str], tmp_path: Path) -> None:
    folder, finished, _ = compared
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    broken = out / "cells" / "broken" / "seed-0"
    broken.mkdir(parents=True)
    (broken / "not a run").touch()  # r3 train refuses a directory that holds something else
    more = ["--variant", "broken=grpo,method.replay.k=3", "--seeds", "1"]
    done = run_r3(*arguments(folder, out, *more), check=False)
    assert done.returncode == 1
    assert "broken seed 0 failed" in done.stderr
    assert "not a run directory" in done.stdout
    report = (out / "report.md").read_text()
    assert "**Not finished:**" in report
    assert "broken seed 0" in report


class _Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v and not v.startswith("#")]


def test_the_report_comes_from_the_raw_files_alone(compared: tuple[Path, Path, str], tmp_path: Path) -> None:
    _, finished, _ = compared
    out = tmp_path / "elsewhere"
    shutil.copytree(finished / "raw", out / "raw")
    assert main(["compare", "--report-only", str(out)]) == 0
    for name in ("report.md", "report.html", "summary.json", "figures/pass_at_1.svg"):
        assert (out / name).read_bytes() == (finished / name).read_bytes(), name
    page = _Checker()
    page.feed((out / "report.html").read_text())
    assert page.links == []  # self-contained
    assert page.tags.count("svg") == 6
    report = (out / "report.md").read_text()
    finals = [record["evaluations"] for record in records(finished) if record["variant"] == "grpo"]
    first = sum(points[0]["pass@1"] for points in finals) / len(finals)
    assert f"| grpo | 2 | {100 * first:.1f} " in report
    assert "95 % t interval over seeds and problems" in report
    commands = [line for line in report.splitlines() if line.startswith("r3 train ")]
    assert len(commands) == 2
    assert f"train.tokens={TOKENS}" in shlex.split(commands[0])


def test_a_condensed_comparison_gives_the_same_report(compared: tuple[Path, Path, str], tmp_path: Path) -> None:
    plan, cells = read_records(compared[1])
    condense(plan, cells, tmp_path / "one.json")
    assert read_records(tmp_path / "one.json") == (plan, cells)
    both = [Comparison.read(source) for source in (compared[1], tmp_path / "one.json")]
    assert markdown(both[0], []) == markdown(both[1], [])
    condense(*read_records(tmp_path / "one.json"), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "one.json").read_bytes()
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(RunError, match="not a condensed comparison"):
        read_records(tmp_path / "other.json")


def test_older_cells_without_results_of_each_problem_have_intervals_over_seeds_only(
    compared: tuple[Path, Path, str], tmp_path: Path
) -> None:
    shutil.copytree(compared[1] / "raw", tmp_path / "raw")
    path = tmp_path / "raw" / "r3-seed1.json"
    cell = json.loads(path.read_text())
    cell["evaluations"] = [{k: v for k, v in point.items() if k != "right"} for point in cell["evaluations"]]
    path.write_text(json.dumps(cell))
    report = markdown(Comparison.read(tmp_path), [])
    assert "over seeds only (there are no results of each problem)" in report
    assert "over seeds and problems" not in report


def test_seeds_that_were_looked_at_are_declared_and_told_apart(
    compared: tuple[Path, Path, str], tmp_path: Path
) -> None:
    folder, finished, _ = compared
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    more = arguments(folder, out, "--seeds", "2", "--variant", "young=r3,method.replay.max_age=2", "--no-report")
    plan = ["--looked-at", "0-0"]
    (out / "raw" / "young-seed0.json").write_text(
        (out / "raw" / "r3-seed0.json").read_text().replace('"r3"', '"young"')
    )
    (out / "raw" / "young-seed1.json").write_text(
        (out / "raw" / "r3-seed1.json").read_text().replace('"r3"', '"young"')
    )
    done = run_r3(*more, *plan)
    assert f"note: {out} has results for seed 1 of this task already" in done.stdout
    assert json.loads((out / "raw" / "plan.json").read_text())["looked_at"] == [0]
    assert "note:" not in run_r3(*more, *plan).stdout  # the same command goes on
    assert main(["compare", "--report-only", str(out)]) == 0
    report = (out / "report.md").read_text()
    assert "Settings were chosen on seed 0: only the last table is of these" in report
    first, last = ([line for line in report.splitlines() if line.startswith("| grpo | 1 |")][i] for i in (0, -1))
    finals = {record["seed"]: record["evaluations"][0] for record in records(out) if record["variant"] == "grpo"}
    assert f"| {100 * finals[1]['pass@1']:.1f} |" in first
    assert f"| {100 * finals[0]['pass@1']:.1f} |" in last
    assert set(json.loads((out / "summary.json").read_text())["looked_at"]) == {"grpo", "r3", "young"}


def test_two_names_for_one_method_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(arguments(tmp_path, out, "--variant", "twin=r3")) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"r3: r3 and twin resolve to the same settings: .*\n", said)
    assert not out.exists()


def test_one_comparison_at_a_time_in_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    with held(out):
        assert main(arguments(tmp_path, out)) == 1
    assert "in use by process" in capsys.readouterr().err
    assert not (out / "raw").exists()


def test_without_a_comparison_there_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--report-only", str(tmp_path)]) == 1
    assert "no comparison there" in capsys.readouterr().err
    assert main(["compare", "--methods", "grpo"]) == 2
    assert "needs --tokens" in capsys.readouterr().err
