"""The packed update against an unpacked one: whole logits, one row at a time, the formulas spelt out.

Covers r3.policy.update, r3.policy.attention, r3.policy.layers, r3.policy.packing, r3.policy.optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from r3.cli import main
from r3.config import TrainSettings
from r3.errors import ConfigError
from r3.method.mixed import WeightedSample
from r3.method.objective import policy_loss
from r3.method.settings import OBJECTIVES, ObjectiveSettings
from r3.policy import ModelSettings
from r3.policy.attention import packed
from r3.policy.layers import LOGITS
from r3.policy.model import Policy
from r3.policy.optimiser import Optimiser
from r3.policy.packing import Trajectory, pack, pack_sharing
from r3.policy.update import Updater, token_batch
from tests.tokenizing import char_tokenizer
from tests.train.tiny import overrides, save_model

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> list[WeightedSample]:
    """The weighted samples of a real run of `r3 train`, of every origin and context."""
    seen: list[WeightedSample] = []
    original = Updater.update

    def spy(self: Updater, weighted: Sequence[WeightedSample], **options: Any) -> Any:
        seen.extend(weighted)
        return original(self, weighted, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Updater, "update", spy)
        folder = tmp_path_factory.mktemp("run")
        assert main(["train", "--quiet", *overrides(folder, method__reflection__train_as="both")]) == 0
    kinds = {(w.origin, w.other_context) for w in seen}
    assert {("fresh", False), ("replayed", False), ("reflection", False), ("reflection", True)} <= kinds
    chosen: list[WeightedSample] = []
    for kind in sorted(kinds):
        chosen += [w for w in seen if (w.origin, w.other_context) == kind][:6]
    return chosen


def policy_of(tmp_path: Path, lora: bool = False, checkpointing: bool = False) -> Policy:
    folder = save_model(tmp_path / "model", seed=3)
    settings = ModelSettings.model_validate(
        {
            "path": str(folder),
            "device": "cpu",
            "lora": {"enabled": lora, "rank": 4},
            "gradient_checkpointing": checkpointing,
        }
    )
    policy = Policy.load(settings)
    if lora:  # adapters start as zero, which would hide half of their gradients
        torch.manual_seed(0)
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
    return policy


def reference_loss(policy: Policy, batch: Sequence[WeightedSample], objective: ObjectiveSettings) -> torch.Tensor:
    """One row at a time through the model's own forward with its own attention, logits and all."""
    total = torch.zeros(())
    for w in batch:
        ids = torch.tensor([*w.prompt.tolist(), *w.sample.tokens.tolist()])
        logits = policy.base(input_ids=ids.unsqueeze(0)).logits[0]
        logs = (logits[len(w.prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        logprobs = logs.gather(1, ids[len(w.prompt) :].unsqueeze(1)).squeeze(1)
        # policy_loss has its own naive reference in tests/method; here it is the packing that is tested
        total = total + policy_loss(logprobs, token_batch([w], torch.device("cpu")), objective).loss
    return total


@pytest.mark.parametrize("sharing", [False, True], ids=["", "prompts shared"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_packed_gradients_equal_unpacked_ones(
    batch: list[WeightedSample],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    lora: bool,
    checkpointing: bool,
    sharing: bool,
) -> None:
    monkeypatch.setitem(LOGITS, "cpu", 7 * 98)  # chunks of seven positions: several to a micro-batch
    objective = ObjectiveSettings(name=name)
    policy = policy_of(tmp_path, lora, checkpointing)
    trained = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    policy.base.train()
    expected = reference_loss(policy, batch, objective)
    wanted = dict(zip(trained, torch.autograd.grad(expected, list(trained.values())), strict=True))

    total = torch.zeros(())
    policy.shares_prompts = sharing
    lengths = [len(w.prompt) + len(w.sample) for w in batch]
    whole = [Trajectory(w.prompt, w.sample.tokens) for w in batch]
    microbatches = pack_sharing(whole, budget=100) if sharing else pack(lengths, budget=100)
    assert len(microbatches) > 2
    assert sorted(i for chosen in microbatches for i in chosen) == list(range(len(batch)))
    with packed(policy.base):
        for chosen in microbatches:
            samples = [batch[i] for i in chosen]
            trajectories = [Trajectory(w.prompt, w.sample.tokens) for w in samples]
            statistics = policy.statistics(trajectories, temperature=TEMPERATURE)
            loss = policy_loss(statistics.logprobs_T, token_batch(samples, policy.device), objective).loss
            loss.backward()
            total += loss.detach()
    torch.testing.assert_close(total, expected.detach(), rtol=1e-5, atol=1e-5)
    for key, parameter in trained.items():
        assert parameter.grad is not None, key
        torch.testing.assert_close(
            parameter.grad, wanted[key], rtol=1e-5, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize(("response", "shared"), [(4, True), (8, True), (9, False), (40, False)])
def test_on_a_cpu_prompts_are_shared_where_that_saves_a_quarter(tmp_path: Path, response: int, shared: bool) -> None:
    """Four responses to a prompt of twelve tokens: 36 of 48 and the responses' tokens need not be computed."""
    policy = policy_of(tmp_path, False, False)
    prompt, rng = np.arange(20, 24, dtype=np.int32), np.random.default_rng(0)
    prompt = np.concatenate([prompt] * 3)
    sequences = [Trajectory(prompt, rng.integers(5, 90, 3 * response).astype(np.int32)) for _ in range(4)]
    computed: list[int] = []
    policy.base.get_input_embeddings().register_forward_hook(lambda _, inputs, __: computed.append(inputs[0].numel()))
    with torch.no_grad():
        got = policy.statistics(sequences, temperature=1.0)
        policy.shares_prompts = False
        expected = policy.statistics(sequences, temperature=1.0)
    written = 4 * 3 * response
    assert computed == [written + (12 if shared else 48), written + 48]
    torch.testing.assert_close(got.logprobs_T, expected.logprobs_T, rtol=1e-5, atol=1e-5)


SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
ARCHITECTURES = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, num_key_value_heads=2)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8)),
    "gemma3 (sliding window)": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SMALL,
            num_key_value_heads=1,
            head_dim=8,
            sliding_window=5,
            layer_types=["sliding_attention"] * 2 + ["full_attention"],
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0)),
}


