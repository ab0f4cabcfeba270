"""Every objective against a naive reference: one sequence at a time, one token at a time, float64.

What an answer that is not the policy's own weighs, by worked examples of its paper.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from r3.method.mixed import Origin, WeightedSample
from r3.method.objective import ORIGINS, Diagnostics, TokenBatch, policy_loss
from r3.method.settings import OBJECTIVES, MethodSettings, ObjectiveSettings
from r3.policy.update import token_batch
from r3.samples import Sample

VARIANTS = [
    *({"name": name} for name in OBJECTIVES),
    *({"name": name, "correction": "naive"} for name in OBJECTIVES),
    {"name": "grpo", "kl": 0.1},
    {"name": "dapo", "ratio_gate": None, "importance_cap": 1.1},
    {"name": "gspo", "ratio_gate": 1.5, "clip_low": 0.1, "clip_high": 0.2},
    {"name": "grpo", "correction": "naive", "dual_clip": 1.5},
    {"name": "grpo", "correction": "naive", "dual_clip": None},
    {"name": "grpo", "correction": "naive", "ratio_gate": 1.5},
    *({"name": name, "correction": "stopped"} for name in ("grpo", "gspo", "cispo")),
    {"name": "dapo", "correction": "recomputed", "ratio_gate": None},
    {"name": "gspo", "correction": "recomputed", "ratio_gate": 1.5},
    {"name": "grpo", "shaping": {"by": "policy", "beta": 0.1}},
    {"name": "dapo", "shaping": {"by": "ratio", "beta": 0.5}, "ratio_gate": 1.5},
]


# Where each sequence of a batch comes from, and whether it was drawn under another prompt.
SEQUENCES = [
    *[("fresh", False), ("fresh", False), ("replayed", False), ("replayed", False), ("replayed", True)],
    *[("reflection", False), ("reflection", True), ("fresh", False), ("hint", False), ("critique", True)],
    *[("demonstration", False), ("demonstration", False)],
]
COUNT = len(SEQUENCES)


def random_batch(seed: int, *, spread: float = 0.6, with_proximal: bool = False) -> tuple[torch.Tensor, TokenBatch]:
    """Sequences of every origin, with ratios on both sides of every clip, cap and gate.

    Half of them have one advantage for all tokens, the others one for each.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (COUNT,), generator=g)
    sequence_T = torch.repeat_interleave(torch.arange(COUNT), lengths)
    n = len(sequence_T)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(n, generator=g, dtype=torch.float64)

    logprobs_T = -torch.rand(n, generator=g, dtype=torch.float64) * 3
    by_token_T = torch.arange(COUNT)[sequence_T] % 2 == 0
    advantage_S = torch.randn(COUNT, generator=g, dtype=torch.float64)
    origin_S = torch.tensor([ORIGINS.index(origin) for origin, _ in SEQUENCES])
    behaviour_T = logprobs_T + noise(spread)
    if spread:  # without any, all is on-policy
        behaviour_T[origin_S[sequence_T] == ORIGINS.index("demonstration")] = 0.0
    batch = TokenBatch(
        sequence_T=sequence_T,
        behaviour_T=behaviour_T,
        advantage_T=torch.where(by_token_T, noise(1.0), advantage_S[sequence_T]),
        weight_S=torch.rand(COUNT, generator=g, dtype=torch.float64),
        origin_S=origin_S,
        other_context_S=torch.tensor([moved for _, moved in SEQUENCES]),
        proximal_T=logprobs_T + noise(0.2) if with_proximal else None,
        reference_T=logprobs_T + noise(0.5),
    )
    return logprobs_T, batch


