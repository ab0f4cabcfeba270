"""Any function as a judge or as a score, in process and caged, and a reward made of several.

Covers r3.verify.judge, r3.verify.rewards.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from r3.samples import Message, Query
from r3.verify import FunctionJudge, Reward, RewardsJudge, Verdict, VerifierError
from r3.verify.cage import Answer, Cage, CageSettings
from r3.verify.functions import ScoreFunction
from r3.verify.judge import PlainJudge
from r3.verify.rewards import think
from tests.verify import judges
from tests.verify.test_cage import gone

JUDGES = "tests.verify.judges"
START = f"{JUDGES}.start"
FORGE = f"{JUDGES}.forge"
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


def ask(cage: Cage, act: str, **columns: str) -> Answer:
    return cage.submit([{"args": [act], "kwargs": columns}])[0].result()


@pytest.fixture
def starter() -> Iterator[Cage]:
    with closing(Cage(CageSettings(START, workers=1, seconds=0.3, sealed=False, processes=8))) as cage:
        yield cage


def test_programs_end_when_the_cage_is_closed(starter: Cage, tmp_path: Path) -> None:
    pids = [ask(starter, "detached").result, ask(starter, "", note=str(tmp_path / "note")).result]
    handles = [os.pidfd_open(pid) for pid in pids]
    starter.close()
    assert all(gone(handle) for handle in handles)


@pytest.mark.parametrize(("how", "failed"), [("and hang", "timeout"), ("and die", "crashed")])
def test_programs_end_with_their_worker(starter: Cage, tmp_path: Path, how: str, failed: str) -> None:
    detached = os.pidfd_open(ask(starter, "detached").result)
    note = tmp_path / "note"
    assert ask(starter, how, note=str(note)).failed == failed
    assert gone(detached)
    assert not Path(f"/proc/{note.read_text()}").exists()
    assert ask(starter, "", note=str(note)).failed == ""


def test_programs_end_even_when_the_fork_server_was_killed(starter: Cage) -> None:
    handle = os.pidfd_open(ask(starter, "detached").result)
    server = starter._forkserver._process
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)
    starter.close()
    assert gone(handle)


def test_programs_of_another_worker_are_left_alone(tmp_path: Path) -> None:
    with closing(Cage(CageSettings(START, workers=2, seconds=0.1, sealed=False))) as cage:
        first = cage.submit([{"args": ["detached"], "kwargs": {}}])[0].result().result
        worker = _ancestor(first)
        for i in range(2):  # one of the two workers hangs; whichever it is, only its own programs end
            hung = ask(cage, "and hang", note=str(tmp_path / str(i)))
            assert hung.failed == "timeout"
            assert Path(f"/proc/{first}").exists() == Path(f"/proc/{worker}").exists()


def _ancestor(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_too_many_processes_end_the_case(starter: Cage, tmp_path: Path) -> None:
    assert ask(starter, "many").failed == "processes"
    assert ask(starter, "", note=str(tmp_path / "note")).failed == ""


@pytest.mark.parametrize("what", [name for name in judges._FORGERIES if name != "nothing"])
def test_a_forged_reply_is_an_error_and_spoils_no_other_case(what: str) -> None:
    with closing(Cage(CageSettings(FORGE, workers=1, seconds=0.05, sealed=False))) as cage:
        cases = ["nothing", what, "nothing", "nothing"]
        answers = [f.result() for f in cage.submit({"args": [case], "kwargs": {}} for case in cases)]
    assert answers[1].result is not True
    assert answers[1].failed in ("error", "timeout")
    assert [(answer.result, answer.failed) for answer in answers if answer is not answers[1]] == [(False, "")] * 3


def test_a_judge_tells_what_its_function_did() -> None:
    judge = FunctionJudge(FORGE, caged=True, workers=2, seconds=0.3)
    with closing(judge), ThreadPoolExecutor(4) as threads:
        answers = ["nothing", "right", "many", "nothing"]
        verdicts = list(threads.map(lambda answer: judge.judge(Query("q", "?"), answer), answers))
    assert not any(verdict.right for verdict in verdicts)
    assert Counter(verdict.reason for verdict in verdicts) == {"different": 2, "error": 2}


# A reward made of several functions: `verify.rewards`.


SUM = Query("q", "2+2=", "4")


def is_answer(query: Query, text: str) -> Verdict:
    return Verdict(text == query.answer, "match" if text == query.answer else "different", feedback="look again")


def judge_of(*rewards: Reward, **options: Any) -> RewardsJudge:
    return RewardsJudge(rewards, correct=PlainJudge(is_answer), **options)


def brief(completion: str) -> float:
    return 1 / len(completion)


def abstains(completion: str) -> None:
    return None


def breaks(completion: str) -> float:
    raise ZeroDivisionError


def test_the_outcome_says_right_and_the_scores_are_weighted() -> None:
    judge = judge_of(Reward("correct"), Reward(brief, weight=0.5), Reward(abstains), outcome="correct")
    verdict = judge.judge(SUM, "4")
    assert (verdict.right, verdict.reason, verdict.scores) == (True, "match", {"correct": 1.0, "brief": 0.5})
    verdict = judge.judge(SUM, "44")
    assert (verdict.right, verdict.feedback, verdict.scores) == (False, "look again", {"correct": 0.0, "brief": 0.25})


def test_a_function_is_right_above_the_threshold_and_wrong_where_it_abstains() -> None:
    judge = judge_of(Reward(brief), right_above=0.3)
    assert [judge.judge(SUM, text).right for text in ("4", "444", "4444")] == [True, True, False]
    assert judge_of(Reward(abstains)).judge(SUM, "4").reason == "abstained"


def test_a_cut_answer_is_scored_by_those_that_ask_for_it_and_is_never_right() -> None:
    judge = judge_of(
        Reward(brief), Reward(brief, name="also", truncated="judge", weight=-1), outcome="also", right_above=-2
    )
    verdict = judge.judge(SUM, "4", truncated=True)
    assert (verdict.right, verdict.reason, verdict.scores) == (False, "truncated", {"also": -1.0})


def test_a_function_that_fails_in_its_cage_counts_0_and_is_told_of() -> None:
    rewards = [Reward("correct"), Reward(f"{__name__}.breaks", caged=True)]
    with closing(judge_of(*rewards, outcome="correct")) as judge:
        verdict = judge.judge(SUM, "4")
    assert (verdict.right, verdict.scores, verdict.failed) == (True, {"correct": 1.0, "breaks": 0.0}, ("breaks",))


def test_a_graded_verdict_counts_as_it_is() -> None:
    graded = PlainJudge(lambda query, text: Verdict(False, "fail", scores={"correct": 0.0, "tests": 0.75}))
    verdict = RewardsJudge([Reward("correct", weight=2)], correct=graded).judge(SUM, "x")
    assert (verdict.right, verdict.scores) == (False, {"correct": 1.5})  # above the threshold, and not right


@pytest.mark.parametrize(
    ("rewards", "outcome", "says"),
    [
        ([Reward(brief), Reward("boxed")], None, "set task.outcome to one of brief, boxed"),
        ([Reward(brief), Reward("boxed")], "box", "task.outcome=box must be one of brief, boxed"),
        ([Reward(brief), Reward(brief)], "brief", "each name must be there once"),
        ([Reward("guess")], None, "no built-in reward 'guess'; there are correct, boxed, think"),
    ],
)
def test_what_makes_no_reward_is_refused(rewards: list[Reward], outcome: str | None, says: str) -> None:
    with pytest.raises(VerifierError, match=says):
        judge_of(*rewards, outcome=outcome)


def test_a_long_unclosed_thought_is_judged_at_once() -> None:
    assert think("<think>" * 100_000) == think("</think>" * 100_000) == 0
