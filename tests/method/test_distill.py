"""SDPO on sampled tokens: its divergence, who teaches whom, and its gradients against a naive loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from r3.method.distill import lessons_of, token_advantages
from r3.method.mechanisms import DistillSettings
from r3.method.objective import policy_loss
from r3.method.settings import MethodSettings
from r3.method.step import step
from r3.policy.update import token_batch
from r3.samples import FloatArray, Group, Query, Sample
from tests.method.makers import make_group
from tests.tokenizing import char_tokenizer

SDPO = MethodSettings(name="sdpo")
TOKENIZER = char_tokenizer()


def answer(text: str, right: bool, verdict: str = "", query: str = "q") -> Sample:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    logprobs = np.full(len(tokens), -1.0)
    return Sample(query, tokens, logprobs, outcome=right, reward=float(right), verdict=verdict)


def shown(samples: list[Sample], past: list[Sample], **settings: object) -> list[str | None]:
    """The teacher's prompt for each answer, None where it has none."""
    options = DistillSettings.model_validate(
        {"template": "{question}|{attempt}|", "feedback_template": "{question}!{attempt}!", **settings}
    )
    group = Group(Query("q", "1+1="), tuple(samples), np.array([7]))
    found = {one.member: one for one in lessons_of(0, group, past, TOKENIZER, options)}
    return [TOKENIZER.decode(found[i].prompt) if i in found else None for i in range(len(samples))]


def test_the_mean_over_the_students_draws_is_the_reverse_divergence() -> None:
    """The worked example: S = [.5, .5], T = [.9, .1] give 0.51083."""
    student, teacher = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    assert -(student @ token_advantages(np.log(teacher), np.log(student))) == pytest.approx(0.51083, abs=1e-5)
    clipped = token_advantages(np.log(teacher), np.log(student), clip=1.0)
    assert clipped.tolist() == pytest.approx([0.5878, -1.0], abs=1e-4)


def test_nobody_is_taught_by_the_answer_that_is_scored() -> None:
    mixed = [answer("ab", False), answer("cd", True), answer("ef", True)]
    assert shown(mixed, []) == ["1+1=|cd|", "1+1=|ef|", "1+1=|cd|"]
    assert shown([answer("ab", False), answer("cd", True)], []) == ["1+1=|cd|", None]
    assert shown([answer("ab", True), answer("cd", True)], []) == ["1+1=|cd|", "1+1=|ab|"]  # all right: taught too


def test_past_successes_and_the_verifiers_word_fill_what_the_group_lacks() -> None:
    wrong = [answer("ab", False, "wrong\nsum 3"), answer("cd", False)]
    assert shown(wrong, [answer("xy", True)]) == ["1+1=|xy|", "1+1=|xy|"]
    assert shown(wrong, [answer("xy", True)], history=False) == ["1+1=!sum 3!", None]
    assert shown(wrong, []) == ["1+1=!sum 3!", None]
    assert shown(wrong, [], feedback=False) == [None, None]
    lone = [answer("ab", True, "right\nall passed"), answer("cd", False)]
    assert shown(lone, [answer("xy", True)]) == ["1+1=|xy|", "1+1=|ab|"]
    assert shown(lone, []) == [None, "1+1=|ab|"]  # what was said of a right answer teaches nothing
    assert shown(lone, [answer("xy", True)], max_prompt_tokens=3) == [None, None]


def test_an_answer_without_a_teacher_leaves_the_loss_and_its_denominators() -> None:
    group = make_group([answer("abc", True), answer("de", False)])
    teacher = {(0, 1): np.array([-0.5, -3.0], np.float32)}
    (taught,) = step([group], SDPO, teacher=teacher).weighted
    assert taught.member == 1
    assert taught.advantage_T.tolist() == pytest.approx([0.5, -2.0])
    assert taught.weight == 1 / 2  # the token mean, over its two tokens alone
    assert step([group], SDPO).weighted == ()


