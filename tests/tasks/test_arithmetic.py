"""The embedded task and model: splits that cannot leak, a judge that cannot be fooled, and the state it starts from."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from r3.cli import main
from r3.config import embedded_recipe
from r3.errors import TaskError
from r3.method.settings import ReflectionSettings
from r3.policy.model import EMBEDDED
from r3.tasks.arithmetic import ArithmeticTask, Problem, draw_problem, judge, problem_set, split_of
from r3.tasks.settings import ArithmeticSettings
from tests.train.tiny import read_metrics
from tools.writer import CAREFUL, Habits, write_working

TERMS = st.lists(st.integers(1, 9), min_size=2, max_size=10).map(tuple)


def test_splits_are_disjoint_whatever_the_seeds() -> None:
    seen = {
        split: {p.question for seed in range(5) for p in problem_set(seed, 200, (3, 5, 8), split)}
        for split in ("train", "heldout", "warm")
    }
    assert not seen["train"] & seen["heldout"]
    assert not seen["train"] & seen["warm"]
    assert all(split_of(question) == split for split, questions in seen.items() for question in questions)


def test_the_task_is_seeded_and_holds_out_the_same_problems() -> None:
    settings = ArithmeticSettings(size=50, heldout=40)
    one, same, other = ArithmeticTask(settings, 1), ArithmeticTask(settings, 1), ArithmeticTask(settings, 2)
    assert one.train == same.train != other.train
    assert one.heldout == other.heldout
    assert len({q.id for q in one.train}) == 50


@given(TERMS, st.integers(0, 10**6))
def test_careful_working_is_right_and_anything_else_is_not(terms: tuple[int, ...], seed: int) -> None:
    problem = Problem(terms)
    working = write_working(problem, random.Random(seed), CAREFUL)
    assert judge(problem.answer, working).right
    assert eval(problem.question[:-1]) == int(problem.answer)
    assert not judge(problem.answer, working + "0").right
    assert not judge(problem.answer, working.split("#")[0]).right
    assert not judge(problem.answer, f"{working}#").right
    careless = write_working(problem, random.Random(seed), Habits(drop_carry=0.9))
    assert judge(problem.answer, careless).right == (careless.rsplit("#", 1)[1] == problem.answer)


def test_impossible_tasks_are_refused() -> None:
    with pytest.raises(TaskError, match="fewer than 5000 different sums"):
        ArithmeticTask(ArithmeticSettings(difficulty=[2], size=5000), 0)
    with pytest.raises(TaskError, match="2 or more"):
        ArithmeticTask(ArithmeticSettings(difficulty=[1]), 0)


def test_the_bundled_tokenizer_round_trips_and_knows_the_reflection_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    settings = ReflectionSettings.model_validate(embedded_recipe()["method"]["reflection"])
    problem = draw_problem(random.Random(0), 8, "train")
    text = settings.template.replace("{question}", problem.question).replace(
        "{attempt}", "1+1=3#3" + settings.cut_marker
    )
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.unk_token_id not in tokenizer.encode(text)


def test_the_embedded_default_trains_from_where_it_should(tmp_path: Path) -> None:
    """The command of the demo, cut short: warm-started to 10–30 %, with groups of all kinds."""
    arguments = ["train", "--quiet", f"run.dir={tmp_path / 'run'}", "train.steps=3", "run.threads=1"]
    assert main(arguments) == 0
    lines = read_metrics(tmp_path / "run")
    assert 0.1 <= lines[0]["heldout/accuracy"] <= 0.3
    assert sum(line["groups/solve_none"] for line in lines[1:]) > 0
    assert sum(line["groups/solve_all"] for line in lines[1:]) > 0
    assert sum(line["ranking/samples"] for line in lines[1:]) > 0
    assert all(line["update/count"] == 1 for line in lines[1:])
