"""LUFFY, SAGE and Critique-GRPO: worked examples of their papers, what is asked, naive losses from their formulas."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from r3.algorithm import Algorithm, Prompt
from r3.buffer import SampleBuffer
from r3.method.mixed import StepResult
from r3.method.objective import policy_loss
from r3.method.settings import MethodSettings
from r3.method.step import step
from r3.policy.update import token_batch
from r3.samples import Context, Group, Message, Query, Sample
from tests.tokenizing import char_tokenizer, chat_tokenizer

LIMIT = 20
TOKENIZER = char_tokenizer()
HINT, CRITIQUE = Context("hint"), Context("critique")
PLAIN_IDS, HINTED_IDS = np.array([7, 8]), np.array([7, 8, 9])


def settings_of(name: str, **more: Any) -> MethodSettings:
    return MethodSettings.model_validate({"name": name, "objective": {"constant_length": LIMIT}, **more})


def answer(right: bool, length: int = 4, *, query: str = "q", seed: int = 0, **more: Any) -> Sample:
    rng = np.random.default_rng([seed, length, right])
    tokens = rng.integers(0, 50, length)
    return Sample(query, tokens, -rng.exponential(1.0, length), outcome=right, reward=float(right), **more)


def plain(outcomes: list[int], query: str = "q", lengths: list[int] | None = None, seed: int = 0) -> Group:
    sizes = lengths or [4] * len(outcomes)
    samples = [
        answer(bool(o), n, query=query, seed=seed + i) for i, (o, n) in enumerate(zip(outcomes, sizes, strict=True))
    ]
    return Group(Query(query, "1+1=", "2"), tuple(samples), PLAIN_IDS)


def hinted(outcomes: list[int], follows: int, query: str = "q", seed: int = 100) -> Group:
    samples = [answer(bool(o), query=query, seed=seed + i, context=HINT) for i, o in enumerate(outcomes)]
    return Group(Query(query, "1+1=", "2"), tuple(samples), HINTED_IDS, HINT, PLAIN_IDS, follows=follows)


def refined(right: bool, follows: int, query: str = "q", seed: int = 200, length: int = 4) -> Group:
    sample = answer(right, length, query=query, seed=seed, context=CRITIQUE)
    return Group(Query(query, "1+1=", "2"), (sample,), HINTED_IDS, CRITIQUE, PLAIN_IDS, follows=follows)


def demonstration(query: str = "q", length: int = 5, right: bool = True) -> Sample:
    """As the algorithm makes it: every token with probability 1."""
    zeros = np.zeros(length)
    return Sample(query, np.arange(length), zeros, zeros, outcome=right, reward=float(right))


# ------------------------------------------------------------- worked examples


def test_luffys_group_of_seven_failures_and_a_demonstration() -> None:
    shown = demonstration()
    result = step([plain([0] * 7)], settings_of("luffy"), demonstrations={0: shown})
    (mixed,) = result.groups
    assert mixed.advantages == pytest.approx([-0.125] * 7 + [0.875])
    assert [w.origin for w in result.weighted] == ["fresh"] * 7 + ["demonstration"]
    assert {w.weight for w in result.weighted} == {1 / (8 * LIMIT)}
    assert result.counts["demonstration/joined"] == 1
    assert shown not in result.samples  # it is the data's, not the buffer's
    assert len(result.samples) == 7


def test_luffys_demonstration_joins_every_group_unless_it_is_wrong() -> None:
    groups = [plain([1, 1], "a"), plain([1, 0], "b"), plain([0, 0], "c")]
    shown = {0: demonstration("a"), 1: demonstration("b"), 2: demonstration("c", right=False)}
    result = step(groups, settings_of("luffy"), demonstrations=shown)
    assert [len(m.joined) for m in result.groups] == [1, 1, 0]
    assert (result.counts["demonstration/joined"], result.counts["demonstration/wrong"]) == (2, 1)
    assert {w.group for w in result.weighted} == {1}  # all right, and all wrong, are still homogeneous


def test_a_group_of_seven_failures_and_a_right_refinement() -> None:
    groups = [plain([0] * 7), refined(False, 0, seed=1), refined(True, 0, seed=2), refined(True, 0, seed=3)]
    result = step(groups, settings_of("critique"))
    mixed = result.groups[0]
    assert mixed.advantages == pytest.approx([-0.125] * 7 + [0.875])
    joined = result.weighted[-1]
    assert (joined.origin, joined.other_context, joined.recomputed) == ("critique", True, True)
    assert joined.sample is groups[2].samples[0]  # the first right one
    assert joined.prompt.tolist() == PLAIN_IDS.tolist()
    assert {w.group for w in result.weighted} == {0}  # nothing is trained under the critique
    assert {w.weight for w in result.weighted} == {1 / (8 * LIMIT)}
    assert (result.counts["critique/right"], result.counts["critique/joined"]) == (2, 1)
    both = step(groups, settings_of("critique", critique={"joins": 2})).groups[0]
    assert both.advantages == pytest.approx([-2 / 9] * 7 + [7 / 9] * 2)


def test_a_hinted_group_takes_the_place_of_the_one_that_solved_none() -> None:
    groups = [plain([0] * 8), plain([1, 0], "p"), hinted([0] * 8, 0), hinted([1] + [0] * 7, 0, seed=300)]
    result = step(groups, settings_of("sage"))
    assert [set(m.advantages) == {0.0} for m in result.groups] == [True, False, True, False]
    assert result.groups[3].advantages == pytest.approx([2.6458] + [-0.3780] * 7, abs=1e-4)
    assert {w.group for w in result.weighted} == {1, 3}
    assert all(w.prompt.tolist() == HINTED_IDS.tolist() for w in result.weighted if w.group == 3)
    assert not any(w.other_context for w in result.weighted)  # on-policy where it was drawn
    counts = {key: result.counts[key] for key in ("groups/hint", "hint/queries", "hint/solved", "groups/reflection")}
    assert counts == {"groups/hint": 2, "hint/queries": 1, "hint/solved": 1, "groups/reflection": 0}
    # The token mean is over the groups in the loss: the mixed one's 2 answers and the hinted one's 8, of 4 tokens each.
    assert {w.weight for w in result.weighted} == {1 / 40}


def test_hints_that_bring_nothing_leave_the_plain_group_in_the_loss() -> None:
    groups = [plain([0] * 4), plain([1, 0], "p"), hinted([0] * 4, 0)]
    result = step(groups, settings_of("sage"))
    assert {w.group for w in result.weighted} == {1}
    assert {w.weight for w in result.weighted} == {1 / 24}  # as without hints: 4 answers and 2, of 4 tokens each


# ------------------------------------------------------------- gradients against naive losses

BATCH = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=2, max_size=5), st.lists(st.integers(0, 1), max_size=3)),
    min_size=1, max_size=4,
)  # fmt: skip


def gradients(result: StepResult, settings: MethodSettings, now: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    if not result.weighted:
        return {}
    logprobs = torch.cat([now[id(w.sample)].detach() for w in result.weighted]).float().requires_grad_()
    policy_loss(logprobs, token_batch(result.weighted, torch.device("cpu")), settings.objective).loss.backward()
    assert logprobs.grad is not None
    parts = logprobs.grad.split([len(w.sample) for w in result.weighted])
    return {id(w.sample): part for w, part in zip(result.weighted, parts, strict=True)}


def agree(result: StepResult, settings: MethodSettings, now: dict[int, torch.Tensor], loss: torch.Tensor) -> None:
    if loss.requires_grad:
        loss.backward()
    got = gradients(result, settings, now)
    for key, values in now.items():
        expected = torch.zeros(len(values)) if values.grad is None else values.grad
        ours = got.get(key, torch.zeros(len(values)))
        assert torch.allclose(ours.double(), expected.double(), atol=1e-5, rtol=1e-4)


def drift(samples: list[Sample], seed: int) -> dict[int, torch.Tensor]:
    """Log-probs of the policy that is trained, some way from those that drew the samples."""
    rng = np.random.default_rng(seed)
    return {
        id(s): torch.tensor((s.logprobs - 0.1 + rng.normal(0, 0.6, len(s))).clip(max=-1e-3), requires_grad=True)
        for s in samples
    }


@pytest.mark.parametrize("name", ["luffy", "critique"])
@given(batch=BATCH, seed=st.integers(0, 1000))
def test_gradients_of_what_joins_are_those_of_a_naive_loss(
    name: str, batch: list[tuple[list[int], list[int]]], seed: int
) -> None:
    """A over the mean of all members; fresh −A·r, what joined −A·π/(π + 0.1); sums over LIMIT, means over members."""
    rng = np.random.default_rng(seed)
    sizes = [[int(n) for n in rng.integers(1, LIMIT, len(outcomes))] for outcomes, _ in batch]
    groups = [plain(o, f"q{i}", sizes[i], seed + 10 * i) for i, (o, _) in enumerate(batch)]
    joining: list[Sample | None] = []
    shown: dict[int, Sample] = {}
    for i, (outcomes, others) in enumerate(batch):
        if name == "luffy":
            shown |= {i: demonstration(f"q{i}", int(rng.integers(1, LIMIT)), bool(others[0]))} if others else {}
            joining.append(shown[i] if others and others[0] else None)
            continue
        asked = others if not any(outcomes) else []
        made = [
            refined(bool(o), i, f"q{i}", seed + 50 * i + j, int(rng.integers(1, LIMIT))) for j, o in enumerate(asked)
        ]
        groups += made
        joining.append(next((g.samples[0] for g in made if g.samples[0].outcome), None))
    settings = settings_of(name)
    result = step(groups, settings, demonstrations=shown)
    now = drift([*(s for g in groups for s in g.samples), *shown.values()], seed)
    loss = torch.zeros((), requires_grad=True).clone()
    for i in range(len(batch)):
        members = [*groups[i].samples, *([joining[i]] if joining[i] is not None else [])]
        mean = statistics.fmean(float(bool(s.outcome)) for s in members)
        for sample in members:
            a, log_p = float(bool(sample.outcome)) - mean, now[id(sample)]
            x = log_p.exp()
            term = x / (x + 0.1) if sample is joining[i] else (log_p - torch.tensor(sample.logprobs)).exp()
            loss = loss - a * term.sum() / (LIMIT * len(members) * len(batch))
    agree(result, settings, now, loss)


@given(batch=BATCH, seed=st.integers(0, 1000))
def test_gradients_with_hints_are_those_of_a_naive_loss(batch: list[tuple[list[int], list[int]]], seed: int) -> None:
    """DAPO's clip and token mean over the groups in the loss: hinted ones that solved some for those they follow."""
    groups = [plain(o, f"q{i}", seed=seed + 10 * i) for i, (o, _) in enumerate(batch)]
    trained = list(groups)
    for i, (outcomes, others) in enumerate(batch):
        if others and not any(outcomes):
            groups.append(hinted(others, i, f"q{i}", seed + 70 * i + 7))
            trained[i] = groups[-1] if any(others) else trained[i]
    settings = settings_of("sage")
    now = drift([s for g in groups for s in g.samples], seed)
    tokens = sum(len(s) for g in trained for s in g.samples)
    loss = torch.zeros((), requires_grad=True).clone()
    for group in trained:
        rewards = [float(bool(s.outcome)) for s in group.samples]
        for sample, reward in zip(group.samples, rewards, strict=True):
            a = (reward - statistics.fmean(rewards)) / (statistics.pstdev(rewards) + 1e-6)
            r = (now[id(sample)] - torch.tensor(sample.logprobs)).exp()
            term = torch.minimum(r * a, r.clamp(0.8, 1.28) * a)
            term = torch.maximum(term, torch.tensor(3.0 * a)) if a < 0 else term
            loss = loss - term.sum() / tokens
    agree(step(groups, settings), settings, now, loss)


