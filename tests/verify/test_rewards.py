"""A reward made of several functions: `verify.rewards`.

Covers r3.verify.judge.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from r3.samples import Query
from r3.verify import Reward, RewardsJudge, Verdict, VerifierError
from r3.verify.judge import PlainJudge
from r3.verify.rewards import think

QUERY = Query("q", "2+2=", "4")


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
    verdict = judge.judge(QUERY, "4")
    assert (verdict.right, verdict.reason, verdict.scores) == (True, "match", {"correct": 1.0, "brief": 0.5})
    verdict = judge.judge(QUERY, "44")
    assert (verdict.right, verdict.feedback, verdict.scores) == (False, "look again", {"correct": 0.0, "brief": 0.25})


def test_a_function_is_right_above_the_threshold_and_wrong_where_it_abstains() -> None:
    judge = judge_of(Reward(brief), right_above=0.3)
    assert [judge.judge(QUERY, text).right for text in ("4", "444", "4444")] == [True, True, False]
    assert judge_of(Reward(abstains)).judge(QUERY, "4").reason == "abstained"


def test_a_cut_answer_is_scored_by_those_that_ask_for_it_and_is_never_right() -> None:
    judge = judge_of(
        Reward(brief), Reward(brief, name="also", truncated="judge", weight=-1), outcome="also", right_above=-2
    )
    verdict = judge.judge(QUERY, "4", truncated=True)
    assert (verdict.right, verdict.reason, verdict.scores) == (False, "truncated", {"also": -1.0})


def test_a_function_that_fails_in_its_cage_counts_0_and_is_told_of() -> None:
    rewards = [Reward("correct"), Reward(f"{__name__}.breaks", caged=True)]
    with closing(judge_of(*rewards, outcome="correct")) as judge:
        verdict = judge.judge(QUERY, "4")
    assert (verdict.right, verdict.scores, verdict.failed) == (True, {"correct": 1.0, "breaks": 0.0}, ("breaks",))


def test_a_graded_verdict_counts_as_it_is() -> None:
    graded = PlainJudge(lambda query, text: Verdict(False, "fail", scores={"correct": 0.0, "tests": 0.75}))
    verdict = RewardsJudge([Reward("correct", weight=2)], correct=graded).judge(QUERY, "x")
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
