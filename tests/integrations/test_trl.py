"""`R3Trainer.train()`, for real: processes, mechanisms, chats, exact resume, and TRL's own when off.

Covers r3.integrations.trl.grpo, r3.integrations.trl.layout, r3.integrations.trl.trainer.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="needs TRL: pip install 'r3-rl[trl]'")
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import r3.integrations.trl as adapter
from r3.buffer import SampleBuffer
from r3.integrations.trl import R3Config, R3Trainer
from r3.integrations.trl.layout import ExtraRow, importance, lay_out, pad_rows
from r3.method.mixed import StepResult
from r3.method.objective import ORIGINS, TokenBatch, policy_loss
from r3.method.settings import ObjectiveSettings
from tests.integrations import trl_tiny
from tests.integrations.trl_tiny import OVERRIDES, logged, losses, make, settings
from tests.tokenizing import char_tokenizer
from tests.train.tiny import ROOT, judge, save_model

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own deprecations are theirs


class Watching(R3Trainer):
    """Keeps every batch that is handed to TRL's loss, and what was decided about it."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.batches: list[dict[str, Any]] = []
        self.steps: list[Any] = []

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        self.batches.append(batch)
        self.steps.append(self.r3_step)
        return batch


def everything(path: Path | str) -> list[tuple[Any, ...]]:
    """All samples of a buffer, as comparable values."""
    ids = [trl_tiny.query_id(row) for row in trl_tiny.questions()]
    with SampleBuffer.open_reader(path) as buffer:
        found = [sample for own in buffer.history(ids).values() for sample in own]
    return sorted(
        (s.id, s.query_id, s.tokens.tobytes(), s.logprobs.tobytes(), s.outcome, s.reward, s.step, s.context.kind)
        for s in found
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An uninterrupted run with checkpoints."""
    folder = tmp_path_factory.mktemp("trl")
    trainer = make(folder, Watching, save_strategy="steps", save_steps=2)
    trainer.train()
    return folder, trainer


def test_all_three_mechanisms_fire(run: Any) -> None:
    _, trainer = run
    assert sum(logged(trainer, "r3/replay/samples")) > 0
    assert sum(logged(trainer, "r3/groups/reflection")) > 0
    assert sum(logged(trainer, "r3/ranking/samples")) > 0
    assert all(torch.isfinite(torch.tensor(losses(trainer))))


def test_every_member_of_a_mixed_group_is_in_the_rows(run: Any) -> None:
    """Each sequence with a gradient is trained exactly once, and the loss's weights are the method's."""
    _, trainer = run
    for batch, result in zip(trainer.batches, trainer.steps, strict=True):
        check_rows(batch, result)


def check_rows(batch: dict[str, Any], result: StepResult) -> None:
    advantages = batch["advantages"] if batch["advantages"].dim() == 2 else batch["advantages"][:, None]
    trained = []
    for i in range(len(advantages)):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
        tokens = batch["completion_ids"][i][batch["completion_mask"][i].bool()].tolist()
        if tokens and advantages[i].any():
            trained.append((prompt, tokens))
    gated = 0  # a replayed row may be gated to silence, token by token
    for weighted in result.weighted:
        key = (weighted.prompt.tolist(), weighted.sample.tokens.tolist())
        if key in trained:
            trained.remove(key)
        else:
            assert weighted.origin == "replayed"
            gated += 1
    assert not trained
    assert gated <= result.counts["replay/samples"]


def test_a_query_that_a_batch_holds_twice_has_the_rows_of_both_groups(tmp_path: Path) -> None:
    """A past sample may join both: each has its row, and the loss counts both. By hand, as the policy stands still."""
    overrides = {**trl_tiny.OVERRIDES, "reflection.train_as": "both"}
    more = {"learning_rate": 1e-12, "shuffle_dataset": False, "num_train_epochs": 6, "r3_overrides": overrides}
    trainer = make(tmp_path, Watching, data=trl_tiny.questions(times=2), **more)
    trainer.train()
    shared = 0
    for batch, result, loss in zip(trainer.batches, trainer.steps, losses(trainer), strict=True):
        check_rows(batch, result)
        by_hand = -sum(w.weight * len(w.sample) * w.advantage for w in result.weighted)
        assert loss == pytest.approx(by_hand, abs=2e-5)  # the buffer keeps log-probs to 24 bits
        joined = [sample.id for mixed in result.groups for sample in mixed.replayed]
        shared += len(joined) - len(set(joined))
        ids = [sample.id for sample in result.samples]
        assert None not in ids
        assert len(set(ids)) == len(ids)
    assert shared > 0


def test_rows_carry_eq_3_advantages_and_the_methods_weights(run: Any) -> None:
    """TRL's default loss divides by the tokens of all members: a row's advantage makes up for it."""
    _, trainer = run
    for batch, result in zip(trainer.batches, trainer.steps, strict=True):
        members = [member.sample for mixed in result.groups for member in mixed.members]
        tokens_in_all = int(batch["num_items_in_batch"])
        assert tokens_in_all == sum(map(len, members))
        fresh = {w.sample.tokens.tobytes() + w.prompt.tobytes(): w for w in result.weighted if w.origin != "replayed"}
        for i in range(len(batch["prompt_ids"])):
            tokens = batch["completion_ids"][i][batch["completion_mask"][i].bool()].int().numpy()
            prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].int().numpy()
            weighted = fresh.get(tokens.tobytes() + prompt.tobytes())
            advantage = float(batch["advantages"][i].reshape(-1)[0])
            if weighted is not None and sum(1 for m in members if m.tokens.tobytes() == tokens.tobytes()) == 1:
                assert advantage / tokens_in_all == pytest.approx(weighted.advantage * weighted.weight, abs=1e-9)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_trls_loss_is_the_methods(tmp_path: Path, loss_type: str) -> None:
    """With a policy that stands still every ratio is 1, and the loss is −Σ weight · length · advantage: by hand."""
    overrides = {**trl_tiny.OVERRIDES, "reflection.train_as": "both"}
    trainer = make(tmp_path, Watching, loss_type=loss_type, learning_rate=1e-12, r3_overrides=overrides)
    trainer.train()
    assert sum(logged(trainer, "r3/replay/samples")) > 0
    for loss, result in zip(losses(trainer), trainer.steps, strict=True):
        by_hand = -sum(w.weight * len(w.sample) * w.advantage for w in result.weighted)
        assert loss == pytest.approx(by_hand, abs=2e-5)  # the buffer keeps log-probs to 24 bits


def test_rows_are_whole_microbatches(run: Any) -> None:
    _, trainer = run
    for batch in trainer.batches:
        assert len(batch["prompt_ids"]) % 2 == 0
        assert {len(tensor) for name, tensor in batch.items() if name != "num_items_in_batch"} == {
            len(batch["prompt_ids"])
        }


def test_a_resumed_run_is_the_uninterrupted_one(run: Any) -> None:
    folder, whole = run
    (folder / "again").mkdir()
    os.symlink(folder / "model", folder / "again" / "model")
    resumed = make(folder / "again", save_strategy="steps", save_steps=2)
    resumed.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
    assert losses(resumed) == losses(whole)
    same = [name for name in whole.state.log_history[0] if name.startswith("r3/")]
    for name in same:
        assert logged(resumed, name) == logged(whole, name), name
    assert everything(folder / "again/out/r3_buffer.sqlite") == everything(folder / "out/r3_buffer.sqlite")


def test_a_checkpoint_without_a_buffer_is_refused(tmp_path: Path) -> None:
    plain = make(tmp_path, GRPOTrainer, GRPOConfig, max_steps=1, save_strategy="steps", save_steps=1)
    plain.train()
    with pytest.raises(FileNotFoundError, match="start a new run from its weights"):
        make(tmp_path, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-1"))


def test_with_everything_off_it_is_trl(tmp_path: Path) -> None:
    theirs = make(tmp_path, GRPOTrainer, GRPOConfig)
    theirs.train()
    ours = make(tmp_path, r3_method="grpo", r3_overrides=None)
    ours.train()
    assert losses(ours) == losses(theirs)
    assert not [name for name in ours.state.log_history[0] if name.startswith("r3/")]
    assert not (tmp_path / "out/r3_buffer.sqlite").exists()


@pytest.mark.parametrize(
    "more",
    [
        {"loss_type": "grpo", "beta": 0.1},
        {"loss_type": "dr_grpo", "num_iterations": 2},
        {"importance_sampling_level": "sequence", "steps_per_generation": 4},
        {"r3_overrides": {**trl_tiny.OVERRIDES, "reflection.train_as": "both"}},
        {"r3_method": "r3-no-ranking", "mask_truncated_completions": True},
    ],
)
def test_trls_own_settings_keep_working(tmp_path: Path, more: dict[str, Any]) -> None:
    trainer = make(tmp_path, **more)
    trainer.train()
    assert sum(logged(trainer, "r3/groups/reflection")) > 0
    assert all(torch.isfinite(torch.tensor(losses(trainer))))


def test_lora_with_a_reference(tmp_path: Path) -> None:
    from peft import LoraConfig

    trainer = make(tmp_path, beta=0.1, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trainer.train()
    assert sum(logged(trainer, "r3/replay/samples")) > 0
    assert logged(trainer, "kl")


def launch(folder: Path, *runs: tuple[dict[str, Any], str | None]) -> list[list[dict[str, Any]]]:
    """Tiny runs on two processes; what each logged."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    done = subprocess.run(
        [*torchrun, *rendezvous, "-m", "tests.integrations.trl_tiny", str(folder), json.dumps(runs)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    histories = json.loads((folder / "histories.json").read_text())
    return [[entry for entry in history if "loss" in entry] for history in histories]


def test_two_processes_and_a_resume(tmp_path: Path) -> None:
    # Three answers a question: groups lie across the ranks, and reflection groups come two by two.
    more = {"per_device_train_batch_size": 3, "num_generations": 3, "save_strategy": "steps", "save_steps": 4}
    apart = {**more, "r3_buffer_path": str(tmp_path / "resumed.sqlite")}
    checkpoint = str(tmp_path / "out/checkpoint-4")
    whole, resumed = launch(tmp_path, (more, None), (apart, checkpoint))
    for name in ("r3/replay/samples", "r3/groups/reflection", "r3/ranking/samples"):
        assert sum(entry[name] for entry in whole) > 0, name
    assert all(entry["r3/rows"] % 4 == 0 for entry in whole)
    assert [entry["loss"] for entry in resumed] == [entry["loss"] for entry in whole]
    assert everything(tmp_path / "resumed.sqlite") == everything(tmp_path / "out/r3_buffer.sqlite")
    # The same checkpoint on one process: the buffer goes along.
    alone = make(tmp_path, **{**more, "per_device_train_batch_size": 6, "save_strategy": "no"})
    alone.train(resume_from_checkpoint=checkpoint)
    assert len(losses(alone)) == len(whole)
    assert len(everything(tmp_path / "out/r3_buffer.sqlite")) >= len(everything(Path(checkpoint) / "r3_buffer.sqlite"))


@pytest.mark.parametrize(
    ("more", "fix"),
    [
        ({"mask_truncated_completions": True}, "r3-no-ranking"),
        ({"r3_method": "dapo", "r3_overrides": None}, "set loss_type='dapo' and epsilon_high=0.28"),
        ({"r3_method": "dapo", "r3_overrides": None, "loss_type": "grpo"}, "set loss_type='dapo'"),
        ({"loss_type": "bnpo"}, "use one of grpo"),
        ({"scale_rewards": "batch"}, "use 'group' or 'none'"),
        ({"r3_overrides": {"objective": {"clip_high": 0.3}}}, "epsilon_high"),
        ({"r3_overrides": {"mask_truncated": True}}, "mask_truncated_completions"),
        ({"r3_overrides": {"replay.kk": 3}}, "^r3_overrides.replay.kk: no such setting; did you mean"),
        ({"r3_method": "polaris", "r3_overrides": None}, "copies"),
        ({"r3_method": "prompt-replay", "r3_overrides": None}, "TRL's sampler does"),
        ({"r3_method": "exgrpo", "r3_overrides": None}, "is a method of r3 train"),
        ({"r3_method": "sdpo", "r3_overrides": None}, "trl.experimental.sdpo"),
        ({"r3_method": "grpoo"}, "^r3_method: Input should be 'grpo'"),
        ({"num_generations": 1}, "at least 2 generations"),
        ({"r3_max_reflections": 0}, "at least 1"),
        ({"use_vllm": True, "vllm_max_model_length": 4107}, "'reflection.max_prompt_tokens': 4095}, or a .* of 4108"),
    ],
)
def test_conflicts_name_their_fix(tmp_path: Path, more: dict[str, Any], fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        R3Config(**trl_tiny.settings(tmp_path, **more))


def test_settings_flat_and_nested(tmp_path: Path) -> None:
    flat = R3Config(**trl_tiny.settings(tmp_path, r3_overrides={"replay.k": 5, "ranking.max_reward": 0.2}))
    nested = R3Config(**trl_tiny.settings(tmp_path, r3_overrides={"replay": {"k": 5}, "ranking": {"max_reward": 0.2}}))
    assert flat.method() == nested.method()
    assert flat.method().replay.k == 5


def test_grpo_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="takes an R3Config"):
        make(tmp_path, R3Trainer, GRPOConfig)


@pytest.mark.parametrize("found", ["1.13.3", "2.0.0"])
def test_an_untested_trl_is_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(adapter.importlib.metadata, "version", lambda name: found)
    with pytest.raises(ImportError, match=r"pip install 'trl==1\.16\.\*'"):
        adapter.R3Trainer  # noqa: B018


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_importance_weights_are_the_objectives(ratio: Any) -> None:
    """Σ w over replayed tokens, read off `policy_loss` with ratio 1, advantage 1 and weight 1."""
    rng = np.random.default_rng(0)
    lengths, objective = [5, 3, 7], ObjectiveSettings(ratio=ratio, ratio_gate=4.0)
    behaviour = [-rng.exponential(2.0, n).astype(np.float32) for n in lengths]
    proximal = [-rng.exponential(2.0, n).astype(np.float32) for n in lengths]
    extra = [
        ExtraRow(np.arange(4), np.arange(n), None if i == 2 else b, 1.0, 1.0)
        for i, (n, b) in enumerate(zip(lengths, behaviour, strict=True))
    ]
    like = {"prompt_ids": torch.zeros(1, 2), "completion_ids": torch.zeros(1, 2)}
    padded = pad_rows(extra, like, 0, 8)
    proximal_BC = torch.zeros(3, 8)
    for i, logprobs in enumerate(proximal):
        proximal_BC[i, : len(logprobs)] = torch.tensor(logprobs)
    weight_BC = importance(proximal_BC, padded, objective, by_sequence=ratio == "sequence")
    one = torch.ones(3)
    batch = TokenBatch(
        sequence_T=torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)),
        behaviour_T=torch.tensor(np.concatenate(behaviour)),
        advantage_T=torch.ones(sum(lengths)),
        weight_S=one,
        origin_S=torch.full((3,), ORIGINS.index("replayed")),
        other_context_S=torch.tensor([False, False, True]),
    )
    loss = policy_loss(torch.tensor(np.concatenate(proximal)), batch, objective).loss
    assert float((weight_BC * padded.completion_mask_BC).sum()) == pytest.approx(-float(loss), rel=1e-5)


