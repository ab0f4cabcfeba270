"""The arena's choice of rates, its page and its numbers; covers tools/arena.py and tools/arena_page.py.

The cells are made up here: how real ones run is the matter of test_command.py.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from r3.compare.analysis import Comparison
from r3.compare.plan import RATE, Plan
from r3.compare.records import BINS, SERIES, TOTALS, Record, record_path, write_record
from r3.compare.runner import Outcome, cells_of
from r3.method.presets import METHODS
from tools import arena, arena_page

BEST = {"grpo": 1e-4, "maxrl": 3e-4, "rl-zvp": 3e-5}
STRENGTH = {"grpo": 0.3, "maxrl": 0.6, "rl-zvp": 0.3, "luffy": 0.5, "sage": 0.4}
HELPED = {"luffy": 1e-4, "sage": 3e-4}
PROBLEMS, K = 8, 16


def made_up(variant: str, seed: int, rate: float, tokens: int, command: str) -> Record:
    """A cell that ends where the method's strength is, less what a wrong rate costs and plus a little by seed."""
    method = variant.partition("-at-")[0]
    final = STRENGTH[method] * (1 if rate == {**BEST, **HELPED}[method] else 0.5)
    evaluations = []
    for place, share in enumerate((0.0, 0.5, 1.0)):
        right = [round(K * (0.05 + share * final)) + (seed + problem + place) % 2 for problem in range(PROBLEMS)]
        evaluations.append({
            "step": place, "tokens": tokens * share, "pass@1": sum(right) / K / PROBLEMS,
            f"pass@{K}": sum(map(bool, right)) / PROBLEMS, "truncated": 0.0, "length": 9.0, "right": right,
        })  # fmt: skip
    return Record(
        variant, seed, command, K, PROBLEMS, evaluations,
        {"tokens": [float(bin) for bin in range(BINS)], **{key: [0.5] * BINS for key in SERIES}},
        {"steps": 2, **dict.fromkeys(TOTALS, 7.0)}, {"torch": "0"},
    )  # fmt: skip


