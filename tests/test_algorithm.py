"""`r3.algorithm`: what is asked, what is read from the buffer, what is learnt and stored; and README's own loop."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import r3
from r3.algorithm import Algorithm, Asked
from r3.buffer import SampleBuffer
from r3.method.settings import MethodSettings
from r3.samples import Group, Query, Sample
from tests.method.makers import REFLECTION, make_group, make_sample
from tests.tokenizing import char_tokenizer

QUERY = Query("q", "1+1=")
ROOT = Path(__file__).parents[1]


@pytest.fixture
def buffer() -> Iterator[SampleBuffer]:
    with SampleBuffer(":memory:") as buffer:
        yield buffer


def algorithm(buffer: SampleBuffer, seed: int = 0, **settings: Any) -> Algorithm:
    return Algorithm(MethodSettings(name="r3", **settings), buffer, char_tokenizer(), seed=seed)


def answers(query_id: str, outcomes: Sequence[bool], *, first: int = 1, **more: Any) -> list[Sample]:
    """Complete answers of two tokens each, no two alike."""
    return [make_sample(o, query_id=query_id, tokens=[9, first + i], **more) for i, o in enumerate(outcomes)]


# ---------------------------------------------------------------- ask


def test_a_batch_is_asked_in_order_and_hard_queries_twice(buffer: SampleBuffer) -> None:
    """Hard is: met before, from epoch 2 on, with a mean past outcome below τ = 0.25."""
    outcomes = {"hard": [False] * 4, "even": [True, False], "new": [], "solved": [True]}
    for query_id, past in outcomes.items():
        buffer.add(answers(query_id, past))
    batch = [(Query(query_id, f"{query_id}?"), 2) for query_id in outcomes]
    asked = algorithm(buffer).ask(batch, step=7)
    assert [prompt.query.id for prompt in asked.plain] == list(outcomes)
    assert [prompt.position for prompt in asked.prompts] == [0, 1, 2, 3, 0]
    assert asked.counts == {"built": 1, "not_hard": 2, "never_tried": 1}
    (reflection,) = asked.reflections
    tokenizer = char_tokenizer()
    assert reflection.plain_tokens is not None
    assert tokenizer.decode(reflection.plain_tokens) == "hard?" == tokenizer.decode(asked.prompts[0].tokens)
    assert tokenizer.decode(reflection.tokens) == reflection.text
    assert reflection.context.shown in {1, 2, 3, 4}
    early = algorithm(buffer).ask([(query, 1) for query, _ in batch], step=7)
    assert (early.reflections, early.counts) == ((), {"early": 4})


def test_the_failure_shown_depends_on_seed_and_step_alone(buffer: SampleBuffer) -> None:
    buffer.add(answers("q", [False] * 8))

    def shown(seed: int, step: int) -> int | None:
        return algorithm(buffer, seed).ask([(QUERY, 2)], step=step).reflections[0].context.shown

    assert shown(0, 1) == shown(0, 1)
    assert len({shown(0, step) for step in range(40)}) == 8
    assert len({shown(seed, 1) for seed in range(40)}) == 8


def test_reflection_prompts_that_find_no_room_are_counted(buffer: SampleBuffer) -> None:
    batch = [(Query(f"q{i}", "?"), 2) for i in range(5)]
    for query, _ in batch:
        buffer.add(answers(query.id, [False]))
    asked = algorithm(buffer).ask(batch, step=1)

    def left(limited: Asked) -> tuple[int, int, int]:
        return len(limited.plain), len(limited.reflections), limited.counts["no_room"]

    assert left(asked.limited(None)) == (5, 5, 0)
    assert left(asked.limited(3)) == (5, 3, 2)
    assert left(asked.limited(None, multiple_of=2)) == (5, 4, 1)
    assert left(asked.limited(3, multiple_of=2)) == (5, 2, 3)


def test_a_query_is_tokenized_once(buffer: SampleBuffer) -> None:
    class Counting:
        """A tokenizer that counts what it encodes."""

        def __init__(self) -> None:
            self.calls = 0

        def encode(self, text: str, **options: Any) -> list[int]:
            self.calls += 1
            return list(char_tokenizer().encode(text, **options))

    tokenizer: Any = Counting()
    counted = Algorithm(MethodSettings(name="r3"), buffer, tokenizer)
    for step in range(3):
        counted.ask([(QUERY, 1), (QUERY, 1)], step=step)
    assert tokenizer.calls == 1


# ---------------------------------------------------------------- what replay reads


def joined(past: list[Sample], fresh: Sequence[bool], version: int = 5, **settings: Any) -> list[list[int]]:
    """The tokens of what joins a group of these outcomes, after these samples."""
    with SampleBuffer(":memory:") as buffer:
        buffer.add(past)
        group = make_group([make_sample(outcome) for outcome in fresh])
        result = algorithm(buffer, replay=settings).preview([group], version=version)
    return [sample.tokens.tolist() for sample in result.groups[0].replayed]


def test_failures_in_reflection_do_not_hide_those_under_the_plain_prompt() -> None:
    """A query that was hard, was reflected upon in vain, and is solved by now: its newest failures are reflection's."""
    past = [make_sample(False, tokens=[1, 2]), make_sample(False, tokens=[1, 3])]
    past += [make_sample(False, tokens=[2, i], context=REFLECTION) for i in range(8)]
    assert sorted(joined(past, [True, True], candidates=4, k=2)) == [[1, 2], [1, 3]]


