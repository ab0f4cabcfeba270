"""From what the algorithm decided to the rows that every rank trains on: pure functions, run by the main process.

`plan_rows` translates it to TRL's rows; `lay_out` gives every rank the same number of rows, which TRL can split into
micro-batches.

`select` and `join` take rows out of TRL's batch of padded rows and put others in: B rows, P prompt tokens (padded on
the left), C completion tokens (padded on the right).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from r3.integrations import common as stale
from r3.method.mixed import StepResult
from r3.method.settings import MethodSettings, ObjectiveSettings
from r3.samples import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class ExtraRow:
    """A sequence to train on that TRL did not generate in this batch under this prompt."""

    prompt: IntArray
    tokens: IntArray
    behaviour: FloatArray | None
    """Log-probs when it was drawn; None if that was under another prompt, so that they do not apply."""
    advantage: float
    weight: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What to train on, the same on every rank."""

    advantages: npt.NDArray[np.float64]
    """The advantage of each generated row, over all ranks; 0 for rows that are not trained on."""
    weights: npt.NDArray[np.float64]
    """What one token of each weighs in the loss, all denominators included."""
    lengths: tuple[int, ...]
    """Tokens of each generated answer."""
    extra: tuple[ExtraRow, ...]
    tokens: int
    """Tokens of all members of all groups: the denominator of losses that count tokens."""
    counts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RankRows:
    """The rows of one rank: which it keeps, which extra ones it takes, how many empty ones fill it up."""

    kept: tuple[int, ...]
    extra: tuple[int, ...]
    empty: int

    def __len__(self) -> int:
        return len(self.kept) + len(self.extra) + self.empty


def plan_rows(result: StepResult, settings: MethodSettings) -> Plan:
    """What was decided about the batch, row by row. TRL generated the rows of a group side by side, group by group."""
    first = np.cumsum([0, *(len(mixed.group) for mixed in result.groups)])
    advantages, weights = np.zeros(first[-1]), np.zeros(first[-1])
    extra = []
    for w in result.weighted:
        if w.origin == "replayed" or w.other_context:
            behaviour = None if w.other_context else w.sample.logprobs
            extra.append(ExtraRow(w.prompt, w.sample.tokens, behaviour, w.advantage, w.weight))
        else:
            row = first[w.group] + w.member
            advantages[row], weights[row] = w.advantage, w.weight
    members = [member.sample for mixed in result.groups for member in mixed.members]
    tokens = sum(len(sample) for sample in members if not (settings.mask_truncated and sample.truncated))
    return Plan(advantages, weights, tuple(map(len, result.samples)), tuple(extra), tokens, result.counts)


def lay_out(trained: Sequence[bool], ranks: int, extra: int, *, at_least: int, multiple: int) -> list[RankRows]:
    """Equal rows for all ranks. Rows with a gradient stay where they are; the others give way to extra rows.

    `trained` has for each generated row, rank after rank, whether it has a gradient. Every rank gets `at_least` rows,
    or more if the ones with a gradient do not fit, always a multiple of `multiple`.

    >>> lay_out([True, True, False, False], 2, 1, at_least=2, multiple=1)
    [RankRows(kept=(0, 1), extra=(), empty=0), RankRows(kept=(0,), extra=(0,), empty=0)]
    """
    share = len(trained) // ranks
    rows = [[i for i in range(share) if trained[rank * share + i]] for rank in range(ranks)]
    taken: list[list[int]] = [[] for _ in range(ranks)]
    for index in range(extra):
        emptiest = min(range(ranks), key=lambda rank: len(rows[rank]) + len(taken[rank]))
        taken[emptiest].append(index)
    needed = max(len(kept) + len(more) for kept, more in zip(rows, taken, strict=True))
    size = multiple * max(math.ceil(at_least / multiple), math.ceil(needed / multiple))
    laid = []
    for rank, (kept, more) in enumerate(zip(rows, taken, strict=True)):
        spare = [i for i in range(share) if not trained[rank * share + i]]
        spare = spare[: size - len(kept) - len(more)]
        empty = size - len(kept) - len(more) - len(spare)
        laid.append(RankRows(tuple(sorted([*kept, *spare])), tuple(more), empty))
    return laid


Batch = dict[str, Tensor]
# Every tensor of TRL's batch that has a row per answer, text only, with the value an empty row has.
PROMPT = {"prompt_ids": 0, "prompt_mask": 0}
COMPLETION = {
    "completion_ids": 0,
    "completion_mask": 0,
    "old_per_token_logps": 0,
    "ref_per_token_logps": 0,
    "sampling_per_token_logps": 0,
    "importance_sampling_ratio": 1,
}
KNOWN = {*PROMPT, *COMPLETION, "advantages", "num_items_in_batch"}


@dataclass(frozen=True, slots=True)
class Padded:
    """Extra rows as tensors of one width."""

    prompt_ids_BP: Tensor
    prompt_mask_BP: Tensor
    completion_ids_BC: Tensor
    completion_mask_BC: Tensor
    behaviour_BC: Tensor
    """0 where `moved`."""
    moved_B: Tensor
    """Drawn under another prompt: the behaviour log-probs do not apply."""

    def __len__(self) -> int:
        return len(self.prompt_ids_BP)

    def __getitem__(self, chosen: slice) -> Padded:
        return Padded(*(getattr(self, f.name)[chosen] for f in fields(self)))

    @property
    def input_ids(self) -> Tensor:
        return torch.cat([self.prompt_ids_BP, self.completion_ids_BC], dim=1)

    @property
    def attention_mask(self) -> Tensor:
        return torch.cat([self.prompt_mask_BP, self.completion_mask_BC], dim=1)


