"""`r3 compare` from the command line: plans, equal tokens, resuming, failing cells, reports from raw files.

Covers r3.commands.compare, r3.compare.report, r3.compare.plan, r3.compare.records, r3.compare.runner.
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
from r3.compare.plan import Plan, make_plan, parse_variant, save_plan
from r3.compare.records import condense, read_records
from r3.compare.report import markdown
from r3.compare.runner import held
from r3.config import load_config
from r3.config_text import describe
from r3.errors import ConfigError
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


def test_finished_cells_are_not_run_again_and_new_ones_join(
    compared: tuple[Path, Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, finished, _ = compared
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    before = {path: path.stat().st_mtime_ns for path in out.glob("cells/*/*/metrics.jsonl")}
    lost = out / "raw" / "r3-seed1.json"  # as if the comparison had been killed before it was written
    numbers = json.loads(lost.read_text())
    lost.unlink()
    assert main(arguments(folder, out, "--seeds", "2", methods="grpo,r3")) == 0
    assert "3 of 4 cells are finished already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in before} == before  # the run was over: only its numbers were taken
    assert json.loads(lost.read_text()) == numbers
    assert main(arguments(folder, out, "train.learning_rate=0.5")) == 2
    refusal = capsys.readouterr().err
    assert re.fullmatch(r"r3: .*made otherwise \(common.train.learning_rate 0.001 → 0.5\).*\n", refusal)


def test_a_failing_cell_leaves_the_others_alone(
    compared: tuple[Path, Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, finished, _ = compared
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    broken = out / "cells" / "broken" / "seed-0"
    broken.mkdir(parents=True)
    (broken / "not a run").touch()  # r3 train refuses a directory that holds something else
    more = ["--variant", "broken=grpo,method.replay.k=3", "--seeds", "1"]
    assert main(arguments(folder, out, *more)) == 1
    said = capsys.readouterr()
    assert "broken seed 0 failed" in said.err
    assert "not a run directory" in said.out
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
    compared: tuple[Path, Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    assert main([*more, *plan]) == 0
    assert f"note: {out} has results for seed 1 of this task already" in capsys.readouterr().out
    assert json.loads((out / "raw" / "plan.json").read_text())["looked_at"] == [0]
    assert main([*more, *plan]) == 0  # the same command goes on
    assert "note:" not in capsys.readouterr().out
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


# What a comparison may be: variants, equal settings, and which changes of a begun one are refused.


def plan(**changes: Any) -> Plan:
    settings = {"methods": ["grpo", "r3"], "variants": [], "seeds": range(2), "tokens": 1_000, "evaluations": 4}
    overrides = changes.pop("overrides", ["train.learning_rate=1e-3"])
    return make_plan(None, overrides, **{**settings, "baseline": None, **changes})


def test_all_cells_of_a_plan_differ_in_the_method_and_the_seed_alone() -> None:
    made = plan(variants=["young=r3,method.replay.max_age=8,method.advantage.cap=2"])
    configs = {variant.name: made.config(variant).model_dump() for variant, _ in made.cells}
    assert list(configs) == ["grpo", "r3", "young"]
    assert {name: config["method"]["replay"]["max_age"] for name, config in configs.items()} == {
        "grpo": None, "r3": None, "young": 8,
    }  # fmt: skip
    rest = [{key: value for key, value in config.items() if key != "method"} for config in configs.values()]
    assert rest[0] == rest[1] == rest[2]
    assert rest[0]["train"]["tokens"] == 1_000
    assert rest[0]["evaluate"]["every_tokens"] == 250
    assert [seed for _, seed in made.cells] == [0, 0, 0, 1, 1, 1]


def test_a_variant_may_have_a_learning_rate_that_was_tuned_for_it(tmp_path: Path) -> None:
    made = plan(methods=["grpo"], variants=["reinforce++=reinforce++,train.learning_rate=3e-4", "r3=r3"])
    rates = {variant.name: made.config(variant).train.learning_rate for variant in made.variants}
    assert rates == {"grpo": 1e-3, "reinforce++": 3e-4, "r3": 1e-3}
    saved = save_plan(made, tmp_path)
    assert saved["common"]["train"]["learning_rate"] == 1e-3
    assert {name: variant.get("train.learning_rate") for name, variant in saved["variants"].items()} == {
        "grpo": None, "reinforce++": 3e-4, "r3": None,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"reinforce\+\+: train.learning_rate 0.0003 → 0.01"):
        save_plan(plan(methods=[], variants=["reinforce++=reinforce++,train.learning_rate=1e-2"]), tmp_path)
    assert save_plan(plan(methods=[], variants=["reinforce++=reinforce++,train.learning_rate=3e-4"]), tmp_path)


def test_variants_of_a_whole_config_are_those_methods(tmp_path: Path) -> None:
    """A printed config names every mechanism; its tuning is shared, its mechanisms are the variants' own."""
    recipe = tmp_path / "my.yaml"
    recipe.write_text(describe(load_config(None, ["method.reflection.give_up_after=8"])))
    made = make_plan(
        str(recipe),
        ["method.mask_truncated=false", "method.advantage.cap=2"],
        methods=["grpo", "r3", "r3-no-replay", "dapo"],
        variants=["more=grpo,method.replay=on"],
        seeds=range(1),
        tokens=100,
        evaluations=1,
        baseline=None,
    )
    methods = {variant.name: made.config(variant).method for variant in made.variants}
    on = {
        name: [part for part in ("replay", "reflection", "ranking", "resample") if getattr(method, part).enabled]
        for name, method in methods.items()
    }
    assert on == {
        "grpo": [],
        "r3": ["replay", "reflection", "ranking"],
        "r3-no-replay": ["reflection", "ranking"],
        "dapo": ["resample"],
        "more": ["replay"],
    }
    assert all(method.reflection.give_up_after == 8 for method in methods.values())
    assert all(method.advantage.cap == 2 for method in methods.values())