class Runner:
    """In the place of `run_cells`: writes made-up numbers of every cell that has none."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.fails: set[str] = set()
        self.stops_after: int | None = None

    def __call__(self, plan: Plan, out: Path, **_: Any) -> Outcome:
        failed = []
        for cell in cells_of(plan, out):
            if record_path(out, cell.variant.name, cell.seed).exists():
                continue
            if self.stops_after is not None and len(self.ran) >= self.stops_after:
                return Outcome(failed, "SIGTERM")
            if str(cell) in self.fails:
                failed.append(cell)
                continue
            self.ran.append(str(cell))
            rate = plan.config(cell.variant).train.learning_rate
            command = plan.command(cell.variant, cell.seed)
            write_record(made_up(cell.variant.name, cell.seed, rate, plan.tokens, command), out)
        return Outcome(failed, None)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    found = Runner()
    monkeypatch.setattr(arena, "run_cells", found)
    return found


def command(folder: Path, *more: str) -> list[str]:
    paths = ["--out", str(folder / "cells"), "--results", str(folder / "results")]
    few = ["--beds", "sums", "--methods", ",".join(BEST), "--seeds", "4", "--evaluations", "2"]
    return [*few, *paths, *more]


def results(folder: Path) -> Path:
    (folder / "results" / "raw").mkdir(parents=True)
    (folder / "results" / "arena.md").write_text(f"# Arena\n\nWords.\n\n{arena_page.MARK}\n\nOld.\n")
    return folder / "results"


def test_every_preset_competes_unless_it_is_said_why_not() -> None:
    assert arena.contestants()[0] == "grpo"
    assert set(METHODS) - set(arena.contestants()) == {*arena.ABLATIONS, *arena.HELPED}
    assert set(arena.methods_of(arena.BEDS["sums-with-help"], None)) == {"grpo", "r3", *arena.HELPED}


@pytest.mark.parametrize("name", arena.BEDS)
def test_beds_and_rates_of_all_methods_are_plans_that_can_run(name: str) -> None:
    bed = arena.BEDS[name]
    methods = arena.methods_of(bed, None)
    plan = arena.tuning_plan(bed, methods, [100, 101])
    assert len(plan.cells) == 2 * 3 * len(methods)
    rates = {plan.config(variant).train.learning_rate for variant in plan.variants}
    assert rates == set(bed.rates)
    assert {plan.config(variant).train.updates_per_batch for variant in plan.variants} == {2}


def test_the_lessons_of_the_spelling_model_are_the_recipes_commands() -> None:
    said = (
        (Path(__file__).parents[2] / "recipes" / "sft-spelling-tiny.yaml")
        .read_text()
        .split("model:")[0]
        .replace("\\\n#", "")
    )
    commands = [shlex.split(line.split("  word")[0].strip("# ")) for line in said.splitlines() if line[:7] == "#   r3 "]
    lessons = [{"r3", *lesson.arguments} - {"--quiet"} for lesson in arena.SPELLING]
    assert [set(command) for command in commands] == lessons


def test_each_method_gets_its_best_rate_and_the_page_says_so(tmp_path: Path, runner: Runner) -> None:
    folder = results(tmp_path)
    assert arena.main(command(tmp_path)) == 0
    assert len(runner.ran) == 3 * 3 * 2 + 3 * 4
    c = arena_page.beds(folder)["sums"]
    assert {name: c.plan["variants"][name][RATE] for name in c.names} == BEST
    assert c.plan["common"]["train"]["learning_rate"] == 1e-4  # the recipe's
    text = (folder / "arena.md").read_text()
    assert text.startswith("# Arena\n\nWords.\n")
    assert "Old." not in text
    assert text == arena_page.page(text, arena_page.beds(folder))
    assert (folder / "arena.svg").exists()
    row = next(line for line in text.splitlines() if line.startswith("| maxrl | 0.0003"))
    assert "**<0.001**" in row
    (ran,) = [line for line in text.splitlines() if line.startswith("r3 train")]
    assert f"{RATE}=0.0001" in ran


def test_it_goes_on_where_it_was_stopped(tmp_path: Path, runner: Runner) -> None:
    folder = results(tmp_path)
    runner.stops_after = 5
    assert arena.main(command(tmp_path)) == 143
    assert not list((folder / "raw").iterdir())
    runner.stops_after = None
    assert arena.main(command(tmp_path)) == 0
    assert len(runner.ran) == len(set(runner.ran)) == 3 * 3 * 2 + 3 * 4


def test_predictions_can_be_written_between_the_rates_and_the_table(tmp_path: Path, runner: Runner) -> None:
    results(tmp_path)
    assert arena.main(command(tmp_path, "--stages", "tune")) == 0
    assert len(runner.ran) == 3 * 3 * 2
    assert arena.main(command(tmp_path, "--stages", "final,page")) == 0
    assert len(runner.ran) == 3 * 3 * 2 + 3 * 4


def test_a_rate_that_failed_is_not_taken_and_a_cell_that_failed_is_told(
    tmp_path: Path, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = results(tmp_path)
    runner.fails = {"maxrl-at-0.0003 seed 101", "rl-zvp seed 2"}
    assert arena.main(command(tmp_path)) == 1
    assert "rl-zvp seed 2 failed" in capsys.readouterr().err
    c = arena_page.beds(folder)["sums"]
    assert c.plan["variants"]["maxrl"][RATE] == 3e-5  # the lower of two equal ones
    assert "**Not finished:** rl-zvp seed 2." in (folder / "arena.md").read_text()


def test_methods_with_help_have_a_table_of_their_own_and_share_cells(tmp_path: Path, runner: Runner) -> None:
    folder = results(tmp_path)
    for beds in ("sums", "sums-with-help", "sums,sums-with-help"):  # whatever is run first, and all of it again
        methods = ",".join([*BEST, *HELPED])
        assert arena.main([*command(tmp_path), "--beds", beds, "--methods", methods]) == 0
        assert len(runner.ran) == len(set(runner.ran))
    assert len(runner.ran) == 5 * 3 * 2 + 5 * 4
    found = arena_page.beds(folder)
    assert {name: set(c.names) for name, c in found.items()} == {
        "sums": set(BEST),
        "sums-with-help": {"grpo", *HELPED},
    }
    assert {name: c.plan["variants"][name][RATE] for c in found.values() for name in c.names} == {**BEST, **HELPED}
    alone, helped = found.values()
    assert [r.as_dict() for r in alone.records["grpo"]] == [r.as_dict() for r in helped.records["grpo"]]
    assert arena_page.tests_of(helped)["luffy"][1] >= arena_page.tests_of(helped)["luffy"][0].p_t
    text = (folder / "arena.md").read_text()
    sums, with_help = text.split("## The same sums, with demonstrations")
    assert "| luffy |" not in sums
    assert "| maxrl |" not in with_help
    assert "LUFFY trains on a right working of every sum" in " ".join(with_help.split())


def test_a_table_without_any_of_the_named_methods_is_left_out(
    tmp_path: Path, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = results(tmp_path)
    assert arena.main([*command(tmp_path), "--beds", "sums,sums-with-help", "--methods", "grpo,maxrl"]) == 0
    assert "sums-with-help: none of --methods is in its table" in capsys.readouterr().out
    assert list(arena_page.beds(folder)) == ["sums"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--methods", "r3"], "grpo must be among them"),
        (["--methods", "grpo,r4"], "--methods: no 'r4'; there are grpo"),
        (["--beds", "moon"], "--beds: no 'moon'; there are sums, sums-with-help, spelling"),
        (["--stages", "all"], "--stages: no 'all'"),
        (["--jobs", "0"], "--jobs 0"),
    ],
)
def test_bad_options_are_refused(
    more: Sequence[str], said: str, tmp_path: Path, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    assert arena.main(command(tmp_path, *more)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not runner.ran
    assert not list(tmp_path.iterdir())


def test_the_tables_numbers_are_those_of_the_cells(tmp_path: Path, runner: Runner) -> None:
    folder = results(tmp_path)
    assert arena.main(command(tmp_path)) == 0
    cells = json.loads((folder / "raw" / "arena-sums.json").read_text())["cells"]
    finals: dict[str, list[float]] = {}
    for cell in cells:
        finals.setdefault(cell["variant"], []).append(cell["evaluations"][-1]["pass@1"])
    text = (folder / "arena.md").read_text()
    for name, values in finals.items():
        row = next(line for line in text.splitlines() if re.match(rf"\| {name} \| \S+ \| \S+ \[", line))
        assert f"| {100 * sum(values) / len(values):.1f} [" in row
    differences = [ours - theirs for ours, theirs in zip(finals["maxrl"], finals["grpo"], strict=True)]
    found = arena_page.tests_of(Comparison.read(folder / "raw" / "arena-sums.json"))
    assert found["maxrl"][0].difference.value == pytest.approx(sum(differences) / 4)
    assert set(found) == {"maxrl", "rl-zvp"}
    assert found["maxrl"][1] == pytest.approx(2 * found["maxrl"][0].p_t)