# ------------------------------------------------------------- what is asked

TEMPLATES = {"hint": {"template": "{question}<{hint}>{instruction}"},
             "critique": {"template": "{question}<{attempt}|{feedback}>{instruction}"}}  # fmt: skip


def algorithm(name: str, **more: Any) -> Algorithm:
    section = {"sage": "hint", "critique": "critique"}.get(name, "demonstration")
    given = {section: {**TEMPLATES.get(section, {}), **more}}
    return Algorithm(settings_of(name, **given), SampleBuffer(":memory:"), TOKENIZER)


def said(text: str, right: bool, query: str, verdict: str = "wrong", context: Context | None = None) -> Sample:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    extra = {} if context is None else {"context": context}
    return Sample(query, tokens, [-1.0] * len(tokens), outcome=right, reward=float(right), verdict=verdict, **extra)


def texts(prompts: list[Prompt]) -> list[str]:
    assert [TOKENIZER.decode(p.tokens.tolist()) for p in prompts] == [p.text for p in prompts]
    return [str(p.text) for p in prompts]


def test_a_plainer_hint_is_tried_until_one_brings_a_right_answer() -> None:
    """Levels 1 and 2 wrong, 3 right: the group of level 3 is taken, and 4 is never asked."""
    query = Query("a", "1+1=", "2", hints=("i", "ii", "iii", "iiii"), instruction="!")
    helper = algorithm("sage")
    asked = list(helper.ask([(query, 1), (query, 1), (Query("b", "2+2="), 1)], step=1).prompts)
    wrong, right = ("1", False), ("2", True)
    groups = [asked[0].group([said(*wrong, "a")] * 2), asked[1].group([said(*right, "a"), said(*wrong, "a")]),
              asked[2].group([said("7", False, "b")])]  # fmt: skip
    seen = []
    for outcome in (wrong, wrong, right):
        following = helper.follow_up(asked, groups, step=1)
        seen += texts(following)
        assert [(p.follows, p.context.kind, p.answers(2)) for p in following] == [(0, "hint", 2)]
        asked += following
        groups.append(following[0].group([said(*outcome, "a", context=HINT)] * 2))
    assert seen == ["1+1=<i>!", "1+1=<ii>!", "1+1=<iii>!"]
    assert helper.follow_up(asked, groups, step=1) == []
    result = helper.learn(groups, version=0)
    assert [m.replay for m in result.groups] == ["helped", "off", "off", "helped", "helped", "off"]


