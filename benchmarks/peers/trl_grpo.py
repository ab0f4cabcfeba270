"""TRL's GRPO through its own `GRPOTrainer.train()`: its padding, its fused head, its loss, its optimiser step.

Three ways to feed it. `given`: TRL's `rollout_func` hands it given completions, so that only its update is timed (with
its decoding of the texts and its rewards, which are cheap). `vllm`: TRL generates with vLLM in its own process, asleep
during the update; every response is given its length by a sampling parameter, as in the other engines. `transformers`:
TRL's own default; the end of text is forced where a response's length says, and the batch runs until its longest ends.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from transformers import TrainerCallback

from harness import NotMeasured, synchronise, timed
from work import EOS, Work

Reward = Callable[[str, str], float]
"""Takes the text of a prompt and of its completion."""


@dataclass(frozen=True, slots=True)
class TrlSetup:
    """What the trainer is made with."""

    device: str
    rows: int
    """Per micro-batch: TRL counts rows, not tokens."""
    group: int
    limit: int
    steps: int
    """The first of them is not measured."""
    folder: Path
    """For its output, and with vLLM the model's."""
    old_logprobs: bool = False
    """Compute the log-probs of the completions again before the update, as TRL does whenever vLLM generated them."""
    generate: Literal["given", "vllm", "transformers"] = "given"
    """Where the completions come from."""
    vllm_memory: float = 0.4
    """vLLM's share of the card."""


def make_trainer(setup: TrlSetup, model: Any, tokenizer: Any, work: Work, reward: Reward) -> Any:
    """A GRPOTrainer that makes one optimiser update of the whole work a step."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        raise NotMeasured(f"TRL cannot be imported ({error}); pip install trl==1.16.0") from None
    rows = sum(map(len, work.lengths))
    accumulate, left = divmod(rows, setup.rows)
    if left:
        raise NotMeasured(f"{rows} responses do not divide into micro-batches of {setup.rows}; change --rows")
    settings = GRPOConfig(
        output_dir=str(setup.folder),
        per_device_train_batch_size=setup.rows,
        gradient_accumulation_steps=accumulate,
        num_generations=setup.group,
        max_completion_length=setup.limit,
        max_steps=setup.steps,
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        bf16=setup.device.startswith("cuda"),
        use_cpu=not setup.device.startswith("cuda"),
        gradient_checkpointing=setup.device.startswith("cuda"),  # as ours: memory is what a CPU has
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
        seed=0,
        **_generation_settings(setup, work),
    )
    texts = [" ".join(f"w{token}" for token in prompt) for prompt in work.prompts]
    trainer = GRPOTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": texts * setup.steps}),
        processing_class=tokenizer,
        reward_funcs=[_reward_function(reward)],
        rollout_func=_given(work, texts, tokenizer) if setup.generate == "given" else None,
    )
    if setup.generate == "vllm":
        _force_lengths(trainer, work)
    elif setup.generate == "transformers":
        _force_ends(trainer, work)
    elif setup.old_logprobs:
        # The switch that its vLLM path turns on; nothing else of that path runs, for the rollouts are given.
        trainer.use_vllm = True
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        trainer._last_loaded_step = -1
    return trainer


def _generation_settings(setup: TrlSetup, work: Work) -> dict[str, Any]:
    if setup.generate != "vllm":
        return {}
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": setup.vllm_memory,
        "vllm_max_model_length": work.context + 64,
        "generation_kwargs": {"ignore_eos": True},
    }


def _reward_function(reward: Reward) -> Callable[..., list[float]]:
    def rewards(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        return [reward(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]

    return rewards


def _given(work: Work, texts: Sequence[str], tokenizer: Any) -> Callable[[list[str], Any], dict[str, Any]]:
    """A rollout function that answers with the work's own tokens: TRL asks for a prompt once per response."""
    even = -math.log(len(tokenizer))  # random weights know no word from another
    place = {text: number for number, text in enumerate(texts)}

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        seen = dict.fromkeys(place, 0)
        answered: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for prompt in prompts:
            number, index = place[prompt], seen[prompt]
            seen[prompt] += 1
            completion = completion_tokens(work, number, index, tokenizer.eos_token_id)
            answered["prompt_ids"].append(work.prompts[number].tolist())
            answered["completion_ids"].append(completion)
            answered["logprobs"].append([even] * len(completion))
        return answered

    return rollout


def completion_tokens(work: Work, prompt: int, index: int, eos: int) -> list[int]:
    """The given completion: the prompt's own words again and again, then the end of text; all differ by `index`."""
    length, words = work.lengths[prompt][index], work.prompts[prompt]
    repeated = [int(words[(index + t) % len(words)]) for t in range(length - 1)]
    return [*repeated, eos]


def _force_lengths(trainer: Any, work: Work) -> None:
    """Give each of vLLM's requests its own length: TRL's settings know one for all, vLLM takes a list."""
    llm = trainer.vllm_generation.llm
    original = llm.generate

    def generate(prompts: Sequence[Any], sampling_params: Any, **options: Any) -> Any:
        pairs = zip(work.prompts, work.lengths, strict=True)
        left = {tuple(prompt.tolist()): list(lengths) for prompt, lengths in pairs}
        each = []
        for prompt in prompts:
            parameters = sampling_params.clone()
            parameters.max_tokens = left[tuple(prompt["prompt_token_ids"])].pop(0)
            each.append(parameters)
        return original(prompts, sampling_params=each, **options)

    llm.generate = generate


def _force_ends(trainer: Any, work: Work) -> None:
    """Have transformers' `generate` write the end of text where each response's length says, and not before."""
    original = trainer.model.generate

    def generate(input_ids: Any, attention_mask: Any, **options: Any) -> Any:
        pairs = zip(work.prompts, work.lengths, strict=True)
        left = {tuple(prompt.tolist()): list(lengths) for prompt, lengths in pairs}
        prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
        ends = torch.tensor([left[tuple(prompt)].pop(0) for prompt in prompts], device=input_ids.device)

        def force(tokens: Any, scores: Any) -> Any:
            over = tokens.shape[1] - input_ids.shape[1] + 1 >= ends
            scores[:, EOS] = torch.where(over, torch.inf, -torch.inf)
            return torch.where(over[:, None] & (scores != torch.inf), -torch.inf, scores.clamp(max=1e4))

        return original(input_ids=input_ids, attention_mask=attention_mask, logits_processor=[force], **options)

    trainer.model.generate = generate


class Clock(TrainerCallback):
    """Seconds of every optimiser step, from its first micro-batch (and so its generation) to its end."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        synchronise(self.device)
        self.started, self.cpu_started = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronise(self.device)
        self.seconds.append(time.perf_counter() - self.started)
        self.cpu_seconds.append(time.process_time() - self.cpu_started)


def train(trainer: Any, device: str) -> Clock:
    """Run it; the clock has the seconds of each step."""
    clock = Clock(device)
    trainer.add_callback(clock)
    total = timed(device, trainer.train)
    assert clock.seconds, f"TRL made no step in {total:.1f} s"
    return clock


def stopwatch(owner: Any, method: str, device: str) -> list[float]:
    """Time every call of a method from now on; the list that the seconds go to."""
    seconds: list[float] = []
    original = getattr(owner, method)

    def measured(*arguments: Any, **options: Any) -> Any:
        synchronise(device)
        started = time.perf_counter()
        try:
            return original(*arguments, **options)
        finally:
            synchronise(device)
            seconds.append(time.perf_counter() - started)

    setattr(owner, method, measured)
    return seconds