@pytest.mark.parametrize("sharing", [False, True], ids=["", "prompts shared"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures_pack_exactly(name: str, sharing: bool) -> None:
    torch.manual_seed(0)
    model = ARCHITECTURES[name]().eval()
    policy = Policy(model, char_tokenizer(), ModelSettings(), base=model)
    policy.check_head()
    policy.shares_prompts = sharing
    rng = np.random.default_rng(0)
    prompts = {p: rng.integers(0, 97, p).astype(np.int32) for p in (3, 1, 12, 5)}
    sequences = [
        Trajectory(prompts[p], rng.integers(0, 97, r).astype(np.int32))
        for p, r in ((3, 9), (1, 1), (12, 20), (3, 4), (5, 2), (12, 1), (3, 14))
    ]
    with torch.no_grad():
        got = policy.statistics(sequences, temperature=1.0)
        logprobs, entropies = [], []
        for s in sequences:
            ids = torch.from_numpy(np.concatenate([s.prompt, s.response])).long()
            logs = model(input_ids=ids.unsqueeze(0)).logits[0, len(s.prompt) - 1 : -1].log_softmax(-1)
            logprobs.append(logs.gather(1, ids[len(s.prompt) :].unsqueeze(1)).squeeze(1))
            entropies.append(torch.distributions.Categorical(logits=logs).entropy())
    torch.testing.assert_close(got.logprobs_T, torch.cat(logprobs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.entropies_T, torch.cat(entropies), rtol=1e-5, atol=1e-5)


class OtherLogits(Qwen2ForCausalLM):
    """Does something to the logits on the way out, as some architectures do."""

    change: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda logits: logits)

    def forward(self, *args: Any, **options: Any) -> Any:
        output = super().forward(*args, **options)
        output.logits = self.change(output.logits)
        return output


def after_reserved_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Noise of nats at some places, as rounding makes it behind tokens that a model has hardly met."""
    noisy = logits.clone()
    noisy[:, ::4] += 5 * torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(0))
    return noisy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_architecture_that_does_more_to_its_logits_is_refused(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = OtherLogits(Qwen2Config(**SMALL, num_key_value_heads=2, initializer_range=0.3)).to(dtype).eval()
    policy = Policy(model, char_tokenizer(), ModelSettings(path="it"), base=model)
    policy.check_head()
    model.change = lambda logits: 0.7 * logits
    with pytest.raises(ConfigError, match=r"model\.path=it: OtherLogits changes its logits"):
        policy.check_head()


def test_in_half_precision_a_few_wild_tokens_do_not_condemn_a_model() -> None:
    torch.manual_seed(0)
    model = OtherLogits(Qwen2Config(**SMALL, num_key_value_heads=2)).eval()
    policy = Policy(model, char_tokenizer(), ModelSettings(), base=model)
    model.change = after_reserved_tokens
    with pytest.raises(ConfigError):  # there is no such rounding in float32
        policy.check_head()
    model.to(torch.bfloat16)
    policy.check_head()


@pytest.mark.parametrize("sharing", [False, True], ids=["", "prompts shared"])
def test_sequences_cannot_see_each_other(batch: list[WeightedSample], tmp_path: Path, sharing: bool) -> None:
    """Changing one sequence of a micro-batch changes nothing in the others, to the bit."""
    policy = policy_of(tmp_path)
    policy.shares_prompts = sharing
    sequences = [Trajectory(batch[0].prompt if sharing else w.prompt, w.sample.tokens) for w in batch[:4]]
    prompt = sequences[1].prompt + (0 if sharing else 1)
    changed = [sequences[0], Trajectory(prompt, sequences[1].response[::-1].copy()), *sequences[2:]]
    with torch.no_grad():
        before = policy.statistics(sequences, temperature=1.0).logprobs_T
        after = policy.statistics(changed, temperature=1.0).logprobs_T
    lengths = [len(s.response) for s in sequences]
    for i, (old, new) in enumerate(zip(before.split(lengths), after.split(lengths), strict=True)):
        assert torch.equal(old, new) == (i != 1)


def test_several_updates_a_batch_see_each_sample_once(batch: list[WeightedSample], tmp_path: Path) -> None:
    policy = policy_of(tmp_path)
    settings = TrainSettings(updates_per_batch=3, learning_rate=1e-3)
    updater = Updater(policy, Optimiser(policy.model.parameters(), settings, 3), ObjectiveSettings(), settings, 1.0)
    report = updater.update(batch, version=0, seed=(0, 1))
    assert report.updates == 3
    counted = ("fresh", "replayed", "reflection", "other_context")
    assert sum(report.diagnostics.get(f"tokens/{name}", 0) for name in counted) == sum(len(w.sample) for w in batch)


@pytest.mark.parametrize(("updates", "kl"), [(1, 0.0), (1, 0.1), (3, 0.0), (3, 0.1)])
def test_forwards_that_training_itself_does_not_take_are_counted(
    batch: list[WeightedSample], tmp_path: Path, updates: int, kl: float
) -> None:
    policy = policy_of(tmp_path)
    policy.keep_reference()
    settings = TrainSettings(updates_per_batch=updates)
    updater = Updater(policy, Optimiser(policy.model.parameters(), settings, 3), ObjectiveSettings(kl=kl), settings, 1)
    moved = sum(w.origin == "replayed" or w.other_context for w in batch) if updates > 1 else 0
    for step in range(2):  # the second step's count does not go on from the first's
        report = updater.update(batch, version=step, seed=(0, step))
        assert report.extra_forwards == moved + (len(batch) if kl else 0)
    assert updater.update([], version=2, seed=(0, 2)).extra_forwards == 0


def test_pack_keeps_to_the_budget_and_loses_nothing() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(1, 60, rng.integers(1, 40)).tolist()
        batches = pack(lengths, budget=64)
        assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in b) <= 64 for b in batches)