def reference_loss(logprobs: torch.Tensor, batch: TokenBatch, s: ObjectiveSettings) -> torch.Tensor:
    """The formulas of the module's docstring, spelt out in scalars."""
    total = torch.zeros((), dtype=torch.float64)
    for seq in range(len(batch.weight_S)):
        at = [t for t in range(len(logprobs)) if int(batch.sequence_T[t]) == seq]
        origin = ORIGINS[int(batch.origin_S[seq])]
        replayed, joined = origin == "replayed", origin in ("replayed", "demonstration", "critique")
        moved = bool(batch.other_context_S[seq])
        w = float(batch.weight_S[seq])
        log_r, log_w, stale, shaped = [], [], [], []
        for t in at:
            now = logprobs[t]
            behave = float(batch.behaviour_T[t])
            if batch.proximal_T is not None:
                prox = float(batch.proximal_T[t])
            else:
                prox = float(now.detach()) if replayed or origin == "demonstration" or moved else behave
            if moved:
                behave = prox
            stale.append(prox - behave)
            x = torch.exp(now if s.shaping.by == "policy" else now - behave)
            shaped.append(x / (x + s.shaping.beta))
            if s.correction == "naive" and joined:
                prox = behave
            log_r.append(now - prox)
            log_w.append(prox - behave)
        if s.ratio == "sequence":
            log_r = [torch.stack(log_r).mean()] * len(at)
            log_w = [math.fsum(log_w) / len(at)] * len(at)
            stale = [math.fsum(stale) / len(at)] * len(at)
        for i, t in enumerate(at):
            r, a = torch.exp(log_r[i]), float(batch.advantage_T[t])
            clipped = torch.clamp(r, 1 - s.clip_low, 1 + s.clip_high)
            weight = min(math.exp(log_w[i]), s.importance_cap)
            if s.correction == "stopped" and joined:
                past = math.exp(log_w[i]) > 1 + s.clip_high if a > 0 else math.exp(log_w[i]) < 1 - s.clip_low
                weight = 0.0 if past else min(math.exp(log_w[i]), 1.0)
            if (s.shaping.by != "none" or s.correction == "recomputed") and joined:
                weight = 1.0
            if replayed and s.ratio_gate is not None and not 1 / s.ratio_gate <= math.exp(stale[i]) <= s.ratio_gate:
                weight = 0.0
            gain = clipped.detach() * a * logprobs[t] if s.surrogate == "cispo" else torch.min(r * a, clipped * a)
            if s.surrogate == "clip" and a < 0 and s.dual_clip is not None and float(r.detach()) > s.dual_clip:
                gain = torch.tensor(s.dual_clip * a, dtype=torch.float64)  # a constant: nothing is learnt from it
            if s.shaping.by != "none" and joined:
                gain = a * shaped[i]
            total = total - w * weight * gain
            if s.kl:
                x = batch.reference_T[t] - logprobs[t]  # type: ignore[index]
                total = total + w * s.kl * (torch.exp(x) - x - 1)
    return total


@pytest.mark.parametrize("with_proximal", [False, True], ids=["one-update", "several-updates"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(str(x) for x in v.values()))
def test_loss_and_gradient_agree_with_the_naive_reference(variant: dict[str, Any], with_proximal: bool) -> None:
    settings = ObjectiveSettings(**variant)
    for seed in range(12):
        values, batch = random_batch(seed, with_proximal=with_proximal)
        mine, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
        loss = policy_loss(mine, batch, settings).loss
        expected = reference_loss(theirs, batch, settings)
        loss.backward()
        expected.backward()
        assert mine.grad is not None
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_float32_gradient_agrees_to_1e_5(name: str) -> None:
    settings = ObjectiveSettings(name=name)
    values, batch = random_batch(1)
    single = {f: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for f, v in _fields(batch).items()}
    mine, theirs = values.float().requires_grad_(), values.clone().requires_grad_()
    policy_loss(mine, TokenBatch(**single), settings).loss.backward()
    reference_loss(theirs, batch, settings).backward()
    torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(str(x) for x in v.values()))
def test_micro_batches_add_up(variant: dict[str, Any]) -> None:
    settings = ObjectiveSettings(**variant)
    values, batch = random_batch(3, with_proximal=True)
    whole = policy_loss(values, batch, settings)
    parts = [policy_loss(values[at], part, settings) for at, part in _split(batch)]
    torch.testing.assert_close(sum(p.loss for p in parts), whole.loss)
    merged = Diagnostics.merge([p.diagnostics for p in parts]).summary()
    assert merged == pytest.approx(whole.diagnostics.summary())