def check(batch: Batch) -> None:
    """Refuse a batch with rows of a kind that we would leave behind."""
    if strange := set(batch) - KNOWN:
        raise ValueError(
            f"R3Trainer trains on text answered in one turn, and TRL's batch holds {', '.join(sorted(strange))}: "
            "use it without images, tools and environments, or set r3_method='grpo'"
        )


def pad_rows(extra: Sequence[ExtraRow], like: Batch, pad_id: int, multiple_of: int | None) -> Padded:
    """The extra rows at the width of the batch, or wider if they are longer."""
    device = like["prompt_ids"].device
    wide_P = _width([len(row.prompt) for row in extra], like["prompt_ids"].size(1), multiple_of)
    wide_C = _width([len(row.tokens) for row in extra], like["completion_ids"].size(1), multiple_of)
    n = len(extra)
    prompt_ids_BP = torch.full((n, wide_P), pad_id, dtype=torch.long)
    prompt_mask_BP = torch.zeros((n, wide_P), dtype=torch.long)
    completion_ids_BC = torch.full((n, wide_C), pad_id, dtype=torch.long)
    completion_mask_BC = torch.zeros((n, wide_C), dtype=torch.long)
    behaviour_BC = torch.zeros((n, wide_C))
    for i, row in enumerate(extra):
        prompt_ids_BP[i, wide_P - len(row.prompt) :] = torch.tensor(row.prompt)
        prompt_mask_BP[i, wide_P - len(row.prompt) :] = 1
        completion_ids_BC[i, : len(row.tokens)] = torch.tensor(row.tokens)
        completion_mask_BC[i, : len(row.tokens)] = 1
        if row.behaviour is not None:
            behaviour_BC[i, : len(row.tokens)] = torch.tensor(row.behaviour)
    moved_B = torch.tensor([row.behaviour is None for row in extra], dtype=torch.bool)
    tensors = (prompt_ids_BP, prompt_mask_BP, completion_ids_BC, completion_mask_BC, behaviour_BC, moved_B)
    return Padded(*(tensor.to(device) for tensor in tensors))


def _width(lengths: list[int], at_least: int, multiple_of: int | None) -> int:
    width = max([at_least, *lengths])
    return width if multiple_of is None else math.ceil(width / multiple_of) * multiple_of


def select(batch: Batch, kept: Sequence[int], extra: Padded, values: Batch, empty: int) -> Batch:
    """The kept rows, the extra ones with their `values`, then empty ones, which no loss counts."""
    rows = torch.tensor(kept, device=batch["prompt_ids"].device, dtype=torch.long)
    more = {
        "prompt_ids": extra.prompt_ids_BP,
        "prompt_mask": extra.prompt_mask_BP,
        "completion_ids": extra.completion_ids_BC,
        "completion_mask": extra.completion_mask_BC,
        **values,
    }
    out: Batch = {}
    for name, tensor in batch.items():
        if name not in PROMPT and name not in COMPLETION:
            continue
        width = (extra.prompt_ids_BP if name in PROMPT else extra.completion_ids_BC).size(1)
        chosen = _widened(tensor[rows], name, width)
        joined = torch.cat([chosen, more[name][:, : chosen.size(1)].to(chosen.dtype)])
        # An empty row repeats a real one, so that the model sees valid ids, with nothing of it in the loss.
        blank = batch_row(joined, name, empty)
        out[name] = torch.cat([joined, blank])
    return out


def join(batches: Sequence[Batch]) -> Batch:
    """The rows of several batches joined, at the width of the widest."""
    if len(batches) == 1:
        return batches[0]
    width_P = max(batch["prompt_ids"].size(1) for batch in batches)
    width_C = max(batch["completion_ids"].size(1) for batch in batches)
    out: Batch = {}
    for name, tensor in batches[0].items():
        if name == "advantages":
            out[name] = torch.cat([batch[name] for batch in batches])
        elif name == "num_items_in_batch":
            out[name] = torch.stack([batch[name] for batch in batches]).sum(0).to(tensor.dtype)
        else:
            width = width_P if name in PROMPT else width_C
            out[name] = torch.cat([_widened(batch[name], name, width) for batch in batches])
    return out


def _widened(rows: Tensor, name: str, width: int) -> Tensor:
    if rows.size(1) == 1 and name == "importance_sampling_ratio":  # its sequence modes have one column
        return rows
    room = width - rows.size(1)
    return torch.nn.functional.pad(
        rows, (room, 0) if name in PROMPT else (0, room), value=float((PROMPT | COMPLETION)[name])
    )


def batch_row(rows: Tensor, name: str, times: int) -> Tensor:
    """Empty rows: the first one's prompt without an answer."""
    first = rows[:1].repeat(times, 1)
    return first if name in PROMPT or name == "completion_ids" else torch.full_like(first, COMPLETION[name])


def importance(proximal_BC: Tensor, extra: Padded, settings: ObjectiveSettings, *, by_sequence: bool) -> Tensor:
    """Importance weights of the extra rows' tokens: 1 under a new prompt."""
    mask_BC = extra.completion_mask_BC
    weight_BC = stale.importance(proximal_BC, extra.behaviour_BC, mask_BC, settings, by_sequence=by_sequence)
    return torch.where(extra.moved_B[:, None], torch.ones_like(weight_BC), weight_BC)
