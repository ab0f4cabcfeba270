"""TRL's `GRPOTrainer` with what `R3Trainer` needs of its ranks and its model; nothing of the method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import use_adapter

from r3.integrations.trl.config import R3Config

T = TypeVar("T")
Row = dict[str, Any]


class RankedTrainer(GRPOTrainer):
    """`GRPOTrainer` whose ranks share rows and decisions, and that can send rows of its own through the model."""

    args: R3Config

    def _epoch(self) -> int:
        """The current epoch, from 1; TRL counts it in fractions."""
        return int((self.state.epoch or 0) + 1e-6) + 1

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