def test_fresh_on_policy_gradient_is_plain_policy_gradient() -> None:
    """At ratio 1 every objective is A · ∇log π, weighted."""
    values, batch = random_batch(5, spread=0.0)
    for name in OBJECTIVES:
        leaf = values.clone().requires_grad_()
        policy_loss(leaf, batch, ObjectiveSettings(name=name)).loss.backward()
        expected = -batch.advantage_T * batch.weight_S[batch.sequence_T]
        if name == "gspo":  # a token's ratio is its sequence's: what all are worth is shared
            expected = _shared(expected, batch)
        torch.testing.assert_close(leaf.grad, expected)


def _shared(values_T: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Each sequence's mean at each of its tokens."""
    sequences = batch.sequence_T.unique()
    means = torch.stack([values_T[batch.sequence_T == seq].mean() for seq in sequences])
    return means[batch.sequence_T]


@given(st.integers(0, 10**6), st.sampled_from(list(OBJECTIVES)))
def test_importance_is_bounded_by_the_cap(seed: int, name: str) -> None:
    """However stale, a replayed token weighs at most cap times what a fresh one would."""
    settings = ObjectiveSettings(name=name, importance_cap=1.5, ratio_gate=None)
    values, batch = random_batch(seed, spread=4.0)
    leaf = values.clone().requires_grad_()
    policy_loss(leaf, batch, settings).loss.backward()
    replayed = (batch.origin_S == ORIGINS.index("replayed"))[batch.sequence_T]
    bound = 1.5 * batch.advantage_T.abs() * batch.weight_S[batch.sequence_T]
    if name == "gspo":
        bound = _shared(bound, batch)
    assert leaf.grad is not None
    assert bool((leaf.grad.abs()[replayed] <= bound[replayed] + 1e-9).all())


def test_a_replayed_failure_cannot_outweigh_the_batch() -> None:
    """A token of an old wrong answer that has become 300 times likelier, since it belongs to right ones too."""

    def pulls(**settings: Any) -> list[float]:
        leaf = torch.log(torch.tensor([0.9, 0.9, 0.003])).requires_grad_()
        batch = TokenBatch(
            sequence_T=torch.tensor([0, 1, 1]),
            behaviour_T=torch.log(torch.tensor([0.9, 0.003, 0.003])),
            advantage_T=torch.tensor([0.5, -2.0, -2.0]),
            weight_S=torch.tensor([1.0, 1.0]),
            origin_S=torch.tensor([0, 1]),
            other_context_S=torch.tensor([False, False]),
        )
        result = policy_loss(leaf, batch, ObjectiveSettings(name="grpo", **settings))
        result.loss.backward()
        assert leaf.grad is not None
        assert result.diagnostics.clipped_T.tolist() == [False, settings == {"correction": "naive"}, False]
        return leaf.grad.tolist()

    assert pulls(correction="naive") == pytest.approx([-0.5, 0.0, 2.0])
    assert pulls(correction="naive", dual_clip=None) == pytest.approx([-0.5, 0.0, 2.0])  # the gate
    unbounded = pulls(correction="naive", dual_clip=None, ratio_gate=None)
    assert unbounded == pytest.approx([-0.5, 600.0, 2.0], rel=1e-4)
    assert pulls() == pytest.approx([-0.5, 0.0, 2.0])  # truncated: gated


def test_extreme_log_probs_stay_finite() -> None:
    values, batch = random_batch(0, spread=400.0)
    for name in OBJECTIVES:
        leaf = values.float().requires_grad_()
        single = {
            f: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for f, v in _fields(batch).items()
        }
        result = policy_loss(leaf, TokenBatch(**single), ObjectiveSettings(name=name, ratio_gate=None))
        result.loss.backward()
        assert leaf.grad is not None
        assert bool(torch.isfinite(leaf.grad).all())
        assert all(math.isfinite(v) for v in result.diagnostics.summary().values())


def test_diagnostics_say_what_happened() -> None:
    batch = TokenBatch(
        sequence_T=torch.tensor([0, 0, 0, 0, 1, 1]),
        behaviour_T=torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5, 0.01, 0.5])),
        advantage_T=torch.ones(6),
        weight_S=torch.tensor([0.1, 0.1]),
        origin_S=torch.tensor([0, 1]),
        other_context_S=torch.tensor([False, False]),
    )
    logprobs = torch.log(torch.tensor([0.5, 0.65, 0.3, 0.5, 0.5, 0.5]))
    result = policy_loss(logprobs, batch, ObjectiveSettings(name="grpo"))
    facts = result.diagnostics.summary()
    assert facts["tokens/fresh"] == 4
    assert facts["clip_share/fresh"] == 0.25  # 1.3 > 1.2 with a positive advantage; 0.6 is not clipped
    assert facts["gated_share/replayed"] == 0.5  # 50 is outside the gate
    assert facts["ratio_max/replayed"] == pytest.approx(50.0, rel=1e-5)
    assert facts["ratio_p50/fresh"] == pytest.approx(1.0)
    assert facts["ess/replayed"] == pytest.approx(51**2 / (2 * (50**2 + 1)), rel=1e-4)
    assert "tokens/reflection" not in facts


