"""Micro-batches by a token budget, and the packed row that one forward takes.

Where it is worth it (on a card, with variable-length attention, and on a CPU where it saves a quarter of the tokens), a
prompt that several sequences begin with stands in the row once: its keys and values are computed once and every
response reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from r3.policy.attention import Layout, layout_of, to_device
from r3.samples import IntArray


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A prompt and its response, as token ids."""

    prompt: IntArray
    response: IntArray

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True, slots=True)
class Row:
    """A packed row, and for every response token, in the order of the sequences given, where it and its past are."""

    ids_T: Tensor
    layout: Layout
    before_R: Tensor
    """Position of the token before it, which predicts it."""
    targets_R: Tensor
    """The token itself."""


def row_of(sequences: Sequence[Trajectory], device: torch.device, *, share: bool) -> Row:
    """Pack sequences into one row; with `share`, a common prompt is in it once."""
    parts: list[IntArray] = []
    prefixes: list[int | None] = []
    starts: list[int] = []

    def append(part: IntArray, prefix: int | None) -> int:
        starts.append(starts[-1] + len(parts[-1]) if parts else 0)
        parts.append(part)
        prefixes.append(prefix)
        return len(parts) - 1

    shared = _shared(sequences) if share else frozenset()
    prompts: dict[bytes, int] = {}
    before = []
    for sequence in sequences:
        n, key = len(sequence.prompt), sequence.prompt.tobytes()
        if key in shared:
            if key not in prompts:
                prompts[key] = append(sequence.prompt, None)
            first = starts[append(sequence.response, prompts[key])]
            last = starts[prompts[key]] + n - 1
        else:
            first = starts[append(np.concatenate([sequence.prompt, sequence.response]), None)] + n
            last = first - 1
        before.append(torch.cat([torch.tensor([last]), torch.arange(first, first + len(sequence.response) - 1)]))
    targets = torch.from_numpy(np.concatenate([sequence.response for sequence in sequences]))
    layout = layout_of([len(part) for part in parts], device, prefixes=prefixes)
    ids = torch.from_numpy(np.concatenate(parts))
    return Row(
        to_device(ids.long(), device), layout, to_device(torch.cat(before), device), to_device(targets.long(), device)
    )


def _shared(sequences: Sequence[Trajectory]) -> frozenset[bytes]:
    """The prompts that several of the sequences have."""
    seen: set[bytes] = set()
    twice: set[bytes] = set()
    for sequence in sequences:
        key = sequence.prompt.tobytes()
        (twice if key in seen else seen).add(key)
    return frozenset(twice)


def sharing_pays(sequences: Sequence[Trajectory]) -> bool:
    """Whether a quarter of the tokens is saved where prompts that several sequences begin with are there once.

    Attention that pads loses something by it: with a mask it also computes what lies behind each token.

    >>> prompt, response = np.zeros(2, np.int32), np.zeros(4, np.int32)
    >>> sharing_pays([Trajectory(prompt, response)] * 4), sharing_pays([Trajectory(prompt, response)] * 3)
    (True, False)
    """
    once = {sequence.prompt.tobytes(): len(sequence.prompt) for sequence in sequences}
    saved = sum(len(sequence.prompt) for sequence in sequences) - sum(once.values())
    return 4 * saved >= sum(map(len, sequences))


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Micro-batches (as indices) of at most `budget` tokens each, longest sequences first; a longer one goes alone.

    Sequences of like length come together, so that padding inside attention costs little.

    >>> pack([3, 9, 4, 2], budget=8)
    [[1], [2, 0], [3]]
    """
    batches: list[list[int]] = []
    room = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or lengths[i] > room:
            batches.append([])
            room = budget
        batches[-1].append(i)
        room -= lengths[i]
    return batches


def pack_sharing(sequences: Sequence[Trajectory], budget: int) -> list[list[int]]:
    """The same for rows that share prompts: sequences with the same prompt come together, and it counts once."""
    by_prompt: dict[bytes, list[int]] = {}
    for i, sequence in enumerate(sequences):
        by_prompt.setdefault(sequence.prompt.tobytes(), []).append(i)
    batches: list[list[int]] = []
    room = 0
    for together in by_prompt.values():
        for number, i in enumerate(together):
            extra = len(sequences[i].prompt) if number == 0 else 0
            if not batches or len(sequences[i].response) + extra > room:
                batches.append([])
                room, extra = budget, len(sequences[i].prompt)
            batches[-1].append(i)
            room -= len(sequences[i].response) + extra
    return batches
