"""`R3Trainer` with the real vLLM in its process (`vllm_mode="colocate"`), on a CPU: no stand-in (make test-vllm).

TRL makes vLLM's engine, gives it the weights and asks it, on its own path. Covers r3.integrations.trl.trainer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

if find_spec("vllm") is None or find_spec("trl") is None:
    pytest.skip("needs vLLM and TRL: make test-vllm", allow_module_level=True)
from trl.generation import vllm_generation

from r3.rollout.vllm import defaults
from tests.integrations.test_trl import Watching, everything
from tests.integrations.trl_tiny import OVERRIDES, logged, losses, make
from tests.rollout.vllm.models import save_model
from tests.tokenizing import char_tokenizer

STEPS = 6
ROUNDING = 5e-4
"""Most that float32 makes of the log-prob of a rare token; another step's weights make a thousand times that."""
OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Drawn:
    """What TRL asked of vLLM in one call, and what it got."""

    step: int
    prompts: list[list[int]]
    answers: list[list[int]]
    logprobs: list[list[float]]


class Asking(Watching):
    """Keeps what vLLM was asked, and what it answered."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.drawn: list[Drawn] = []

    def _generate_single_turn(self, prompts: Any, *others: Any, **named: Any) -> Any:
        answers, logprobs = super()._generate_single_turn(prompts, *others, **named)
        self.drawn.append(Drawn(self.state.global_step + 1, prompts, answers, logprobs))
        return answers, logprobs


@pytest.fixture(scope="module", autouse=True)
def cpu() -> Iterator[None]:
    """What a CPU needs and TRL has no setting for. One engine serves all runs: each has to give it its own weights."""
    build, engines = vllm_generation.LLM, []
    options = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}

    def engine(**given: Any) -> Any:
        if not engines:
            engines.append(build(**given, **options))
        return engines[0]

    with pytest.MonkeyPatch.context() as patch:
        for name, value in defaults().items():
            patch.setenv(name, value)
        patch.setattr(vllm_generation, "LLM", engine)
        # else vLLM keeps matrices packed for oneDNN and drops the originals, into which TRL copies new weights
        patch.setattr("vllm._custom_ops._supports_onednn", False)
        patch.setattr(torch, "set_num_threads", torch.set_num_threads)  # vLLM puts one there that does nothing
        yield


def made(folder: Path, **more: Any) -> Any:
    if not (folder / "model").exists():
        save_model(folder / "model")
    try:
        return make(folder, Asking, use_vllm=True, vllm_mode="colocate", **more)
    finally:
        for name in OF_A_LAUNCHER:  # TRL sets them for vLLM, and the next run here would take itself for one of many
            os.environ.pop(name, None)


def trained(folder: Path, **more: Any) -> Any:
    trainer = made(folder, **more)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Six steps on a policy that learns, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("vllm")
    return folder, trained(folder, save_strategy="steps", save_steps=1)


def gap(policy: Path, drawn: Drawn) -> float:
    """The largest between vLLM's log-probs and those of a plain forward of this policy."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    gaps = []
    for prompt, answer, logprobs in zip(drawn.prompts, drawn.answers, drawn.logprobs, strict=True):
        with torch.no_grad():
            logprobs_TV = model(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)[-len(answer) - 1 : -1]
        expected_T = logprobs_TV.gather(1, torch.tensor(answer)[:, None])[:, 0]
        gaps.append(float((expected_T - torch.tensor(logprobs)).abs().max()))
    return max(gaps)


def test_vllm_draws_from_the_weights_that_the_step_before_left(run: Any) -> None:
    folder, trainer = run
    assert [drawn.step for drawn in trainer.drawn] == list(range(1, STEPS + 1))
    policies = [folder / "model", *(folder / f"out/checkpoint-{n}" for n in range(1, STEPS))]
    for number, drawn in enumerate(trainer.drawn):
        assert gap(policies[number], drawn) < ROUNDING
        if number > 0:
            assert gap(policies[number - 1], drawn) > 1e-3, "the policy learns"
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < ROUNDING