def test_kl_needs_a_reference() -> None:
    values, batch = random_batch(0)
    without = {**_fields(batch), "reference_T": None}
    with pytest.raises(ValueError, match="reference_T"):
        policy_loss(values, TokenBatch(**without), ObjectiveSettings(kl=0.1))


def _fields(batch: TokenBatch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in TokenBatch.__dataclass_fields__}


def _split(batch: TokenBatch) -> list[tuple[torch.Tensor, TokenBatch]]:
    """Two micro-batches of whole sequences, renumbered from 0."""
    parts = []
    for low, high in ((0, 3), (3, COUNT)):
        at = ((batch.sequence_T >= low) & (batch.sequence_T < high)).nonzero().squeeze(1)
        fields = {
            name: None if value is None else value[at] if name.endswith("_T") else value[low:high]
            for name, value in _fields(batch).items()
        }
        parts.append((at, TokenBatch(**{**fields, "sequence_T": batch.sequence_T[at] - low})))
    return parts


def test_tokens_of_another_prompt_are_counted_apart_and_do_not_look_on_policy() -> None:
    values, batch = random_batch(3)
    told = policy_loss(values, batch, ObjectiveSettings()).diagnostics.summary()
    lengths = torch.bincount(batch.sequence_T)
    moved = lengths[batch.other_context_S]
    assert told["tokens/other_context"] == int(moved.sum())
    replayed = (batch.origin_S == ORIGINS.index("replayed")) & ~batch.other_context_S
    assert told["tokens/replayed"] == int(lengths[replayed].sum())
    ratios = (values - batch.behaviour_T)[replayed[batch.sequence_T]].exp()
    expected = float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()))
    assert told["ess/replayed"] == pytest.approx(expected)


def test_a_success_of_another_prompt_met_again_and_again_stops_pulling_only_where_it_is_shaped() -> None:
    """One replayed token per step, at a learning rate of 1: the shaped pull dies away once the token is likely."""

    def pull(logprob: float, **settings: Any) -> float:
        leaf = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
        batch = TokenBatch(
            sequence_T=torch.tensor([0]),
            behaviour_T=torch.tensor([-9.0], dtype=torch.float64),
            advantage_T=torch.tensor([1.0], dtype=torch.float64),
            weight_S=torch.tensor([1.0], dtype=torch.float64),
            origin_S=torch.tensor([ORIGINS.index("replayed")]),
            other_context_S=torch.tensor([True]),
        )
        policy_loss(leaf, batch, ObjectiveSettings(**settings)).loss.backward()
        assert leaf.grad is not None
        return -float(leaf.grad)

    for correction in ("truncated", "naive", "stopped"):
        assert [pull(x, correction=correction) for x in (-9.0, -0.01)] == pytest.approx([1.0, 1.0])
    shaped = {"shaping": {"by": "policy", "beta": 0.1}}
    assert pull(math.log(0.1), **shaped) == pytest.approx(0.25)  # β·x/(x + β)² is largest at x = β
    assert pull(math.log(0.99), **shaped) == pytest.approx(0.099 / 1.09**2)


