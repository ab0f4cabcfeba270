"""The contract that every trainer with R³ in it keeps: the same rollouts give the same mixed groups and advantages.

A `Recording` answers prompts from a script, so that the trainers meet the same responses as long as they ask the same
prompts in the same order. A runner takes a recording through a trainer's real training loop and returns what the method
decided at each step. To hold another trainer to the contract, write a runner and a test that it and `run_loop` `agree`.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from r3.method.mixed import MixedGroup, StepResult
from r3.method.settings import MethodSettings
from r3.rollout import Request, Response, Sampling
from r3.samples import FloatArray, Group, IntArray, Query, Sample, seed_of
from r3.train.sampler import QueryStream
from r3.verify.judge import Judge, PlainJudge, Verdict
from tests.tokenizing import char_tokenizer
from tests.train.tiny import judge, overrides, save_model

GROUP, LIMIT, BATCH, EPOCHS = 4, 12, 4, 4
EOS = char_tokenizer().eos_token_id
REFLECTION = {"max_prompt_tokens": 200, "template": "{question} NOT {attempt} BUT ", "cut_marker": "..."}
# Rewards are exact in float32, which is what TRL hands rewards on in.
LENGTH_LIMIT = 16
SEED = 5
# The advantages of newer presets in R³'s groups: what MaxRL and REINFORCE++ divide by. Ranking rewards have no place in
# a mean (MaxRL refuses them).
VARIANTS: dict[str, dict[str, Any]] = {
    "r3": {},
    "maxrl": {"advantage.scale": "mean", "ranking.enabled": False},
    "reinforce++": {"advantage.scale": "batch_std"},
}


def queries() -> list[Query]:
    shares = ["0", "15", "85", "100"]
    return [Query(f"q{i}", f"What is {i}+{i}?", shares[i % 4]) for i in range(8)]


@dataclass(frozen=True, slots=True)
class Recorded:
    tokens: IntArray
    logprobs: FloatArray
    truncated: bool


class Recording:
    """The answers to each prompt, by how often it was asked before."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def answer(self, prompt: str) -> list[Recorded]:
        self.asked[prompt] += 1
        return self.nth(prompt, self.asked[prompt])

    @classmethod
    def nth(cls, prompt: str, time: int) -> list[Recorded]:
        """The answers when it is asked for the nth time."""
        rng = np.random.default_rng(seed_of(f"{prompt}/{time}"))
        return [cls._one(rng) for _ in range(GROUP)]

    @staticmethod
    def _one(rng: np.random.Generator) -> Recorded:
        length = int(rng.integers(1, LIMIT + 4))
        ids = [*rng.integers(2, len(char_tokenizer()), length).tolist(), EOS][:LIMIT]
        logprobs = -rng.exponential(size=len(ids))
        return Recorded(np.asarray(ids, np.int32), logprobs.astype(np.float32), ids[-1] != EOS)


def agree(found: list[StepResult], expected: list[StepResult]) -> None:
    """The same groups, members, rewards and advantages."""
    assert len(found) == len(expected)
    for number, (theirs, own) in enumerate(zip(found, expected, strict=True)):
        assert theirs.counts == own.counts, number
        for a, b in zip(theirs.groups, own.groups, strict=True):
            assert (a.group.query.id, a.group.context, a.ranked) == (b.group.query.id, b.group.context, b.ranked)
            assert a.group.prompt.tolist() == b.group.prompt.tolist()
            assert [m.sample.tokens.tolist() for m in a.members] == [m.sample.tokens.tolist() for m in b.members]
            assert [(m.origin, m.sample.outcome) for m in a.members] == [
                (m.origin, m.sample.outcome) for m in b.members
            ]
            np.testing.assert_allclose(a.rewards, b.rewards, rtol=0, atol=1e-6)
            np.testing.assert_allclose(a.advantages, b.advantages, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- our loop


class RecordedEngine:
    """Gives recorded answers, without entropies: the loop then measures them with its policy."""

    exact = False

    def __init__(self) -> None:
        self.recording = Recording()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Response]:
        for place, request in enumerate(requests):
            for index, one in enumerate(self.recording.answer(char_tokenizer().decode(request.prompt.tolist()))):
                finish: Any = "length" if one.truncated else "stop"
                yield Response(place, index, one.tokens, one.logprobs, None, finish)

    def release(self) -> None:
        pass


class InOrder(QueryStream):
    """The data in the order it came, every epoch."""

    def _at(self, position: int) -> tuple[Query, int]:
        return self.queries[position % len(self.queries)], self.epoch_at(position)


class Judged:
    name, heldout = "contract", ()

    def __init__(self) -> None:
        self.train = queries()

    @property
    def judge(self) -> Judge:
        return PlainJudge(lambda query, text: Verdict(judge(text, query.answer), ""))


def run_variant(folder: Path, variant: str) -> list[StepResult]:
    """The recording through our own loop, under one of `VARIANTS`."""
    return run_loop(folder, **{f"method.{key}".replace(".", "__"): value for key, value in VARIANTS[variant].items()})