def test_hints_end_with_the_levels_the_budget_or_the_data() -> None:
    query = Query("a", "1+1=", hints=("i", "a long one"))
    for more, rounds in (({}, 2), ({"levels": 1}, 1), ({"max_prompt_tokens": 8}, 1), ({"from_step": 2}, 0)):
        helper = algorithm("sage", **more)
        asked = list(helper.ask([(query, 1)], step=1).prompts)
        groups = [asked[0].group([said("1", False, "a")])]
        for _ in range(rounds):
            (prompt,) = helper.follow_up(asked, groups, step=1)
            asked.append(prompt)
            groups.append(prompt.group([said("1", False, "a", context=HINT)]))
        assert helper.follow_up(asked, groups, step=1) == [], more


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"feedback": "gold"}, ["1+1=<1|2>", "1+1=<3|2>"]),
        ({"feedback": "verdict"}, ["1+1=<1|wrong>", "1+1=<3|off by one>"]),
        ({"feedback": "column"}, ["1+1=<1|count>", "1+1=<3|count>"]),
        ({"feedback": "gold", "attempts": 1}, ["1+1=<1|2>"]),
        ({"feedback": "gold", "when": "failures"}, ["1+1=<1|2>", "1+1=<3|2>", "2+2=<5|4>"]),
        ({"feedback": "gold", "max_prompt_tokens": 7}, []),
        ({"feedback": "verdict", "template": "{question}~{attempt}"}, ["1+1=~1", "1+1=~3"]),
    ],
)
def test_which_failures_are_refined_and_what_is_said_of_them(more: dict[str, Any], expected: list[str]) -> None:
    helper = algorithm("critique", **more)
    queries = [Query("a", "1+1=", "2", feedback="count"), Query("b", "2+2=", "4")]
    asked = helper.ask([(query, 1) for query in queries], step=1).prompts
    failures = [said("1", False, "a"), said("3", False, "a", "wrong\noff by one")]
    groups = [asked[0].group(failures), asked[1].group([said("4", True, "b"), said("5", False, "b")])]
    prompts = helper.follow_up(asked, groups, step=1)
    assert texts(prompts) == expected
    assert all((p.answers(8), p.context.kind) == (1, "critique") for p in prompts)
    made = [p.group([said("2", False, p.query.id, context=CRITIQUE)]) for p in prompts]
    assert helper.follow_up([*asked, *prompts], [*groups, *made], step=1) == []


