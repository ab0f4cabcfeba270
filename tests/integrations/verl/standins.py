"""Stand-ins for verl's two kinds of GPU workers, put in their place in every process by VERL_USE_EXTERNAL_MODULES.

The actor's log-probs and entropies are those of a tiny model on the CPU; its update writes down what it was given. The
rollout server answers from the contract's recording. All else is verl's own code: Ray, TransferQueue, agent loops,
reward workers, the trainer's `fit`, dispatch to two data-parallel workers, checkpoints.
"""

from __future__ import annotations

import copyreg
import json
import os
import pickle
from collections import Counter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.trainer.ppo.v1 import trainer_base
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.replica import TokenOutput

from r3.integrations.verl.trainer import R3Trainer
from tests.integrations.contract import Recording
from tests.tokenizing import char_tokenizer

FOLDER = Path(os.environ["R3_TEST_FOLDER"])
SERVER = "recorded answers"
WRITTEN = ("uid", "prompts", "responses", "response_mask", "advantages", "old_log_probs")
copyreg.pickle(MappingProxyType, lambda proxy: (dict, (dict(proxy),)))


class StandInWorker(Worker):
    """In place of `ActorRolloutRefWorker`: one tiny model a process, whose weights stay."""

    def __init__(self, config: Any, role: str, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.updates = 0
        self._register_dispatch_collect_info("actor", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.config.model.path, dtype=torch.float32).eval()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @torch.no_grad()
    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        """Of each position, what it says of the next one; verl takes the responses' share."""
        log_probs, entropies = [], []
        for ids in data["input_ids"].unbind(0):
            log_TV = self.model(ids[None]).logits[0].log_softmax(-1)
            entropies.append(-(log_TV.exp() * log_TV).sum(-1))
            log_probs.append(log_TV[:-1].gather(1, ids[1:, None])[:, 0])
            log_probs[-1] = torch.cat([log_probs[-1], torch.zeros(1)])
        fields = {"log_probs": _nested(log_probs), "entropy": _nested(entropies)}
        return TensorDict(fields, batch_size=len(log_probs))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: TensorDict) -> TensorDict:
        """Split into mini-batches as verl's worker does it, and write down each."""
        total = tu.pop(data, key="mini_batch_size")
        options = tu.pop(data, key="dataloader_kwargs")
        seed = tu.pop(data, key="seed") + self.rank
        epochs = tu.pop(data, key="epochs")
        parts = tu.make_iterator(
            data, mini_batch_size=total // self.world_size, epochs=epochs, seed=seed, dataloader_kwargs=options
        )
        step = ray.get(ray.get_actor(SERVER).version.remote()) + 1
        for number, part in enumerate(parts):
            rows = [{name: _plain(part[name], i) for name in WRITTEN} for i in range(len(part))]
            name = f"update-{step}-{number}-{self.rank}.pkl"
            (FOLDER / name).write_bytes(pickle.dumps({"mini_batch_size": total, "rows": rows}))
        self.updates += 1
        metrics = {"mfu": [0.0], "grad_norm": [0.0]}
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": metrics})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str, hdfs_path: Any = None, global_step: int = 0, **_: Any) -> None:
        if self.rank == 0:
            os.makedirs(local_path)
            asked = ray.get(ray.get_actor(SERVER).asked.remote())
            Path(local_path, "state.json").write_text(json.dumps({"updates": self.updates, "asked": asked}))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str, hdfs_path: Any = None, del_local_after_load: bool = False) -> None:
        state = json.loads(Path(local_path, "state.json").read_text())
        self.updates = state["updates"]
        ray.get(ray.get_actor(SERVER).restore.remote(state["asked"]))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> None:
        await ray.get_actor(SERVER).set_version.remote(global_steps)


@ray.remote(num_cpus=0)
class Server:
    """Gives the recorded answers, by how often a session was asked a prompt before; in the third step some fail."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.weights = 0
        self.failing: dict[str, list[int]] = json.loads(os.environ.get("R3_TEST_FAILING", "{}"))

    def generate(self, prompt_ids: list[int], session: int) -> TokenOutput:
        prompt = char_tokenizer().decode(prompt_ids)
        self.counts[f"{session} {prompt}"] += 1
        if session in self.failing.get(prompt, ()) and self.weights == 2:
            raise RuntimeError("a rollout that fails, as the test asked for")
        one = Recording.nth(prompt, self.counts[f"{session} {prompt}"])[session]
        steps = {"min_global_steps": self.weights, "max_global_steps": self.weights}
        return TokenOutput(token_ids=one.tokens.tolist(), log_probs=one.logprobs.tolist(), extra_fields=steps)

    def version(self) -> int:
        return self.weights

    def set_version(self, version: int) -> None:
        self.weights = version

    def asked(self) -> dict[str, int]:
        return dict(self.counts)

    def restore(self, asked: dict[str, int]) -> None:
        self.counts = Counter(asked)


class StandInServers:
    """In place of `LLMServerManager`."""

    @classmethod
    def create(cls, **_: Any) -> StandInServers:
        made = cls()
        made.server = Server.options(name=SERVER).remote()
        return made

    def get_client(self) -> StandInClient:
        return StandInClient(self.server)

    def get_replicas(self) -> list[Any]:
        return []


class StandInClient:
    """In place of `LLMServerClient`."""

    def __init__(self, server: Any) -> None:
        self.server = server

    async def generate(self, *, prompt_ids: list[int], priority: int, **_: Any) -> TokenOutput:
        return await self.server.generate.remote(prompt_ids, priority)


@agent_loop.register("recorded")
class RecordedLoop(SingleTurnAgentLoop):
    """verl's loop, which tells the server the session: sessions ask side by side, in any order."""

    async def run(self, sampling_params: dict[str, Any], **named: Any) -> Any:
        return await super().run(sampling_params, **{**named, "priority": named["session_id"]})


def _nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _plain(column: Any, row: int) -> Any:
    value = column[row]
    return value.tolist() if torch.is_tensor(value) else getattr(value, "data", value)


def _watched(compute: Any) -> Any:
    def watching(self: Any, batch: Any, metrics: Any) -> Any:
        done = compute(self, batch, metrics)
        (FOLDER / f"step-{self.global_steps}.pkl").write_bytes(pickle.dumps(self.r3_step))
        return done

    return watching


trainer_base.ActorRolloutRefWorker = StandInWorker
trainer_base.LLMServerManager = StandInServers
R3Trainer._compute_advantage = _watched(R3Trainer._compute_advantage)