def run_loop(folder: Path, **changed: Any) -> list[StepResult]:
    """The recording through `r3.train.loop.Trainer`, with other settings if need be."""
    from r3.algorithm import Algorithm
    from r3.buffer import SampleBuffer
    from r3.config import load_config
    from r3.policy.model import Policy
    from r3.policy.optimiser import Optimiser
    from r3.policy.update import Updater
    from r3.train.loop import Trainer
    from r3.train.sampler import Sampler

    method = {f"method__reflection__{name}": f"'{value}'" for name, value in REFLECTION.items()}
    method["method__reflection__max_prompt_tokens"] = 200  # type: ignore[assignment]
    more: dict[str, Any] = {
        "reward__length_limit": LENGTH_LIMIT,
        "train__learning_rate": 1e-12,
        "run__seed": SEED,
        **changed,
    }
    config = load_config(None, overrides(folder, **method, **more))
    policy = Policy.load(config.model)
    optimiser = Optimiser(policy.model.parameters(), config.train, 100)
    updater = Updater(policy, optimiser, config.method.objective, config.train, 1.0, exact=False)
    task, engine = Judged(), RecordedEngine()
    sampler = Sampler(engine, task, policy.tokenizer, Sampling(LIMIT, (EOS,)), config.settled().reward, GROUP)
    stream = InOrder(task.train, seed=0, epochs=EPOCHS)
    results = []
    with SampleBuffer(":memory:") as buffer:
        algorithm = Algorithm(config.settled().method, buffer, policy.tokenizer, seed=config.run.seed)
        trainer = Trainer(config, stream, sampler, algorithm, updater)
        while not stream.exhausted:
            results.append(trainer.train_step()[0])
    return results


# ---------------------------------------------------------------- TRL


def rewarded(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
    """The loop's reward: 1 and a bonus for being short."""
    right = [judge(completion, share) for completion, share in zip(completions, answer, strict=True)]
    return [r * (1 + max(0.0, 1 - len(ids) / LENGTH_LIMIT)) for r, ids in zip(right, completion_ids, strict=True)]


def run_trl(folder: Path, variant: str = "r3") -> list[StepResult]:
    """The recording through `R3Trainer.train()`."""
    from datasets import Dataset

    from r3.integrations.trl import R3Config, R3Trainer
    from tests.integrations.trl_tiny import settings

    recording, tokenizer = Recording(), copy.deepcopy(char_tokenizer())  # other tests share the original
    tokenizer.pad_token = tokenizer.eos_token

    def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
        answers = [one for prompt in prompts[::GROUP] for one in recording.answer(prompt)]
        return {
            "prompt_ids": [tokenizer.encode(prompt) for prompt in prompts],
            "completion_ids": [one.tokens.tolist() for one in answers],
            "logprobs": [one.logprobs.tolist() for one in answers],
        }

    class Watching(R3Trainer):
        results: list[StepResult] = []  # noqa: RUF012

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            assert self.r3_step is not None
            self.results.append(self.r3_step)
            return batch

    own = {"per_device_train_batch_size": BATCH * GROUP, "gradient_accumulation_steps": 1, "num_generations": GROUP}
    method = {"reflection": REFLECTION, "ranking.peak_fraction": 0.25, **VARIANTS[variant]}
    args = R3Config(
        **settings(
            folder,
            **own,
            r3_method="r3-paper",
            r3_overrides=method,
            r3_id_column="id",
            learning_rate=1e-12,
            seed=SEED,
            num_train_epochs=EPOCHS,
            max_completion_length=LIMIT,
            shuffle_dataset=False,
        )
    )
    rows = Dataset.from_list([{"id": q.id, "prompt": q.prompt, "answer": q.answer} for q in queries()])
    model = folder / "model"
    if not model.exists():
        save_model(model)
    trainer = Watching(str(model), rewarded, args, train_dataset=rows, processing_class=tokenizer, rollout_func=rollout)
    trainer.train()
    return trainer.results


# ---------------------------------------------------------------- the method in one file


def nano() -> ModuleType:
    """examples/nano_r3.py as a module."""
    spec = importlib.util.spec_from_file_location("nano_r3", Path(__file__).parents[2] / "examples" / "nano_r3.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nano_r3"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def run_nano(results: Sequence[StepResult], settings: MethodSettings) -> Iterator[tuple[MixedGroup, list[Any]]]:
    """Every group of recorded steps, with the rows that nano_r3 makes of its fresh answers and its own buffer."""
    one_file, buffer = nano(), defaultdict(list)
    one_file.PEAK_SHARE, one_file.REPLAYED = settings.ranking.peak_fraction, settings.replay.k
    one_file.R_MAX = settings.ranking.max_reward
    for result in results:
        drawn = [
            (mixed, [_as_nano(one_file, mixed.group, sample) for sample in mixed.group.samples])
            for mixed in result.groups
        ]
        for mixed, group in drawn:
            yield mixed, one_file.compare(group, buffer[mixed.group.query.id], 1)
        for mixed, group in drawn:
            buffer[mixed.group.query.id] += group


def _as_nano(one_file: ModuleType, group: Group, sample: Sample) -> Any:
    assert sample.entropies is not None or not sample.truncated or not group.solve_none
    entropies = [] if sample.entropies is None else sample.entropies.tolist()
    return one_file.Answer(
        group.prompt.tolist(), sample.tokens.tolist(), sample.logprobs.tolist(), entropies, sample.truncated,
        query=group.query.id, reflected=group.context.kind == "reflection", right=bool(sample.outcome),
    )  # fmt: skip


# ---------------------------------------------------------------- verl


def run_verl(folder: Path, variant: str) -> list[StepResult]:
    """The recording through `python -m verl.trainer.main_ppo`, under one of `VARIANTS`."""
    from tests.integrations.verl import running

    running.prepare(folder)
    method = {f"+r3_method.{key}": value for key, value in VARIANTS[variant].items()}
    done = running.run(folder, **method, **running.ONE_WORKER)
    assert done.returncode == 0, done.stderr[-4000:]
    return list(running.steps(folder).values())