def test_rows_without_gradient_give_way() -> None:
    laid = lay_out([True, False, False, False, True, True, True, True], 2, 2, at_least=4, multiple=2)
    assert [(own.kept, own.extra, own.empty) for own in laid] == [((0, 1), (0, 1), 0), ((0, 1, 2, 3), (), 0)]
    laid = lay_out([True] * 8, 2, 3, at_least=4, multiple=2)
    assert [len(own) for own in laid] == [6, 6]
    assert [own.empty for own in laid] == [0, 1]


# `R3Trainer` on conversations, the form of most data sets: prompts go through the chat template, reflections too.


TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def correct(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    return [float(judge(turns[0]["content"], share)) for turns, share in zip(completions, answer, strict=True)]


def test_reflection_prompts_are_conversations_too(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(char_tokenizer())
    tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, tokenizer.eos_token
    system = {"role": "system", "content": "Be brief."}
    turns = [[system, {"role": "user", "content": f"What is {i}+{i}?"}] for i in range(8)]
    rows = [{"prompt": turn, "answer": share} for turn, share in zip(turns, ["0", "10", "90", "100"] * 2, strict=True)]
    args = R3Config(**settings(tmp_path, r3_overrides=OVERRIDES))
    trainer = R3Trainer(
        str(save_model(tmp_path / "model")),
        correct,
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    asked: list[tuple[str, str]] = []

    class Watch(type(trainer)):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            asked.extend((m.group.context.kind, tokenizer.decode(m.group.prompt)) for m in self.r3_step.groups)
            return batch

    trainer.__class__ = Watch
    trainer.train()
    assert sum(logged(trainer, "r3/replay/samples")) > 0
    plain = {text for kind, text in asked if kind == "plain"}
    assert plain == {f"[system]Be brief.\n[user]What is {i}+{i}?\n[assistant]" for i in range(8)}
    reflections = [text for kind, text in asked if kind == "reflection"]
    assert reflections
    for text in reflections:
        before, shown = text.split(" NOT ")
        assert before.startswith("[system]Be brief.\n[user]What is ")
        assert shown.endswith(" BUT \n[assistant]")
