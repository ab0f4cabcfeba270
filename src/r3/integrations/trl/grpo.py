"""What `R3Trainer` stands on, with nothing of the method: TRL's `GRPOTrainer` and its data in r3's terms.

`RankedTrainer` is TRL's trainer with what is needed of its ranks and its model, `Step` the state while a generation
batch is in progress. Then what the record of a run has besides the method's results (its settings, and what TRL logs of
its update), and TRL's data rows and reward functions.

`FurtherRows` has further queries for resampling: the training data in a second order. TRL fixes before a run how many
steps its sampler gives; its epochs, `max_steps` and learning rate depend on that. So further queries are not taken from
the sampler's order, which would end too soon, but from a second one.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import use_adapter

from r3.algorithm import Prompt
from r3.integrations.common import Answer, Described, prompt_id, text_of
from r3.integrations.trl.config import R3Config
from r3.method.settings import MethodSettings
from r3.samples import Group, Query
from r3.verify.rewards import OutcomeWatch

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


def query_of(row: Mapping[str, Any], id_column: str | None) -> Query:
    """The query that a data row asks. Without an id column, equal prompts are the same query."""
    prompt = row["prompt"]
    if id_column is None:
        return Query(prompt_id(prompt), text_of(prompt))
    if id_column not in row:
        raise ValueError(f"the data has no column {id_column!r} (r3_id_column); it has {', '.join(sorted(row))}")
    return Query(str(row[id_column]), text_of(prompt))


def check_rows(rows: Iterable[Mapping[str, Any]], id_column: str | None) -> None:
    """Refuse an id that stands for two prompts; warn of a prompt whose rows differ in what else they say."""
    first: dict[str, tuple[str, str]] = {}
    differing = 0
    for row in rows:
        query_id, prompt = query_of(row, id_column).id, prompt_id(row["prompt"])
        rest = repr(sorted((name, value) for name, value in row.items() if name not in ("prompt", id_column)))
        known_prompt, known_rest = first.setdefault(query_id, (prompt, rest))
        if known_prompt != prompt:
            raise ValueError(f"r3_id_column={id_column!r}: two prompts have the id {query_id!r}; ids must be unique")
        differing += known_rest != rest
    if differing:
        warnings.warn(
            f"{differing} rows have the prompt of another row and differ in other columns: R³ keeps one history for "
            "them, so that an answer judged by one row's columns is replayed for the other; keep one of each, or give "
            "r3_id_column",
            stacklevel=3,
        )


def outcome_index(name: str | None, names: Sequence[str]) -> int:
    """Which reward function tells right from wrong."""
    if len(set(names)) < len(names):
        raise ValueError(
            f"two reward functions have the same name ({', '.join(names)}), and R³ keeps rewards by name: give each "
            "its own (__name__)"
        )
    if name is None and len(names) > 1:
        raise ValueError(
            f"several reward functions ({', '.join(names)}): name the one that tells right from wrong, e.g. "
            f"r3_outcome_reward={names[-1]!r}"
        )
    if name is None:
        return 0
    if name not in names:
        raise ValueError(f"r3_outcome_reward={name!r} is not among the reward functions: {', '.join(names)}")
    return list(names).index(name)


def outcome_watch(name: str, right_above: float) -> OutcomeWatch:
    """What warns if no answer is ever right, in TRL's names of the settings."""
    return OutcomeWatch(name, right_above, threshold="r3_right_above", outcome="r3_outcome_reward")


FILE = "r3_resampling.json"


class FurtherRows:
    """The rows of the data, pass after pass, each pass shuffled: a pure function of the seed and of the position."""

    def __init__(self, rows: Any, *, seed: int, shuffle: bool) -> None:
        if not isinstance(rows, Sized):
            raise ValueError("resampling asks further rows of the data by number: give a dataset, not a stream")
        self.rows: Any = rows
        self.seed, self.shuffle = seed, shuffle
        self.position = 0
        """How many rows were taken: all that a checkpoint must store."""

    def take(self, count: int) -> list[Any]:
        """The next `count` rows."""
        taken = [self._at(position) for position in range(self.position, self.position + count)]
        self.position += count
        return taken

    def save(self, folder: str) -> None:
        """Write the position into a checkpoint, whole or not at all."""
        partial = Path(folder) / f"{FILE}.partial"
        partial.write_text(json.dumps({"position": self.position}))
        partial.replace(Path(folder) / FILE)

    def _at(self, position: int) -> Any:
        number, index = divmod(position, len(self.rows))
        if not self.shuffle:
            return self.rows[index]
        return self.rows[int(np.random.default_rng([self.seed, number]).permutation(len(self.rows))[index])]


def saved_position(checkpoint: str) -> int:
    """How many rows had been taken at a checkpoint; 0 if its run did not resample."""
    path = Path(checkpoint) / FILE
    return int(json.loads(path.read_text())["position"]) if path.exists() else 0


def by_rank(rounds: Sequence[int], ranks: int) -> list[int]:
    """The rows of all rounds in the order in which the ranks hold them, by their number in the order of the rounds.

    Each round's rows are dealt over the ranks, and a rank lays those of later rounds behind those of earlier ones.

    >>> by_rank([4, 2], 2)
    [0, 1, 4, 2, 3, 5]
    """
    first = np.cumsum([0, *rounds]).tolist()
    return [
        start + rank * (rows // ranks) + i
        for rank in range(ranks)
        for start, rows in zip(first, rounds, strict=False)
        for i in range(rows // ranks)
    ]
