"""Any function as a judge or as a score, in process and caged: `verify.functions`."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from r3.samples import Message, Query
from r3.verify import FunctionJudge, Verdict, VerifierError
from r3.verify.functions import ScoreFunction

JUDGES = "tests.verify.judges"
QUERY = Query("q", "2+2=", "a", {"bonus": 0.25, "problem": "2+2="})


@pytest.mark.parametrize("caged", [False, True])
@pytest.mark.parametrize("name", ["equal", "equal_later"])
def test_sync_and_async_functions_give_verdicts(name: str, caged: bool) -> None:
    with closing(FunctionJudge(f"{JUDGES}.{name}", caged=caged)) as judge:
        verdicts = [judge.judge(QUERY, "a"), judge.judge(QUERY, "b"), judge.judge(QUERY, "a", truncated=True)]
    assert [(v.right, v.reason) for v in verdicts] == [(True, "match"), (False, "different"), (False, "truncated")]


def test_an_async_judge_runs_inside_an_event_loop_too() -> None:
    async def ask() -> Verdict:
        with closing(FunctionJudge(f"{JUDGES}.equal_later")) as judge:
            return judge.judge(QUERY, "a")

    assert asyncio.run(ask()).right


def test_an_async_function_keeps_its_event_loop_as_clients_of_services_need() -> None:
    async def loop_of(completion: str) -> float:
        return float(id(asyncio.get_running_loop()))

    with closing(ScoreFunction(loop_of)) as score:
        assert score(QUERY, "a").value == score(QUERY, "b").value


@pytest.mark.parametrize("caged", [False, True])
def test_columns_reach_the_function_by_name(caged: bool) -> None:
    with closing(FunctionJudge(f"{JUDGES}.bonus", caged=caged, threshold=0.8)) as judge:
        assert judge.judge(Query("q", "?", columns={"bonus": 0.9}), "").right
        assert not judge.judge(Query("q", "?", columns={"bonus": 0.7}), "").right


def as_trl_does(completions: list[str], **columns: Any) -> list[float | None]:
    assert columns["prompts"] == ["2+2="]
    return [columns["bonus"][0] if completion else None for completion in completions]


def with_prompts_first(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    return [float(given == asked) for given, asked in zip(completions, answer, strict=True)]


def without_columns(text: str) -> float:
    return len(text)


def by_keyword(*, answer: str, completion: str, truncated: bool) -> float:
    return float(completion == answer) - truncated


class Wordy:
    def __call__(self, completion: str) -> float:
        return float(len(completion.split()))


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (as_trl_does, 0.25),
        (with_prompts_first, 1.0),
        (without_columns, 1.0),
        (by_keyword, 0.0),
        (Wordy(), 1.0),
        (partial(by_keyword, truncated=False), 1.0),
        (float, None),
    ],
)
def test_every_way_to_write_a_function(function: Callable[..., Any], value: float | None) -> None:
    if value is None:
        with pytest.raises(VerifierError, match="float raised ValueError"):
            ScoreFunction(function)(QUERY, "a")
        return
    truncated = function is by_keyword
    assert ScoreFunction(function)(QUERY, "a", truncated=truncated).value == value


def test_a_caged_function_may_take_lists_too() -> None:
    with closing(ScoreFunction(f"{__name__}.as_trl_does", caged=True)) as score:
        assert [score(QUERY, text).value for text in ("a", "")] == [0.25, None]


def test_a_chat_is_handed_over_as_turns() -> None:
    query = Query("q", (Message("system", "Be brief."), Message("user", "?")))
    seen: list[Any] = []
    ScoreFunction(lambda completion, prompt: seen.append(prompt))(query, "a")
    assert seen == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]]


def test_the_cage_holds_a_bad_judge() -> None:
    acts = ["fine", "hang", "raise", "segfault", "bloat", "fine"]
    with closing(FunctionJudge(f"{JUDGES}.act", caged=True, seconds=0.3, memory_mb=512)) as judge:
        reasons = [judge.judge(Query("q", "?"), act).reason for act in acts]
        assert reasons == ["match", "timeout", "error", "crashed", "memory", "match"]
        assert judge.judge(Query("q", "?"), "read").reason == "error"  # a text is no verdict


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (f"{JUDGES}.act", r"judges.act raised LookupError \(no such thing\) on query 'q'; mend it, or set caged=true"),
        (lambda completion: "yes", "gave a str; it must give a float, a bool or None"),
        (lambda completion: [1.0], "gave a list of 1; it must give a float"),
        (lambda completions: 1.0, "gave a float for a list of one completion"),
        (lambda completions: [1.0, 0.0], "gave a list of 2 for a list of one completion"),
        (lambda completion: float("nan"), "gave nan on query 'q'; return a finite number"),
    ],
)
def test_a_bad_function_in_process_is_an_error_that_names_it(function: Any, says: str) -> None:
    with pytest.raises(VerifierError, match=says):
        ScoreFunction(function)(Query("q", "?"), "raise")


@pytest.mark.parametrize("dotted", ["nodots", f"{JUDGES}.nobody", "no.such.module", f"{JUDGES}._ACTS"])
def test_a_path_to_no_function_is_refused_with_the_fix(dotted: str) -> None:
    with pytest.raises(VerifierError, match=r"package\.module\.function"):
        FunctionJudge(dotted)


def test_an_object_cannot_be_caged() -> None:
    with pytest.raises(VerifierError, match="named by its dotted path"):
        ScoreFunction(without_columns, caged=True)


def test_it_travels_to_other_processes() -> None:
    with closing(pickle.loads(pickle.dumps(ScoreFunction(f"{JUDGES}.equal", caged=True)))) as score:
        assert score.caged
        assert score(QUERY, "a").value == 1