# One token of an answer that is not the policy's own: worked examples of LUFFY, Critique-GRPO and ExGRPO.

PROMPT = np.array([7, 8], np.int32)


def preset(name: str, **objective: Any) -> ObjectiveSettings:
    """The objective of a method by name; a sum over tokens is divided by 20 where it divides by a constant."""
    return MethodSettings.model_validate({"name": name, "objective": {"constant_length": 20, **objective}}).objective


@pytest.mark.parametrize(("name", "origin", "p", "value", "slope"), [
    ("luffy", "demonstration", 0.1, 0.5, 0.25), ("luffy", "demonstration", 0.9, 0.9, 0.09),
    ("critique", "critique", 0.02, 0.1667, 0.1389),
])  # fmt: skip
def test_what_a_token_of_this_probability_weighs(
    name: str, origin: Origin, p: float, value: float, slope: float
) -> None:
    """x/(x + β) and its slope by log π; unshaped, the slope would be the probability itself."""
    sample = Sample("q", [1], [0.0], outcome=True, reward=1.0)
    one = WeightedSample(PROMPT, sample, 1.0, 1.0, origin, origin == "critique", 0, 0)
    for shaped, expected in ((preset(name), (value, slope)), (unshaped(name), (None, p))):
        if shaped.shaping.by == "none" and origin == "critique":
            continue  # without the shaping it is on-policy by convention: slope 1
        logprob = torch.tensor([math.log(p)], requires_grad=True)
        result = policy_loss(logprob, token_batch([one], torch.device("cpu")), shaped)
        result.loss.backward()
        assert logprob.grad is not None
        assert -float(logprob.grad) == pytest.approx(expected[1], abs=1e-4)
        if expected[0] is not None:
            assert -float(result.loss.detach()) == pytest.approx(expected[0], abs=1e-4)


def unshaped(name: str) -> Any:
    return preset(name, shaping={"by": "none"})


def test_a_demonstration_is_not_gated_for_being_unlikely() -> None:
    """The gate is for what the policy has left behind; a demonstration's unlikely tokens are what it is there for."""
    sample = Sample("q", [1], [0.0], outcome=True, reward=1.0)
    objective = preset("luffy", ratio_gate=2.0)
    for origin, gated in (("demonstration", False), ("replayed", True)):
        logprob = torch.tensor([-5.0], requires_grad=True)
        one = WeightedSample(PROMPT, sample, 1.0, 1.0, origin, False, 0, 0)  # type: ignore[arg-type]
        policy_loss(logprob, token_batch([one], torch.device("cpu")), objective).loss.backward()
        assert logprob.grad is not None
        assert (float(logprob.grad) == 0.0) is gated


@pytest.mark.parametrize(("x", "value", "slope"), [
    (0.01, 0.0909, 8.264), (0.1, 0.5, 2.5), (0.5, 0.8333, 0.2778), (1.0, 0.9091, 0.0826), (2.0, 0.9524, 0.0227),
])  # fmt: skip
def test_exgrpos_shaping(x: float, value: float, slope: float) -> None:
    """f(x) = x/(x + β) and its slope, read off the loss of one replayed token."""
    sample = Sample("q", [1], [-3.0], outcome=True, reward=1.0)
    weighted = WeightedSample(PROMPT, sample, 1.0, 1.0, "replayed", False, 0, 0)
    logprob = torch.tensor([-3.0 + math.log(x)], requires_grad=True)
    result = policy_loss(logprob, token_batch([weighted], torch.device("cpu")), preset("exgrpo"))
    result.loss.backward()
    assert -float(result.loss.detach()) == pytest.approx(value, abs=1e-4)
    assert logprob.grad is not None
    assert -float(logprob.grad) / x == pytest.approx(slope, rel=1e-3, abs=1e-4)