def test_what_is_set_for_all_lies_over_every_method() -> None:
    made = plan(overrides=["method.replay=off", "reward.length_bonus=true"], methods=["grpo", "r3"])
    assert not any(made.config(variant).method.replay.enabled for variant in made.variants)
    assert all(made.config(variant).reward.length_bonus for variant in made.variants)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"methods": ["gpro"]}, "no method 'gpro'; there are grpo, dapo"),
        ({"methods": []}, "nothing to compare"),
        ({"overrides": ["method=grpo"]}, "name methods with --methods or --variant"),
        ({"baseline": "dapo"}, "--baseline dapo is none of the variants: grpo, r3"),
        ({"variants": ["r3=r3"]}, "two variants are called 'r3'"),
        ({"variants": ["fast=r3,train.warmup_updates=1"]}, "in method.*, buffer.* and train.learning_rate alone"),
        ({"variants": ["a=r3,train.learning_rate=1e-3"]}, "r3 and a resolve to the same settings"),
        ({"variants": ["nothing"]}, "--variant is written name=preset,key=value"),
        ({"variants": ["x=r3,method.replay.kk=1"]}, "did you mean method.replay.k"),
        ({"variants": ["twin=r3"]}, "r3 and twin resolve to the same settings"),
        ({"variants": ["a=dapo,method.replay.k=3", "b=dapo,method.replay.k=3"]}, "a and b resolve to the same"),
        ({"overrides": ["task.heldout=0"]}, "keep some problems apart"),
        ({"overrides": ["train.decay=cosine"]}, "set train.decay=constant"),
    ],
)
def test_what_cannot_be_compared_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        plan(**change)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_values_with_commas_stay_whole() -> None:
    made = parse_variant("x=r3,method.reflection.guidance=try, again,method.replay.k=4")
    assert made.overrides == ("method=r3", "method.reflection.guidance=try, again", "method.replay.k=4")


def test_settings_that_an_older_version_did_not_have_change_nothing_while_they_are_off(tmp_path: Path) -> None:
    save_plan(plan(methods=["grpo", "exgrpo"]), tmp_path)
    path = tmp_path / "raw" / "plan.json"
    older = json.loads(path.read_text())
    for variant in older["variants"].values():
        del variant["method"]["revisit"], variant["method"]["resample"]["fill"]
    del older["common"]["train"]["max_bad_updates"]
    path.write_text(json.dumps(older))
    assert save_plan(plan(methods=["grpo"]), tmp_path)
    path.write_text(json.dumps(older))
    with pytest.raises(ConfigError, match=r"exgrpo: method\.revisit None →"):  # which has it on
        save_plan(plan(methods=["exgrpo"]), tmp_path)


def test_seeds_and_variants_may_join_and_nothing_else_may_change(tmp_path: Path) -> None:
    save_plan(plan(seeds=range(3)), tmp_path)
    save_plan(plan(methods=["dapo"], seeds=[1, 5], overrides=["train.learning_rate=1e-3", "run.threads=1"]), tmp_path)
    saved = json.loads((tmp_path / "raw" / "plan.json").read_text())
    assert list(saved["variants"]) == ["grpo", "r3", "dapo"]
    assert saved["seeds"] == [0, 1, 2, 5]
    for change, said in (
        ({"tokens": 2_000}, "tokens 1000 → 2000"),
        ({"overrides": []}, "train.learning_rate 0.001 → 0.0002"),
        ({"overrides": ["train.learning_rate=1e-3", "method.replay.k=3"]}, "grpo: method.replay.k 2 → 3"),
    ):
        with pytest.raises(ConfigError) as refusal:
            save_plan(plan(**change), tmp_path)
        assert said in str(refusal.value)
        assert "choose another --out" in str(refusal.value)
    assert json.loads((tmp_path / "raw" / "plan.json").read_text()) == saved


@pytest.mark.parametrize(
    ("override", "option"),
    [
        ("train.steps=50", "--tokens"),
        ("train.epochs=2", "--tokens"),
        ("train.tokens=5000", "--tokens"),
        ("evaluate.every_tokens=10", "--evaluations"),
        ("run.seed=3", "--seeds"),
        ("run.dir=mine", "--out"),
    ],
)
def test_what_the_plan_would_replace_is_refused(override: str, option: str) -> None:
    with pytest.raises(ConfigError, match=f"{override} would not act: {option} says that for every cell"):
        plan(overrides=[override])
