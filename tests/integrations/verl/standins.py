"""What stands in for vLLM in verl's runs, put in its place in every process by VERL_USE_EXTERNAL_MODULES.

The rollout server answers from the contract's recording, and the part of it in verl's worker takes the weights without
using them. All else is verl's own code: Ray, its workers with FSDP2 (on the CPU, see `cpu.py`), its loss and optimiser,
TransferQueue or DataProto, agent loops, the servers' manager and client, reward workers, the trainer's `fit`,
checkpoints. What goes through is written down on its way.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
from collections import Counter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray

from tests.integrations.verl import cpu

cpu.use()

import copyreg  # noqa: E402

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl.experimental.agent_loop import agent_loop  # noqa: E402
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl.workers.rollout import base as rollouts  # noqa: E402
from verl.workers.rollout.base import BaseRollout  # noqa: E402
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput  # noqa: E402

from r3.integrations.verl.core import Core  # noqa: E402
from tests.integrations.contract import GROUP, Recording  # noqa: E402
from tests.tokenizing import char_tokenizer  # noqa: E402

FOLDER = Path(os.environ["R3_TEST_FOLDER"])
SERVER = "recorded answers"
WRITTEN = ("prompts", "responses", "response_mask", "advantages", "old_log_probs")
copyreg.pickle(MappingProxyType, lambda proxy: (dict, (dict(proxy),)))


# ---------------------------------------------------------------- in the place of vLLM


@ray.remote(num_cpus=0)
class Server:
    """Gives the recorded answers, by how often a session was asked a prompt before; in the third step some fail.

    How often is written down with each version of the weights, and read again by a run that begins with that version.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.weights: int | None = None
        self.failing: dict[str, list[int]] = json.loads(os.environ.get("R3_TEST_FAILING", "{}"))

    def generate(
        self, *, prompt_ids: list[int], sampling_params: dict[str, Any], priority: int = 0, **_: Any
    ) -> TokenOutput:
        prompt, session = char_tokenizer().decode(prompt_ids), priority
        if sampling_params["temperature"] == 0:  # verl's validation, which is no part of the recording
            return TokenOutput(token_ids=Recording.nth(prompt, 1)[0].tokens.tolist(), extra_fields={"global_steps": 0})
        self.counts[f"{session} {prompt}"] += 1
        if session in self.failing.get(prompt, ()) and self.weights == 2:
            raise RuntimeError("a rollout that fails, as the test asked for")
        one = Recording.nth(prompt, self.counts[f"{session} {prompt}"])[session]
        extra = {"global_steps": self.weights}
        return TokenOutput(token_ids=one.tokens.tolist(), log_probs=one.logprobs.tolist(), extra_fields=extra)

    def set_version(self, version: int) -> None:
        asked = FOLDER / f"asked-{version}.json"
        if self.weights is None and version > 0:
            self.counts = Counter(json.loads(asked.read_text()))
        self.weights = version
        asked.write_text(json.dumps(self.counts))

    def sleep(self) -> None:
        pass


class RecordedReplica(RolloutReplica):
    """verl's handle of a server."""

    async def launch_servers(self) -> None:
        self._server_handle, self._server_address = Server.options(name=SERVER).remote(), SERVER
        self.servers = [self._server_handle]


class RecordedRollout(BaseRollout):
    """The server's part in verl's training worker, which hands it the weights after each step."""

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(self, weights: Any, *, global_steps: int, **_: Any) -> None:
        Seen.version, Seen.updates = global_steps, 0
        whole = {name: tensor.clone() for name, tensor in weights}
        if torch.distributed.get_rank() == 0:
            torch.save(whole, FOLDER / f"weights-{global_steps}.pt")
            await ray.get_actor(SERVER).set_version.remote(global_steps)


RolloutReplicaRegistry.register("vllm", lambda: RecordedReplica)
rollouts._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.RecordedRollout"


@agent_loop.register("recorded")
class RecordedLoop(SingleTurnAgentLoop):
    """verl's loop, which tells the server the session: sessions ask side by side, in any order."""

    async def run(self, sampling_params: dict[str, Any], **named: Any) -> Any:
        # V1 names it; V0 numbers the rows, those of a prompt one after the other
        session = named["session_id"] if "session_id" in named else int(named["priority"]) % GROUP
        return await super().run(sampling_params, **{**named, "priority": session})


# ---------------------------------------------------------------- what goes through, written down


def _rows(data: TensorDict) -> list[dict[str, list[float]]]:
    """A mini-batch's rows without padding, however verl's trainer lays them out."""
    rows = []
    for i in range(len(data)):
        row = {name: data[name][i] for name in WRITTEN}
        if not data["prompts"].is_nested:
            width = len(row["prompts"])
            asked, answered = data["attention_mask"][i][:width].bool(), data["attention_mask"][i][width:].bool()
            row = {name: value[asked if name == "prompts" else answered] for name, value in row.items()}
        rows.append({name: value.tolist() for name, value in row.items()})
    return rows


class Seen:
    """What this worker has seen of its run."""

    version = 0
    """The weights' version: the step after which they were handed over."""
    updates = 0
    """Since then."""


def _writing(train: Any) -> Any:
    @functools.wraps(train)
    def train_batch(self: Any, data: TensorDict) -> Any:
        given = {"mini_batch_size": tu.get(data, "global_batch_size"), "rows": _rows(data)}
        done = train(self, data)
        given["loss"] = tu.get(done, "metrics")["loss"]
        name = f"update-{Seen.version + 1}-{Seen.updates}-{self.rank}.pkl"
        (FOLDER / name).write_bytes(pickle.dumps(given))
        Seen.updates += 1
        return done

    return train_batch


def _watching(learn: Any) -> Any:
    @functools.wraps(learn)
    def learning(self: Core, *more: Any, **named: Any) -> Any:
        decided = learn(self, *more, **named)
        (FOLDER / f"step-{self.batch.step}.pkl").write_bytes(pickle.dumps(self.result))
        return decided

    return learning


TrainingWorker.train_batch = _writing(TrainingWorker.train_batch)
Core.learn = _watching(Core.learn)
