"""Made tasks: the embedded sums and their model, graded sums, reasoning-gym's families with scorers and procedures.

Covers r3.tasks.arithmetic, r3.tasks.gym.
"""

from __future__ import annotations

import random
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from r3.cli import main
from r3.config import embedded_recipe, validate
from r3.errors import ConfigError, TaskError
from r3.method.settings import ReflectionSettings
from r3.policy.model import EMBEDDED
from r3.samples import Query
from r3.tasks import Task, load_task
from r3.tasks.arithmetic import ArithmeticTask, Problem, draw_problem, judge, problem_set, split_of
from r3.tasks.settings import (
    ArithmeticSettings,
    GradedArithmeticSettings,
    ReasoningGymSettings,
    TaskSettings,
    TinyCodeSettings,
)
from r3.tasks.task import written
from tests.train.tiny import read_metrics
from tools.writer import CAREFUL, Habits, write_working

FAMILIES: dict[str, dict[str, Any]] = {
    "letter_counting": {"min_words": 3, "max_words": 6},  # strings
    "number_sorting": {"min_numbers": 3, "max_numbers": 6, "max_decimals": 0},  # lists
    "knights_knaves": {"n_people": 2},  # logic
    "ab": {"length": 6},  # rewriting
    "spell_backward": {},
    "number_filtering": {"min_numbers": 3, "max_numbers": 6, "max_decimals": 1},
    "word_sequence_reversal": {"min_words": 3, "max_words": 6},
}
MADE = [("graded-arithmetic", None, {}), *(("reasoning-gym", family, options) for family, options in FAMILIES.items())]


def load(name: str, family: str | None, options: dict[str, Any], *, seed: int = 0, **more: Any) -> Task:
    sizes = {"size": 30, "heldout": 20, **more}
    if family is None:
        return load_task(GradedArithmeticSettings(name="graded-arithmetic", **sizes), seed)
    return load_task(ReasoningGymSettings(name="reasoning-gym", family=family, options=options, **sizes), seed)


def boxed(answer: str) -> str:
    return f"So it is \\boxed{{{answer}}}."


@pytest.mark.parametrize(("name", "family", "options"), MADE)
def test_problems_are_seeded_and_no_split_shares_one(name: str, family: str | None, options: dict[str, Any]) -> None:
    task, again, other = (load(name, family, options, seed=seed) for seed in (1, 1, 2))
    warm = load(name, family, options, seed=1, split="warm")
    assert [(q.id, q.answer) for q in task.train] == [(q.id, q.answer) for q in again.train]
    assert [q.id for q in task.train] != [q.id for q in other.train]
    assert [q.id for q in task.heldout] == [q.id for q in other.heldout]  # the same whatever the seed
    splits = [{q.id for q in part} for part in (task.train, task.heldout, warm.train)]
    assert [len(ids) for ids in splits] == [30, 20, 30]
    assert not splits[0] & splits[1] | splits[0] & splits[2] | splits[1] & splits[2]


@pytest.mark.parametrize(("name", "family", "options"), MADE)
def test_the_right_answer_is_right_and_others_are_wrong(name: str, family: str | None, options: dict[str, Any]) -> None:
    task = load(name, family, options)
    others = {q.id: next(o.answer for o in task.train if o.answer != q.answer) for q in task.train}
    for query in task.train:
        assert task.judge.judge(query, boxed(query.answer)).right
        assert not task.judge.judge(query, boxed(others[query.id])).right
        assert task.judge.judge(query, query.answer).reason == "no box"
        assert not task.judge.judge(query, boxed("{[(")).right
        assert not task.judge.judge(query, boxed("")).right


@pytest.mark.parametrize(("name", "family", "options"), MADE)
def test_written_solutions_end_in_the_right_answer(name: str, family: str | None, options: dict[str, Any]) -> None:
    task = load(name, family, options, split="warm")
    for query in task.train:
        text = written(query)
        assert text is not None
        assert text.count("\n") >= 1  # working, not the answer alone
        assert task.judge.judge(query, text).right


def last_line(query: Query) -> str:
    return str(query.columns["solution"]).splitlines()[-1]


