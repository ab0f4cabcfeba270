"""The currency of a training step: a `Query`, the `Sample`s drawn for it, and the `Group` they form.

Everything the other rooms exchange is one of these. They are frozen, carry plain numpy arrays, and know nothing of
models, files or the method. A `Sample` is one trajectory: what the policy wrote, how likely it was when it wrote it
(the behaviour log-probs), how undecided it was at each token (the entropies), and how it was judged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
FinishReason = Literal["stop", "length"]
ContextKind = Literal["plain", "reflection", "hint", "critique"]
CONTEXT_KINDS: tuple[ContextKind, ...] = get_args(ContextKind)
"""In the order of their numbers in a buffer: only ever added to."""

_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat prompt."""

    role: str
    content: str

    def as_dict(self) -> dict[str, str]:
        """The turn as chat templates and data files have it."""
        return {"role": self.role, "content": self.content}


PromptText = str | tuple[Message, ...]
"""A prompt before it is tokenized: plain text, or the turns of a chat."""


@dataclass(frozen=True, slots=True)
class Query:
    """A problem to solve, under the id that links it to its history.

    `prompt` is either plain text or chat messages; `answer` and `columns` belong to the verifier.
    """

    id: str
    prompt: PromptText
    answer: str = ""
    columns: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    instruction: str = ""
    """What stands behind the question in the prompt, so that a reflection prompt can ask for it again."""
    chat_options: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    """What the chat template gets besides the turns, e.g. {'enable_thinking': False}."""
    demonstration: str = ""
    """A right answer in full, as a model would write it; empty where the task has none."""
    hints: tuple[str, ...] = ()
    """From the vaguest to the plainest, each of them whole by itself."""
    feedback: str = ""
    """What a critic says of wrong answers to it, where that is known beforehand."""

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("a query needs a non-empty id: its history is stored under it")


@dataclass(frozen=True, slots=True)
class Context:
    """The prompt a sample was drawn under: the plain query, or the query with something shown beside it.

    That is a past failure (ISR), a hint from the data (SAGE), or a failure of the same step with what was said of it
    (Critique-GRPO).
    """

    kind: ContextKind = "plain"
    shown: int | None = None
    """Buffer id of the past sample that a reflection prompt showed."""

    def __post_init__(self) -> None:
        if self.kind not in CONTEXT_KINDS:
            raise ValueError(f"context kind must be one of {', '.join(CONTEXT_KINDS)}, not {self.kind!r}")
        if self.kind != "reflection" and self.shown is not None:
            raise ValueError(f"a {self.kind} context shows no past sample; use kind='reflection' or shown=None")


PLAIN = Context()


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One response to one query, with all that training on it again may need."""

    query_id: str
    tokens: IntArray
    """Response token ids, the stop token included if there was one. [length]"""
    logprobs: FloatArray
    """Log-probs under the policy, prompt and sampling settings that produced the tokens. [length]"""
    entropies: FloatArray | None = None
    """Entropy of that same next-token distribution at each position; None if the engine cannot tell. [length]"""
    finish: FinishReason = "stop"
    """'stop': ended by itself; 'length': cut by the length limit (truncated)."""
    outcome: bool | None = None
    """True right, False wrong, None not yet verified. Homogeneity is decided on this, never on the reward."""
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=lambda: _EMPTY)
    """What the reward is the sum of, e.g. {'correct': 1.0, 'length': 0.9}."""
    context: Context = PLAIN
    policy_version: int = 0
    """Optimiser updates behind the policy that wrote it; its age is the difference to the current one."""
    step: int = 0
    epoch: int = 1
    text: str | None = None
    """The decoded response; None where only the tokens were kept."""
    verdict: str = ""
    """Why the verifier said right or wrong: a word to count and, on the lines behind it, feedback to read."""
    id: int | None = None
    """The buffer's id, once stored."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # the one place where a frozen sample's fields are normalised
        set_(self, "tokens", _readonly(self.tokens, np.int32, "tokens", self.query_id))
        set_(self, "logprobs", _readonly(self.logprobs, np.float32, "logprobs", self.query_id))
        if self.entropies is not None:
            set_(self, "entropies", _readonly(self.entropies, np.float32, "entropies", self.query_id))
        self._check()

    def _check(self) -> None:
        where = f"sample of query {self.query_id!r}"
        if not self.query_id:
            raise ValueError("a sample needs the id of its query")
        n = len(self.tokens)
        if n == 0:
            raise ValueError(f"{where} has no tokens: even an empty answer ends with a stop token")
        for name, values in (("logprobs", self.logprobs), ("entropies", self.entropies)):
            if values is None:
                continue
            if len(values) != n:
                raise ValueError(f"{where} has {n} tokens but {len(values)} {name}; they must match one to one")
            if not np.isfinite(values).all():
                raise ValueError(f"{where} has NaN or infinite {name}; drop it or fix the engine that made it")
        if self.tokens.min() < 0:
            raise ValueError(f"{where} has a negative token id")
        if not np.isfinite(self.reward):
            raise ValueError(f"{where} has reward {self.reward}; it must be finite")
        if self.finish not in ("stop", "length"):
            raise ValueError(f"{where} has finish {self.finish!r}; it must be 'stop' or 'length'")
        if self.outcome and self.finish == "length":
            raise ValueError(f"{where} is truncated and marked right; a truncated answer cannot be verified")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def truncated(self) -> bool:
        return self.finish == "length"

    @property
    def reason(self) -> str:
        """The verdict's first line."""
        return self.verdict.partition("\n")[0]

    @property
    def feedback(self) -> str:
        """What the verifier has to say besides: the failing test of a program, say."""
        return self.verdict.partition("\n")[2]

    @property
    def fingerprint(self) -> bytes:
        """8 bytes that are equal for equal responses: what 'distinct texts' is decided on."""
        return hashlib.blake2b(self.tokens.tobytes(), digest_size=8).digest()

    @staticmethod
    def trusted(**fields: Any) -> Sample:
        """A sample of fields that were checked before (read back under a checksum, say), without checking them again.

        All fields must be given, the arrays one-dimensional and of the right types; they become read-only.
        """
        sample = object.__new__(Sample)
        for slot in Sample.__slots__:
            value = fields[slot]
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
            object.__setattr__(sample, slot, value)
        return sample

    def with_reward_part(self, name: str, value: float) -> Sample:
        """The same sample with one more part of its reward."""
        return self._with(reward=self.reward + value, reward_parts={**self.reward_parts, name: value})

    def stored_as(self, id: int) -> Sample:
        """The same sample with the id that the buffer gave it."""
        return self._with(id=id)

    def _with(self, **changed: Any) -> Sample:
        return Sample.trusted(**{slot: getattr(self, slot) for slot in Sample.__slots__} | changed)

    def judged(self, outcome: bool, reward: float, verdict: str = "", **parts: float) -> Sample:
        """The same sample with its verdict and reward."""
        return replace(self, outcome=outcome, reward=reward, reward_parts=parts, verdict=verdict)


