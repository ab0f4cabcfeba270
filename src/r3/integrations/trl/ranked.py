"""What `R3Trainer` stands on, with nothing of the method: TRL's `GRPOTrainer` with what is needed of its ranks and its
model, the state while a generation batch is in progress (`Step`), and what the record of a run has besides the method's
results: its settings, and what TRL logs of its update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import use_adapter

from r3.algorithm import Prompt
from r3.integrations.common import Answer, Described
from r3.integrations.trl.config import R3Config
from r3.method.settings import MethodSettings
from r3.samples import Group

T = TypeVar("T")
Row = dict[str, Any]


class RankedTrainer(GRPOTrainer):
    """`GRPOTrainer` whose ranks share rows and decisions, and that can send rows of its own through the model."""

    args: R3Config

    def _epoch(self) -> int:
        """The current epoch, from 1; TRL counts it in fractions."""
        return int((self.state.epoch or 0) + 1e-6) + 1

    @property
    def _vllm_context(self) -> int | None:
        """How many tokens a prompt and its answer may have in the vLLM that TRL made here; None if it made none."""
        if not self.use_vllm or self.vllm_mode != "colocate":
            return None
        return int(self.vllm_generation.llm.llm_engine.model_config.max_model_len)

    def _share(self, everyone: list[Row]) -> list[Row]:
        """This rank's part of all ranks' rows."""
        share, rank = len(everyone) // self.accelerator.num_processes, self.accelerator.process_index
        return everyone[rank * share : (rank + 1) * share]

    def _on_main(self, make: Callable[[], T]) -> T:
        """What `make` returns on the main process, on all processes; if it fails there, all fail instead of hanging."""
        box: list[Any] = [None, None]
        if self.accelerator.is_main_process:
            try:
                box[0] = make()
            except Exception as error:  # noqa: BLE001  # raised again below, on every rank
                box[1] = error
        broadcast_object_list(box)
        if box[1] is not None:
            raise box[1]
        value: T = box[0]
        return value

    @torch.no_grad()
    def _forward(self, model: Any, input_ids: Tensor, attention_mask: Tensor, keep: int) -> tuple[Tensor, Any]:
        logps_BC, entropies_BC, _ = self._get_per_token_logps_and_entropies(
            model,
            input_ids,
            attention_mask,
            keep,
            batch_size=self.args.per_device_train_batch_size,
            compute_entropy=model is self.model,  # TRL taught only the policy to return entropies
        )
        return logps_BC, entropies_BC

    def _reference(self, input_ids: Tensor, attention_mask: Tensor, keep: int) -> Tensor:
        """Log-probs under the reference policy: a model of its own, or with LoRA the policy without its adapter."""
        if self.ref_model is not None:
            return self._forward(self.ref_model, input_ids, attention_mask, keep)[0]
        peft = self.accelerator.unwrap_model(self.model)
        with use_adapter(peft, adapter_name="ref" if "ref" in peft.peft_config else None):
            return self._forward(self.model, input_ids, attention_mask, keep)[0]


@dataclass
class Seen:
    """What TRL computes while it makes a batch, and does not return."""

    rewards: Tensor | None = None
    """Rewards of all ranks' rows, by reward function."""
    completion_ids: list[list[int]] = field(default_factory=list)
    passes: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Log-probs and entropies of each forward pass of the policy."""


@dataclass
class Step:
    """A generation batch in progress, on the main process: what is asked, and the answers so far."""

    queries: int
    """How many queries the batch has, without reflection prompts."""
    prompts: Sequence[Prompt]
    counts: Mapping[str, int]
    """Counts of reflection prompts, and of the reasons against more."""
    answers: list[Answer] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)


TOLD = {"loss": "update/loss", "grad_norm": "update/grad_norm", "learning_rate": "update/learning_rate"}
"""TRL's names of metrics that r3's own loop has too."""


def described(args: R3Config, method: MethodSettings, model: Any, *, total_steps: int) -> Described:
    """The run: the method's settings as they are resolved, and all of TRL's."""
    defaults = {
        field.name: field.default for field in dataclasses.fields(args) if field.default is not dataclasses.MISSING
    }
    limit = int(args.max_completion_length or 0)
    sections = {
        "model": {"path": str(getattr(model.config, "_name_or_path", ""))},
        "method": method.model_dump(mode="json"),
        "rollout": {"group_size": args.num_generations, "max_tokens": limit, "temperature": args.temperature},
        "trl": args.to_dict(),  # type: ignore[no-untyped-call]
    }
    return Described(
        method=method,
        settings=sections,
        defaults={"trl": defaults},
        versions={"trl": metadata.version("trl")},
        limit=limit,
        total_steps=total_steps,
        seed=args.seed,
        rollouts_every=args.r3_rollouts_every,
        rollouts_groups=args.r3_rollouts_groups,
    )


def told_of(logs: Mapping[str, Any]) -> dict[str, float]:
    """What TRL logged, under the names of r3's metrics."""
    return {ours: float(logs[theirs]) for theirs, ours in TOLD.items() if isinstance(logs.get(theirs), int | float)}