def test_successes_of_reflection_join() -> None:
    assert joined([make_sample(True, tokens=[3, 3], context=REFLECTION)], [False, False]) == [[3, 3]]


def test_failures_join_solve_all_groups_or_are_left_alone() -> None:
    past = [make_sample(False, tokens=[1, 2])]
    assert joined(past, [True, True]) == [[1, 2]]
    assert joined(past, [True, True], failures=False) == []
    assert joined(past, [True, False]) == []


def test_samples_beyond_the_age_limit_are_told_from_none(buffer: SampleBuffer) -> None:
    buffer.add([make_sample(True, policy_version=1)])
    limited = algorithm(buffer, replay={"max_age": 3})
    failed = [make_group([make_sample(False)] * 2)]
    assert limited.preview(failed, version=4).groups[0].replay == "joined"
    assert limited.preview(failed, version=5).groups[0].replay == "too_old"
    other = [make_group([make_sample(False, query_id="other")] * 2, query_id="other")]
    assert limited.preview(other, version=5).groups[0].replay == "no_history"


def reflecting(buffer: SampleBuffer, step: int = 1, queries: int = 1, **settings: Any) -> Asked:
    batch = [(Query(f"q{i}" if queries > 1 else "q", "1+1="), 2) for i in range(queries)]
    return algorithm(buffer, reflection=settings).ask(batch, step=step)


def test_hardness_may_look_at_recent_attempts_alone(buffer: SampleBuffer) -> None:
    buffer.add(answers("q", [False] * 8, step=1))
    buffer.add(answers("q", [True, True, False, False], first=9, step=2))
    assert reflecting(buffer).counts == {"built": 1}  # 2 of 12
    assert reflecting(buffer, window=4).counts == {"not_hard": 1}  # 2 of 4
    assert reflecting(buffer, window=5).counts == {"built": 1}  # a step is not split: 2 of 12 again


def test_reflection_may_be_kept_for_what_replay_cannot_help(buffer: SampleBuffer) -> None:
    buffer.add(answers("q", [False] * 8, step=1))
    assert reflecting(buffer, when="unsolved").counts == {"built": 1}
    buffer.add(answers("q", [True], first=9, step=2, context=REFLECTION))
    assert reflecting(buffer, when="unsolved").counts == {"solved": 1}