class Joins(NamedTuple):
    """How past samples of one text fared in replay."""

    times: int
    """How often one of them joined a group."""
    logprobs: FloatArray | None
    """The log-prob of each token under the prompt and the policy that first replayed it, where kept. [length]"""


@dataclass(frozen=True, eq=False)
class Group:
    """The samples drawn for one query under one prompt: the unit of comparison (and of the baseline)."""

    query: Query
    samples: tuple[Sample, ...]
    prompt: IntArray
    """Token ids of the prompt they were drawn under. [prompt length]"""
    context: Context = PLAIN
    plain_prompt: IntArray | None = None
    """For a reflection group: the plain prompt's ids, for training its answers under the plain query."""
    revisited: bool = False
    """Whether the query was asked before its turn (`revisit`)."""
    follows: int | None = None
    """The plain group that this one helps, by its index in the step; None for a group of the first round."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", tuple(self.samples))
        object.__setattr__(self, "prompt", _readonly(self.prompt, np.int32, "prompt", self.query.id))
        if self.plain_prompt is not None:
            plain = _readonly(self.plain_prompt, np.int32, "plain_prompt", self.query.id)
            object.__setattr__(self, "plain_prompt", plain)
        if not self.samples:
            raise ValueError(f"the group of query {self.query.id!r} is empty")
        for sample in self.samples:
            if sample.query_id != self.query.id:
                raise ValueError(f"the group of query {self.query.id!r} holds a sample of query {sample.query_id!r}")
            if sample.context.kind != self.context.kind:
                raise ValueError(
                    f"the {self.context.kind} group of query {self.query.id!r} holds a {sample.context.kind} sample; "
                    "samples drawn under different prompts never share a baseline"
                )

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def outcomes(self) -> tuple[bool, ...]:
        """Right or wrong, sample by sample; refuses a group that was not verified."""
        outcomes = tuple(sample.outcome for sample in self.samples)
        if None in outcomes:
            raise ValueError(f"the group of query {self.query.id!r} holds unverified samples; verify it first")
        return outcomes  # type: ignore[return-value]  # no None is left

    @property
    def solve_none(self) -> bool:
        return not any(self.outcomes)

    @property
    def solve_all(self) -> bool:
        return all(self.outcomes)


def seed_of(name: str) -> int:
    """A 63-bit seed that any change of the name changes, for all that is drawn of a query."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1


def _readonly(values: Any, dtype: type[np.generic], name: str, query_id: str) -> npt.NDArray[Any]:
    """`values` as a read-only 1-D array: no copy where the type already fits, no write-through to the caller's."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} of query {query_id!r} must be one-dimensional, not of shape {array.shape}")
    if dtype is np.int32 and array.dtype.kind not in "iu" and array.size:
        raise ValueError(f"{name} of query {query_id!r} must be integers, not {array.dtype}")
    array = np.ascontiguousarray(array, dtype=dtype).view()
    array.flags.writeable = False
    return array