def test_a_smaller_weight_leaves_the_methods_own_advantage_the_rest() -> None:
    group = make_group([answer("abc", True), answer("de", False)])
    settings = MethodSettings.model_validate({"name": "grpo", "distill": {"enabled": True, "weight": 0.25}})
    teacher = {(0, 1): np.array([-0.5, -3.0], np.float32)}
    right, wrong = step([group], settings, teacher=teacher).weighted
    assert right.advantage_T.tolist() == pytest.approx([0.75] * 3, abs=1e-5)
    assert wrong.advantage_T.tolist() == pytest.approx([0.25 * 0.5 - 0.75, 0.25 * -2.0 - 0.75], abs=1e-5)


@given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=2, max_size=4), min_size=1, max_size=4),
    seed=st.integers(0, 999),
    weight=st.sampled_from([1.0, 0.4]),
)
def test_gradients_are_those_of_a_naive_loss(lengths: list[list[int]], seed: int, weight: float) -> None:
    """−min(π/π_old, 2) · sg[w (log T − log S) + (1 − w) A] · log π, over all tokens of the answers that are counted."""
    rng = np.random.default_rng(seed)
    settings = MethodSettings.model_validate({"name": "sdpo", "distill": {"weight": weight}})
    groups, teacher = [], {}
    for g, row in enumerate(lengths):
        samples = []
        for i, n in enumerate(row):
            right = bool(rng.integers(2))
            samples.append(
                Sample(f"q{g}", rng.integers(0, 9, n), -rng.exponential(1.0, n), outcome=right, reward=right)
            )
            if rng.random() < 0.7:
                teacher[g, i] = -rng.exponential(1.0, n).astype(np.float32)
        groups.append(make_group(samples, query_id=f"q{g}"))
    now = {
        (g, i): torch.tensor(s.logprobs + rng.normal(0, 0.6, len(s)), requires_grad=True)
        for g, group in enumerate(groups)
        for i, s in enumerate(group.samples)
    }
    naive(groups, teacher, now, weight).backward()
    result = step(groups, settings, teacher=teacher)
    got: dict[tuple[int, int], torch.Tensor] = {}
    if result.weighted:
        logprobs = torch.cat([now[w.group, w.member].detach() for w in result.weighted]).float().requires_grad_()
        policy_loss(logprobs, token_batch(result.weighted, torch.device("cpu")), settings.objective).loss.backward()
        assert logprobs.grad is not None
        parts = logprobs.grad.split([len(w.sample) for w in result.weighted])
        got = {(w.group, w.member): part for w, part in zip(result.weighted, parts, strict=True)}
    for key, values in now.items():
        expected = torch.zeros(len(values)) if values.grad is None else values.grad.float()
        assert torch.allclose(got.get(key, torch.zeros(len(values))), expected, atol=1e-5, rtol=1e-4)


def naive(
    groups: list[Group], teacher: dict[tuple[int, int], FloatArray], now: dict[tuple[int, int], torch.Tensor], w: float
) -> torch.Tensor:
    total, tokens = torch.zeros((), requires_grad=True).clone(), 0
    for g, group in enumerate(groups):
        rewards = np.array([float(bool(s.outcome)) for s in group.samples])
        for i, sample in enumerate(group.samples):
            if w == 1 and (g, i) not in teacher:
                continue
            tokens += len(sample)
            own = (rewards[i] - rewards.mean()) / (rewards.std() + 1e-6)
            old = torch.tensor(sample.logprobs)
            taught = torch.tensor(teacher[g, i]) - old if (g, i) in teacher else torch.zeros(len(sample))
            advantage_T = w * taught + (1 - w) * own
            ratio_T = (now[g, i] - old).exp().detach().clamp(max=2.0)
            total = total - (ratio_T * advantage_T * now[g, i]).sum()
    return total / max(1, tokens)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"replay": "on"}, r"set replay=off or a smaller distill\.weight"),
        ({"ranking": "on"}, r"set ranking=off or a smaller distill\.weight"),
        ({"resample": "on"}, "set resample=off"),
        ({"distill": {"template": "{attempt}"}}, r"distill\.template must contain \{question\} exactly once"),
    ],
)
def test_contradictions_are_refused(more: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        MethodSettings.model_validate({"name": "sdpo", **more})