def test_the_working_itself_leads_to_the_answer() -> None:
    """Read off the working alone, without the box: an oracle apart from reasoning-gym's own answers."""
    for query in load("reasoning-gym", "letter_counting", FAMILIES["letter_counting"]).train:
        assert last_line(query).rsplit(" ", 1)[1] == query.answer
    for query in load("reasoning-gym", "ab", FAMILIES["ab"]).train:
        assert last_line(query) == query.answer
        lines = str(query.columns["solution"]).splitlines()
        assert all(len(b.split()) in (len(a.split()), len(a.split()) - 2) for a, b in pairwise(lines))
    for query in load("reasoning-gym", "knights_knaves", FAMILIES["knights_knaves"]).train:
        case = re.fullmatch(r"If (.*): .*: fits", last_line(query))
        assert case is not None
        for claim in case[1].split(", "):
            assert claim in query.answer
    for query in load("reasoning-gym", "number_sorting", FAMILIES["number_sorting"]).train:
        numbers = re.findall(r"^\w+ (\S+), left", str(query.columns["solution"]), re.M)
        assert str(numbers) == query.answer
        assert [float(n) for n in numbers] in (sorted(map(float, numbers)), sorted(map(float, numbers), reverse=True))
    for query in load("reasoning-gym", "number_filtering", FAMILIES["number_filtering"]).train:
        asked = str(query.columns["problem"])
        verb, than, limit = re.match(r"(Keep|Remove) all numbers (larger|smaller) than (\S+) in", asked).groups()  # type: ignore[union-attr]
        for number, verdict in re.findall(r"^(\S+): (keep|drop)$", str(query.columns["solution"]), re.M):
            named = float(number) > float(limit) if than == "larger" else float(number) < float(limit)
            assert (verdict == "keep") == (named == (verb == "Keep"))
            assert (verdict == "keep") == (f"'{number}'" in query.answer)
    for query in load("reasoning-gym", "word_sequence_reversal", FAMILIES["word_sequence_reversal"]).train:
        placed = last_line(query).removeprefix("From the last: ").split(", ")
        assert ", ".join(one.split(" ", 1)[1] for one in placed) == query.answer
        assert [int(one.split(" ", 1)[0]) for one in placed] == list(range(len(placed), 0, -1))
    for query in load("graded-arithmetic", None, {}).train:
        question = str(query.columns["problem"]).removeprefix("Compute ").rstrip(".")
        steps = str(query.columns["solution"]).splitlines()
        assert len(steps) == len(question.split()) // 2
        for line in steps:
            left, sign, right, _, result = line.split()
            assert int(left) + (int(right) if sign == "+" else -int(right)) == int(result)
        assert last_line(query).rsplit(" ", 1)[1] == query.answer


def test_a_family_without_a_written_procedure_can_be_reinforced() -> None:
    task = load("reasoning-gym", "gcd", {})
    assert written(task.train[0]) is None
    assert task.judge.judge(task.train[0], boxed(task.train[0].answer)).right


def test_a_reasoning_gym_that_cannot_be_imported_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # as an import of it, or of what it needs, would fail
    with pytest.raises(TaskError, match=r"pip install 'r3-rl\[reasoning-gym\]' \(.*reasoning_gym"):
        load("reasoning-gym", "ab", {})


def test_bad_families_and_options_name_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"task\.family: needed"):
        validate({"task": {"name": "reasoning-gym"}})
    with pytest.raises(TaskError, match="reasoning-gym refuses them"):
        load("reasoning-gym", "no_such_family", {})
    with pytest.raises(TaskError, match="reasoning-gym refuses them"):
        load("reasoning-gym", "ab", {"lenght": 3})
    with pytest.raises(TaskError, match="reasoning-gym refuses them"):  # seen when it draws
        load("reasoning-gym", "spell_backward", {"min_word_len": 60, "max_word_len": 61})
    with pytest.raises(TaskError, match="ask for fewer"):
        load("reasoning-gym", "ab", {"length": 1})
    with pytest.raises(TaskError, match="each 2 or more"):
        load("graded-arithmetic", None, {}, difficulty=[1])


# The embedded task and model: splits that cannot leak, a judge that cannot be fooled, and the state it starts from.


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


# What made tasks write for methods with outside help.


def test_the_embedded_sums_have_right_working(tmp_path: Path) -> None:
    task = load_task(ArithmeticSettings(difficulty=[2, 3, 6, 9], size=24, heldout=8), seed=3)
    for query in task.train:
        terms = tuple(map(int, query.prompt.rstrip("=").split("+")))
        assert query.demonstration == write_working(Problem(terms), random.Random(0), CAREFUL)
        assert all(query.demonstration.startswith(hint) and "#" not in hint for hint in query.hints)
        assert sorted(set(query.hints), key=len) == list(query.hints)
        assert len(query.hints) == min(3, len(terms) - 1)
        assert all(hint.rpartition("=")[2].isdigit() for hint in query.hints)  # whole steps


@pytest.mark.parametrize(
    "settings",
    [
        ArithmeticSettings(size=8),
        GradedArithmeticSettings(name="graded-arithmetic", size=8),
        TinyCodeSettings(name="code-tiny", size=4),
        ReasoningGymSettings(name="reasoning-gym", family="number_sorting", size=4),
    ],
)
def test_what_made_tasks_demonstrate_is_right(settings: TaskSettings) -> None:
    if isinstance(settings, ReasoningGymSettings):
        pytest.importorskip("reasoning_gym")
    task = load_task(settings, seed=1)
    try:
        assert all(task.judge.judge(query, query.demonstration).right for query in task.train)
        assert all(query.hints for query in task.train)
    finally:
        task.judge.close()