def test_vllms_own_answers_and_log_probs_are_learned_from_and_kept(run: Any) -> None:
    """Reflection prompts were asked like all others, in whole groups."""
    folder, trainer = run
    reflections = 0
    for drawn, result in zip(trainer.drawn, trainer.steps, strict=True):
        fresh = [(mixed.group, sample) for mixed in result.groups for sample in mixed.group.samples]
        for (group, sample), prompt, answer, logprobs in zip(
            fresh, drawn.prompts, drawn.answers, drawn.logprobs, strict=True
        ):
            assert group.prompt.tolist() == prompt
            assert sample.tokens.tolist() == answer
            assert np.array_equal(sample.logprobs, np.array(logprobs, np.float32))  # to the bit: not a forward of ours
        reflections += sum(mixed.group.context.kind == "reflection" for mixed in result.groups)
        assert len({answer.tobytes() for answer in map(np.array, drawn.answers)}) > len(drawn.answers) / 2
    asked = [char_tokenizer().decode(prompt) for drawn in trainer.drawn for prompt in drawn.prompts]
    assert sum(" NOT " in prompt for prompt in asked) == 4 * reflections > 0
    assert len(everything(folder / "out/r3_buffer.sqlite")) == len(asked)


def test_all_three_mechanisms_fire_and_metrics_are_finite(run: Any) -> None:
    _, trainer = run
    for name in ("r3/replay/samples", "r3/groups/reflection", "r3/ranking/samples"):
        assert sum(logged(trainer, name)) > 0, name
    for entry in trainer.state.log_history:
        assert all(math.isfinite(value) for value in entry.values() if isinstance(value, int | float))
    for batch in trainer.batches:  # TRL's correction for vLLM's other kernels leaves replayed and empty rows alone
        torch.testing.assert_close(batch["importance_sampling_ratio"], torch.ones(len(batch["prompt_ids"]), 1))


def test_a_resumed_run_is_the_uninterrupted_one(run: Any, tmp_path: Path) -> None:
    folder, whole = run
    (tmp_path / "model").symlink_to(folder / "model")
    resumed = made(tmp_path)
    resumed.train(resume_from_checkpoint=str(folder / "out/checkpoint-2"))
    assert gap(folder / "out/checkpoint-2", resumed.drawn[0]) < ROUNDING, "the engine had the weights of the run's end"
    assert [drawn.answers for drawn in resumed.drawn] == [drawn.answers for drawn in whole.drawn[2:]]
    assert losses(resumed) == pytest.approx(losses(whole))
    assert everything(tmp_path / "out/r3_buffer.sqlite") == everything(folder / "out/r3_buffer.sqlite")


@pytest.mark.parametrize(
    "more",
    [
        {"vllm_importance_sampling_mode": "token_truncate", "beta": 0.1},
        {"vllm_importance_sampling_correction": False, "r3_overrides": {**OVERRIDES, "resample.max_rounds": 1}},
        {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])},
    ],
    ids=["token weights", "no weights, resampled", "LoRA"],
)
def test_other_settings_of_trls(tmp_path: Path, more: dict[str, Any]) -> None:
    trainer = trained(tmp_path, **more)
    assert sum(logged(trainer, "r3/replay/samples")) > 0
    assert sum(logged(trainer, "r3/groups/reflection")) > 0
    assert np.isfinite(losses(trainer)).all()
    first = [drawn for drawn in trainer.drawn if drawn.step == 1]
    assert len(first) == 1 + max(logged(trainer, "r3/resample/rounds"), default=0)
    assert max(gap(tmp_path / "model", drawn) for drawn in first) < ROUNDING
    # All steps, by TRL's own forward, where it makes one.
    assert max(logged(trainer, "sampling/sampling_logp_difference/max"), default=0.0) < ROUNDING


def test_reflection_prompts_that_vllm_has_no_room_for_are_refused_before_the_run(tmp_path: Path) -> None:
    """The model has 256 positions, which is vLLM's context if nothing is set, and an answer has 12 tokens."""
    made(tmp_path, r3_overrides={**OVERRIDES, "reflection.max_prompt_tokens": 244})
    with pytest.raises(ValueError, match=r"max_prompt_tokens': 244\}"):
        made(tmp_path, r3_overrides={**OVERRIDES, "reflection.max_prompt_tokens": 245})