def test_nothing_follows_without_a_method_that_asks_again() -> None:
    query = Query("a", "1+1=", "2", hints=("i",), demonstration="2", feedback="no")
    for name in ("grpo", "r3", "luffy"):
        helper = Algorithm(MethodSettings(name=name), SampleBuffer(":memory:"), TOKENIZER)  # type: ignore[arg-type]
        asked = helper.ask([(query, 1)], step=1).prompts
        group = asked[0].group([said("1", False, "a")])
        assert helper.follow_up(asked, [group], step=1) == []
        assert bool(helper.demonstrations([group], version=0)) is (name == "luffy")


def test_hints_of_a_chat_stand_in_its_last_question() -> None:
    turns = (Message("system", "s"), Message("user", "1+1?"))
    settings = settings_of("sage", hint={"template": "{question} Hint: {hint}"})
    helper = Algorithm(settings, SampleBuffer(":memory:"), chat_tokenizer())
    prompt = Prompt(Query("a", turns, hints=("think",)), 1, 0, PLAIN_IDS, turns)
    (following,) = helper.follow_up([prompt], [prompt.group([said("1", False, "a")])], step=1)
    assert following.text == (Message("system", "s"), Message("user", "1+1? Hint: think"))


def test_a_demonstration_ends_and_is_not_longer_than_an_answer_may_be() -> None:
    query = Query("a", "1+1=", demonstration="1+1=2")
    groups = [Group(query, (said("1", False, "a"),), PLAIN_IDS), plain([0], "b")]
    found = algorithm("luffy").demonstrations(groups, version=3)
    assert list(found) == [0]
    assert found[0].tokens.tolist() == [*TOKENIZER.encode("1+1=2", add_special_tokens=False), TOKENIZER.eos_token_id]
    assert found[0].logprobs.tolist() == [0.0] * 6
    assert (found[0].outcome, found[0].policy_version) == (None, 3)
    assert algorithm("luffy", max_tokens=5).demonstrations(groups, version=3) == {}
    solved = [Group(query, (said("2", True, "a"),), PLAIN_IDS)]
    assert list(algorithm("luffy").demonstrations(solved, version=0)) == [0]
    assert algorithm("luffy", when="solve_none").demonstrations(solved, version=0) == {}


