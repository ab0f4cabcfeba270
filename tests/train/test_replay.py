"""Replay in whole runs: what bounds a success that is met again and again, and queries asked before their turn.

Covers r3.train.sampler.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from r3.algorithm import Algorithm
from r3.buffer import SampleBuffer
from r3.cli import main
from r3.config import TrainSettings
from r3.method.mixed import StepResult
from r3.method.settings import MethodSettings
from r3.policy import ModelSettings
from r3.policy.model import Policy
from r3.policy.optimiser import Optimiser
from r3.policy.packing import Trajectory
from r3.policy.update import Updater, UpdateReport
from r3.samples import Context, Group, Query, Sample
from r3.train.sampler import QueryStream, Revisits
from tests.method.makers import make_group, make_sample
from tests.train.test_train import contents
from tests.train.tiny import ROOT, command, overrides, read_metrics, save_model

TOKENS = [11, 7, 23, 4]


class Bed:
    """One query that the policy never solves, and one success from a reflection prompt, replayed at every step."""

    def __init__(self, folder: Path, updates: int = 1, **replay: Any) -> None:
        model = ModelSettings.model_validate({"path": str(save_model(folder / "model", seed=3)), "device": "cpu"})
        self.policy = Policy.load(model)
        training = TrainSettings(learning_rate=3e-4, updates_per_batch=updates)
        method = MethodSettings.model_validate(
            {"name": "r3-no-ranking", "objective": {"correction": "naive", "ratio_gate": None}, "replay": replay}
        )
        optimiser = Optimiser(self.policy.model.parameters(), training, 100)
        self.updater = Updater(self.policy, optimiser, method.objective, training, 1.0)
        self.buffer = SampleBuffer(":memory:", per_query=None)
        self.algorithm = Algorithm(method, self.buffer, self.policy.tokenizer)
        self.query = Query("q", "1+1=")
        self.prompt = self.policy.tokenizer.encode(self.query.prompt, add_special_tokens=False)
        success = Sample(
            "q",
            TOKENS,
            [-0.1] * 4,
            outcome=True,
            reward=1.0,
            context=Context("reflection", 1),
            step=0,
            policy_version=0,
        )
        self.buffer.add([success])
        self.version = 0

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            trajectory = Trajectory(torch.tensor(self.prompt).numpy(), torch.tensor(tokens).numpy())
            return self.policy.statistics([trajectory], temperature=1.0).logprobs_T

    def step(self, number: int) -> tuple[StepResult, UpdateReport]:
        wrong = [[30 + i, 31 + number % 5] for i in range(3)]
        drawn = [
            Sample("q", t, self.logprobs(t).numpy(), outcome=False, step=number, policy_version=self.version)
            for t in wrong
        ]
        result = self.algorithm.learn([Group(self.query, tuple(drawn), self.prompt)], version=self.version)
        report = self.updater.update(result.weighted, version=self.version, seed=(0, number))
        self.algorithm.first_replayed(result, report.start_logprobs)
        self.version += report.updates
        return result, report


def test_a_success_met_25_times_is_pulled_to_the_clip_and_no_further(tmp_path: Path) -> None:
    """By the ratio to the policy that first replayed it, a token stops once it is 1 + ε as likely; without, never.

    Adam's momentum carries a token past the clip, so the bound is looser than log 1.2 a token.
    """
    gained: dict[str, list[float]] = {}
    for ratio in ("drawn", "first_replayed"):
        bed = Bed(tmp_path, ratio=ratio, max_age=None)
        before = bed.logprobs(TOKENS)
        clipped, gained[ratio] = [], []
        for number in range(1, 26):
            clipped.append(bed.step(number)[1].diagnostics.get("clip_share/replayed"))
            gained[ratio].append(float((bed.logprobs(TOKENS) - before).sum()))
        assert clipped[0] is None  # first met: nobody knows how likely it was here
        assert clipped[-1] is None if ratio == "drawn" else clipped[-1] == 1.0
    endless, bounded = gained["drawn"], gained["first_replayed"]
    assert endless[0] == bounded[0]
    assert endless[24] > endless[12] + 1.5
    assert abs(bounded[24] - bounded[12]) < 0.1
    assert bounded[24] < 0.4 * endless[24]


def test_the_ratio_is_to_the_log_probs_of_the_first_replay(tmp_path: Path) -> None:
    for updates in (1, 2):
        bed = Bed(tmp_path, updates, ratio="first_replayed", max_age=None)
        start = bed.logprobs(TOKENS)
        for number in range(1, 4):
            now = bed.logprobs(TOKENS)
            result, report = bed.step(number)
            (i,) = (i for i, w in enumerate(result.weighted) if w.origin == "replayed")
            assert result.weighted[i].recomputed == (number == 1)
            if number == 1:
                torch.testing.assert_close(torch.from_numpy(report.start_logprobs[i]), start)
            elif updates == 1:
                torch.testing.assert_close(torch.from_numpy(report.log_ratios[i]), now - start, atol=1e-5, rtol=1e-4)
            assert report.diagnostics.get("tokens/other_context", 0) == (4 if number == 1 else 0)


def test_an_answer_joins_so_often_and_no_more(tmp_path: Path) -> None:
    bed = Bed(tmp_path, max_repeats=3)
    reasons = [bed.step(number)[0].groups[0].replay for number in range(1, 6)]
    assert reasons == ["joined"] * 3 + ["used_up"] * 2
    bed.buffer.forget_after(2)
    assert [bed.step(number)[0].groups[0].replay for number in (3, 4)] == ["joined", "used_up"]


REMEMBERED = {
    "method__ranking__auc_window": 4,
    "method__ranking__min_auc": 0,
    "method__reflection__at_once": "true",
    "method__reflection__tau": 0.9,
    "train__epochs": 4,
    "run__checkpoint_every": 3,
}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("method__replay__max_repeats", 1),
        ("method__replay__ratio", "first_replayed"),
        ("method__ranking__gate", "true"),
    ],
)
def test_a_run_that_is_killed_remembers_what_it_replayed(tmp_path: Path, setting: str, value: Any) -> None:
    settings = {**REMEMBERED, setting: value}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    assert main(["train", "--quiet", *overrides(whole, **settings)]) == 0
    lines = read_metrics(whole / "run")
    assert (sum(line.get("replay/used_up", 0) for line in lines) > 0) == (value == 1)
    assert sum(line.get("replay/cross_context", 0) for line in lines) > 0
    if value == "true":
        assert [line["ranking/paused"] for line in lines[1:]][::7] == [1.0, 0.0]  # paid once there are enough pairs
    same = {**settings, "model__path": whole / "model", "task__path": whole / "task.jsonl"}
    process = subprocess.Popen(
        command("train", "--quiet", *overrides(cut, **same)), cwd=ROOT, stdout=subprocess.DEVNULL
    )
    while process.poll() is None and not (cut / "run/rollouts/step-000005.jsonl.gz").exists():
        os.sched_yield()
    process.kill()
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert main(["train", "--quiet", "--resume", str(cut / "run")]) == 0
    assert read_metrics(cut / "run") == lines
    assert contents(cut) == contents(whole)
    remembered = []
    for folder in (whole, cut):
        with SampleBuffer.open_reader(folder / "run/buffer.sqlite") as buffer:
            joins = buffer.joins([f"q{i}" for i in range(12)])
            remembered.append(
                {
                    (query, text): (past.times, None if past.logprobs is None else past.logprobs.tobytes())
                    for query, texts in joins.items()
                    for text, past in texts.items()
                }
            )
    assert remembered[0] == remembered[1]
    assert any(logprobs is not None for _, logprobs in remembered[0].values()) == (value == "first_replayed")


# Queries asked before their turn in a run: who they are, what comes of them, and that a resumed run asks the same.


def revisits(method: str = "exgrpo", queries: int = 8, **more: Any) -> Revisits:
    settings = MethodSettings.model_validate({"name": method, "revisit": more}).revisit
    stream = QueryStream([Query(f"q{i}", "1+1=") for i in range(queries)], seed=1, epochs=None)
    return Revisits(stream, settings, seed=1)


def answered(batch: list[tuple[Query, int]], again: frozenset[int], right: dict[str, int]) -> list[Group]:
    """Groups of four, of which so many are right."""
    return [
        make_group(
            [make_sample(i < right[query.id], query_id=query.id, epoch=epoch) for i in range(4)],
            query_id=query.id,
            revisited=place in again,
        )
        for place, (query, epoch) in enumerate(batch)
    ]


def rights(batch: list[tuple[Query, int]], *right: int) -> dict[str, int]:
    return {query.id: count for (query, _), count in zip(batch, right, strict=True)}


def test_nothing_is_asked_again_before_enough_is_right() -> None:
    """A share of 0.35 is not above 0.35; the batch that is fills the pool, and those before it do not."""
    asked = revisits(queries=20)
    batch, again = asked.take(5, step=1)
    counts = asked.learn(answered(batch, again, rights(batch, 1, 1, 1, 2, 2)), step=1)
    assert (again, asked.started, counts["revisit/pool"]) == (frozenset(), False, 0)
    batch, again = asked.take(5, step=2)
    counts = asked.learn(answered(batch, again, rights(batch, 4, 0, 1, 2, 1)), step=2)
    assert (again, asked.started, counts) == (
        frozenset(), True, {"revisit/asked": 0, "revisit/pool": 3, "revisit/retired": 1},
    )  # fmt: skip
    later, again = asked.take(5, step=3)
    assert again == {3, 4}  # ⌊0.5 · 5⌋
    assert {later[i][0].id for i in again} <= {batch[i][0].id for i in (2, 3, 4)}
    assert asked.learn(answered(later, again, {f"q{i}": 0 for i in range(20)}), step=3)["revisit/asked"] == 2
    assert asked.started  # for good


def test_solved_queries_leave_from_the_next_epoch_on_while_a_batch_of_others_is_left() -> None:
    asked = revisits(start_at=None, share=0.1)
    right = {f"q{i}": 4 if i < 4 else 0 for i in range(8)}
    first = []
    for step in (1, 2):
        batch, again = asked.take(4, step=step)
        asked.learn(answered(batch, again, right), step=step)
        first += [query.id for query, _ in batch]
    assert sorted(first) == sorted(right)  # the first epoch is whole
    assert set(asked.retired) == {f"q{i}" for i in range(4)}
    for step in (3, 4):
        batch, again = asked.take(4, step=step)
        assert sorted(query.id for query, _ in batch) == ["q4", "q5", "q6", "q7"]
        asked.learn(answered(batch, again, right), step=step)
    batch, _ = asked.take(5, step=5)  # more than are left: none is left out
    assert len(batch) == 5


def test_a_query_is_asked_again_at_most_so_often_and_not_while_it_cools_down() -> None:
    asked = revisits("prompt-replay", queries=200, cooldown=2, jitter=0.0, max_reuse=2)
    right, when = dict.fromkeys((f"q{i}" for i in range(200)), 0), []
    for step in range(1, 30):
        batch, again = asked.take(2, step=step)
        if step == 1:
            right[batch[0][0].id] = 2
        when += [step] if again else []
        asked.learn(answered(batch, again, right), step=step)
    assert when == [4, 7]


def test_with_it_off_queries_come_in_their_turn() -> None:
    asked, alone = revisits("grpo"), QueryStream([Query(f"q{i}", "1+1=") for i in range(8)], seed=1, epochs=None)
    for step in range(1, 9):
        batch, again = asked.take(3, step=step)
        assert batch == alone.take(3)
        assert asked.learn(answered(batch, again, dict.fromkeys((f"q{i}" for i in range(8)), 2)), step=step) == {
            "revisit/asked": 0, "revisit/pool": 0, "revisit/retired": 0,
        }  # fmt: skip


@pytest.mark.parametrize("method", ["exgrpo", "prompt-replay"])
def test_killed_and_resumed_the_same_queries_are_asked_again(tmp_path: Path, method: str) -> None:
    more = {"train__epochs": 4, "run__checkpoint_every": 3, "reward__length_bonus": "auto", "method": method}
    more |= {"method__revisit__start_at": "null", "method__revisit__min_rate": 0, "method__revisit__cooldown": 1}
    assert main(["train", "--quiet", *overrides(tmp_path, **more)]) == 0
    whole = read_metrics(tmp_path / "run")
    assert sum(line.get("revisit/asked", 0) for line in whole) > 2
    run = tmp_path / "killed" / "run"
    process = subprocess.Popen(
        command("train", "--quiet", *overrides(tmp_path, **more, run__dir=run)), cwd=ROOT, stdout=subprocess.DEVNULL
    )
    while process.poll() is None and not any(run.glob("checkpoints/step-000003")):
        os.sched_yield()
    process.kill()
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert main(["train", "--quiet", "--resume", str(run)]) == 0
    assert contents(tmp_path / "killed") == contents(tmp_path)