def test_only_failures_of_the_plain_prompt_are_shown(buffer: SampleBuffer) -> None:
    buffer.add(answers("q", [False] * 30, context=REFLECTION))
    (number,) = buffer.add(answers("q", [False], first=40))
    assert {reflecting(buffer, step).reflections[0].context.shown for step in range(20)} == {number}


@pytest.mark.parametrize(("size", "plain", "reflection"), [(8, 4, 4), (5, 3, 2), (2, 1, 1)])
def test_a_shared_budget_halves_the_groups_of_hard_queries_alone(
    buffer: SampleBuffer, size: int, plain: int, reflection: int
) -> None:
    buffer.add(answers("q0", [False] * 4))
    buffer.add(answers("q1", [True] * 4))
    asked = reflecting(buffer, queries=2, budget="shared")
    assert [prompt.answers(size) for prompt in asked.prompts] == [plain, size, reflection]
    extra = reflecting(buffer, queries=2, budget="extra")
    assert [prompt.answers(size) for prompt in extra.prompts] == [size] * 3


@given(
    queries=st.integers(1, 40), share=st.floats(0.01, 1.0), shared=st.booleans(), size=st.sampled_from([2, 4, 8, 16])
)
def test_reflection_keeps_to_its_share_of_the_answers(queries: int, share: float, shared: bool, size: int) -> None:
    with SampleBuffer(":memory:") as buffer:
        for i in range(queries):
            buffer.add(answers(f"q{i}", [False]))
        budget = "shared" if shared else "extra"
        asked = algorithm(buffer, reflection={"max_share": share, "budget": budget}).ask(
            [(Query(f"q{i}", "?"), 2) for i in range(queries)], step=3
        )
        counted = [sum(prompt.answers(size) for prompt in prompts) for prompts in (asked.reflections, asked.prompts)]
        assert counted[0] <= share * counted[1] + 1e-6
        assert asked.counts["built"] + asked.counts["no_share"] == queries
        one_more = counted[0] + (size // 2 if shared else size)
        of_all = counted[1] if shared else counted[1] + size
        assert asked.counts["no_share"] == 0 or one_more > share * of_all - 1e-6


def test_reflection_that_does_not_pay_pauses_and_a_probe_lets_it_come_back(buffer: SampleBuffer) -> None:
    def met(step: int, plain: list[bool], reflected: list[bool]) -> None:
        buffer.add([*answers("q", plain, step=step), *answers("q", reflected, step=step, context=REFLECTION, first=20)])

    def counts(step: int) -> Mapping[str, int]:
        return reflecting(buffer, step, tau=0.9, min_lift=2.0, lift_window=16, probe_every=8).counts

    met(1, [False] * 8, [False] * 8)
    assert counts(2) == {"built": 1}  # too few answers to know
    met(2, [False] * 8, [False] * 8)
    assert [counts(step) for step in (3, 8)] == [{"paused": 1}, {"built": 1}]
    met(8, [False] * 8, [True] * 6 + [False] * 2)
    assert counts(9) == {"built": 1}  # 6 of 16 against 0 of 16
    met(9, [True] * 7 + [False], [True] * 7 + [False])
    assert counts(10) == {"paused": 1}  # 13 of 16 against 7 of 16


# ---------------------------------------------------------------- learn


@pytest.mark.parametrize("at_once", [True, False])
def test_what_reflection_finds_may_join_its_querys_plain_group_in_the_same_step(
    buffer: SampleBuffer, at_once: bool
) -> None:
    plain = make_group(answers("q", [False] * 3, step=4, policy_version=4))
    after = [*answers("q", [True, False], first=7, step=4, policy_version=4, context=REFLECTION)]
    reflection = Group(plain.query, tuple(after), np.array([7, 8, 9, 10]), REFLECTION, plain.prompt)
    result = algorithm(buffer, reflection={"at_once": at_once}).learn([plain, reflection], version=4)
    joined = [member.sample for member in result.groups[0].members if member.origin == "replayed"]
    assert [sample.tokens.tolist() for sample in joined] == ([[9, 7]] if at_once else [])
    assert result.counts["replay/at_once"] == at_once
    assert len(result.groups[1].members) == 2  # and stays in its own
    moved = [w for w in result.weighted if w.origin == "replayed"]
    assert all(w.other_context and w.prompt is plain.prompt for w in moved)
    assert len(buffer.history(["q"])["q"]) == 5  # stored once


def test_what_reflection_finds_stays_out_of_groups_that_solved_some(buffer: SampleBuffer) -> None:
    plain = make_group(answers("q", [False, True], step=4))
    after = answers("q", [True, False], first=7, step=4, context=REFLECTION)
    reflection = Group(plain.query, tuple(after), np.array([7, 8, 9, 10]), REFLECTION, plain.prompt)
    result = algorithm(buffer, reflection={"at_once": True}).learn([plain, reflection], version=4)
    assert result.counts["replay/samples"] == 0


def twice(buffer: SampleBuffer) -> list[Group]:
    """One query that a batch holds twice, solved by none, with a past success; and a reflection group of it."""
    buffer.add(answers("q", [True], first=70))
    plain = [Group(QUERY, answers("q", [False] * 3, first=first, step=1), [7, 8]) for first in (10, 20)]
    reflecting = answers("q", [True, False], first=30, step=1, context=REFLECTION)
    return [*plain, Group(QUERY, reflecting, [7, 9], REFLECTION, plain_prompt=[7, 8])]


@pytest.mark.parametrize("train_as", ["reflection", "plain", "both"])
def test_every_weighted_sample_knows_its_group_and_member(buffer: SampleBuffer, train_as: Any) -> None:
    groups = twice(buffer)
    result = algorithm(buffer, ranking=False, reflection={"train_as": train_as, "at_once": False}).learn(
        groups, version=3
    )
    under = {"reflection": [(7, 9)], "plain": [(7, 8)], "both": [(7, 9), (7, 8)]}[train_as]
    expected = [(g, m, (7, 8), "replayed" if m == 3 else "fresh") for g in (0, 1) for m in range(4)]
    expected += [(2, m, prompt, "reflection") for m in range(2) for prompt in under]
    assert [(w.group, w.member, tuple(w.prompt.tolist()), w.origin) for w in result.weighted] == expected
    for w in result.weighted:
        member = result.groups[w.group].members[w.member]
        assert w.sample is member.sample
        assert (w.advantage, w.origin) == (member.advantage, member.origin)


def test_stored_samples_carry_the_ids_of_the_buffer(buffer: SampleBuffer) -> None:
    groups = twice(buffer)
    result = algorithm(buffer, reflection={"at_once": False}).learn(groups, version=3)
    ids = [[member.sample.id for member in mixed.members] for mixed in result.groups]
    assert ids == [[2, 3, 4, 1], [5, 6, 7, 1], [8, 9]]
    stored = buffer.find(range(2, 10))
    for sample in result.samples:
        assert sample.id is not None
        assert stored[sample.id].tokens.tolist() == sample.tokens.tolist()
        assert stored[sample.id].reward == sample.reward
    assert {w.sample.id for w in result.weighted} <= set(range(1, 10))


def test_a_batch_is_learnt_from_its_past_alone(buffer: SampleBuffer) -> None:
    """What a batch adds to the buffer joins no group of the same batch."""
    groups = [Group(QUERY, answers("q", [o] * 2, first=f, step=1), [7]) for o, f in ((False, 1), (True, 5))]
    first = algorithm(buffer).learn(groups, version=0)
    assert [mixed.replay for mixed in first.groups] == ["no_history", "no_history"]
    again = [Group(QUERY, answers("q", [o] * 2, first=f, step=2), [7]) for o, f in ((False, 11), (True, 15))]
    second = algorithm(buffer).learn(again, version=1)
    assert [{s.id for s in mixed.replayed} for mixed in second.groups] == [{3, 4}, {1, 2}]


def test_a_preview_has_the_members_of_learn_and_stores_nothing(buffer: SampleBuffer) -> None:
    groups = twice(buffer)
    blind = [
        Sample("r", np.array([1, i]), np.array([-1.0, -1.0]), None, finish="length", outcome=False, step=1)
        for i in range(3)
    ]
    unmeasured = Group(Query("r", "?"), tuple(blind), [7])
    bench = algorithm(buffer, replay={"order": "random"})
    assert bench.needs_entropies([*groups, unmeasured]) == [(3, 0), (3, 1), (3, 2)]
    preview = bench.preview([*groups, unmeasured], version=3)
    assert buffer.stats().samples == 1
    measured = Group(Query("r", "?"), answers("r", [False] * 3, step=1), [7])
    result = bench.learn([*groups, measured], version=3)
    for before, after in zip(preview.groups[:3], result.groups[:3], strict=True):
        assert before.replay == after.replay
        assert before.advantages == after.advantages
        assert [m.sample.tokens.tolist() for m in before.members] == [m.sample.tokens.tolist() for m in after.members]
    assert bench.needs_entropies([*groups, measured]) == []


# ---------------------------------------------------------------- the library, as README shows it


def test_the_readmes_loop_runs(buffer: SampleBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "r3.Algorithm" in block]
    trained: list[Any] = []

    def sample_and_judge(prompt: Any, step: int) -> list[Sample]:
        length = 4 if prompt.context.kind == "plain" else 5
        return [
            make_sample(False, query_id=prompt.query.id, tokens=range(length), step=step, context=prompt.context)
            for _ in range(2)
        ] + [make_sample(step == 1, query_id=prompt.query.id, tokens=[step], step=step, context=prompt.context)]

    names: dict[str, Any] = {
        "entropies": [[0, 0, 3], [1, 1, 2]],
        "tokenizer": char_tokenizer(),
        "batches": [[(QUERY, 1)], [(QUERY, 2)], [(QUERY, 2)], [(QUERY, 3)]],
        "sample_and_judge": sample_and_judge,
        "update": lambda weighted: trained.append(weighted),
    }
    exec(code, names)
    assert len(trained) == 4
    assert {w.origin for weighted in trained for w in weighted} >= {"fresh", "replayed"}
    assert isinstance(names["algorithm"], r3.Algorithm)


def test_an_answer_found_in_reflection_is_counted_from_the_step_that_found_it(buffer: SampleBuffer) -> None:
    settings = {"reflection": {"at_once": True}, "replay": {"max_repeats": 2}}
    joined = []
    for step in range(1, 5):
        plain = make_group([make_sample(False, tokens=[9, step * 10 + i], step=step) for i in range(2)])
        groups = [plain]
        if step == 1:
            right = make_sample(True, tokens=[9, 7], context=REFLECTION, step=1)
            groups.append(make_group([right], context=REFLECTION))
        joined.append(len(algorithm(buffer, **settings).learn(groups, version=step).groups[0].replayed))
    assert joined == [1, 1, 0, 0]


def test_the_answers_of_an_earlier_run_are_counted_too(buffer: SampleBuffer) -> None:
    """The newest of them are used up first; then older ones take their turn, though only k of them are read."""
    settings = MethodSettings.model_validate({"name": "r3", "replay": {"max_repeats": 1, "k": 1, "candidates": 1}})
    replayed = []
    with SampleBuffer(":memory:") as earlier:
        earlier.add(answers("q", [True] * 3))
        followed = Algorithm(settings, buffer, char_tokenizer(), earlier=earlier)
        for step in range(1, 5):
            wrong = make_group([make_sample(False, tokens=[8, step * 10 + i], step=step) for i in range(2)])
            replayed += [s.tokens.tolist() for s in followed.learn([wrong], version=step).groups[0].replayed]
    assert replayed == [[9, 3], [9, 2], [9, 1]]