# ------------------------------------------------------------- the buffer


def test_refinements_are_stored_once_and_demonstrations_never() -> None:
    helper = Algorithm(settings_of("critique", demonstration="on"), SampleBuffer(":memory:"), TOKENIZER)
    groups = [plain([0, 0]), refined(False, 0, seed=1), refined(True, 0, seed=2)]
    result = helper.learn(groups, version=0, demonstrations={0: demonstration()})
    stored = helper.buffer.history(["q"])["q"]
    assert sorted(s.context.kind for s in stored) == ["critique", "critique", "plain", "plain"]
    assert helper.buffer.attempts(["q"])["q"] == (2, 0)
    assert helper.buffer.attempts(["q"], context="critique")["q"] == (2, 1)
    joined = result.groups[0].joined
    assert [(m.origin, m.sample.id) for m in joined] == [("critique", result.groups[2].members[0].sample.id),
                                                         ("demonstration", None)]  # fmt: skip


def test_what_was_found_with_a_hint_may_be_replayed_under_the_plain_prompt() -> None:
    helper = Algorithm(settings_of("r3-no-reflection", hint="on"), SampleBuffer(":memory:"), TOKENIZER)
    helper.learn([plain([0, 0]), hinted([1, 0], 0)], version=0)
    later = helper.learn([plain([0, 0], seed=9)], version=1)
    assert [(s.context.kind, s.outcome) for s in later.groups[0].replayed] == [("hint", True)]
    assert later.counts["replay/cross_context"] == 1


# ------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("sage", {"demonstration": "on"}, "set demonstration=off or hint=off"),
        ("critique", {"hint": "on"}, "set critique=off or hint=off"),
        ("sage", {"resample": "on"}, "set resample=off"),
        ("sdpo", {"hint": "on"}, "set hint=off or a smaller distill"),
        ("sdpo", {"demonstration": "on"}, "set demonstration=off or a smaller distill"),
        ("repo", {"critique": "on"}, r"set replay\.baseline=joint"),
        ("sage", {"hint": {"template": "{question}"}}, r"hint\.template must contain \{hint\} exactly once"),
        ("critique", {"critique": {"template": "{attempt}"}}, r"critique\.template must contain \{question\}"),
        ("critique", {"critique": {"template": "{question}{attempt}"}}, r"feedback=gold is not shown"),
    ],
)
def test_contradictions_are_refused(name: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MethodSettings.model_validate({"name": name, **more})


def test_they_combine_with_what_does_not_contradict_them() -> None:
    for name, more in (("r3", {"demonstration": "on"}), ("r3", {"critique": "on"}), ("rlep", {"hint": "on"}),
                       ("dapo", {"demonstration": {"enabled": True, "when": "solve_none"}})):  # fmt: skip
        assert MethodSettings.model_validate({"name": name, **more}).name == name
