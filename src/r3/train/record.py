"""What is kept of a step: its rollouts, a summary of every group, and one line of metrics.

Rollouts are one row per sample, with what R³ did to its group. Whole rows are kept of the first groups only
(`run.rollouts_groups`); summaries, a few hundred bytes each, of all. `TokenTexts` says which characters of a response
each of its tokens wrote, for readers without a tokenizer.

The line of `metrics.jsonl` says what the step did, in plain numbers. All but the names under `seconds/`,
`tokens_per_second` and `memory/` is the same in every run with the same seed.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np

from r3.method.mixed import Member, MixedGroup, Origin, StepResult
from r3.method.ranking import pairs_of_groups
from r3.method.settings import RankingSettings
from r3.policy.update import UpdateReport
from r3.samples import FloatArray, IntArray, Query, Sample
from r3.tasks.settings import TaskSettings
from r3.verify.rewards import OutcomeWatch

MOST_QUESTION = 240
"""Characters of the question and of the reference answer in a summary: enough to recognise them."""


@dataclass(frozen=True)
class StepNotes:
    """What the rows have besides the result: how far the policy had moved, and what reflection prompts show."""

    log_ratios: Mapping[tuple[int, int], FloatArray] = field(default_factory=dict)
    """Per token log π/π_behave at the update, by group and member, of those trained under the prompt they were drawn
    under."""
    shown: Mapping[int, Sample] = field(default_factory=dict)
    """The past attempts that reflection prompts show, by their id in the buffer."""


def rollout_rows(
    result: StepResult, tokenizer: Any, groups: int, notes: StepNotes | None = None
) -> Iterator[dict[str, Any]]:
    """The samples of the first `groups` groups, fresh ones first, then the replayed ones."""
    texts = TokenTexts(tokenizer)
    notes = notes or StepNotes()
    for number, mixed in enumerate(result.groups[:groups]):
        prompt = tokenizer.decode(mixed.group.prompt.tolist())
        attempt = _attempt(mixed, texts, notes)
        for index in range(len(mixed.members)):
            row = {
                "group": number,
                "prompt": prompt,
                **_row(mixed, index, texts, notes.log_ratios.get((number, index))),
            }
            yield {**row, **attempt} if index == 0 else row


def _row(mixed: MixedGroup, index: int, texts: TokenTexts, log_ratios: FloatArray | None) -> dict[str, Any]:
    member, joined = mixed.members[index], index >= len(mixed.group)
    sample = member.sample
    text = sample.text if sample.text is not None else texts.decode(sample.tokens)
    return {
        "query": sample.query_id,
        "context": mixed.group.context.kind,
        "shown": mixed.group.context.shown,
        "origin": member.origin if joined else "fresh",
        "drawn_in": sample.context.kind,
        "replay": mixed.replay,
        "id": sample.id,
        "step": sample.step,
        "epoch": sample.epoch,
        "policy_version": sample.policy_version,
        "response": text,
        "tokens": sample.tokens.tolist(),
        "widths": texts.widths(sample.tokens, text),
        "logprobs": [round(float(x), 5) for x in sample.logprobs],
        "entropies": _rounded(sample.entropies),
        "ratios": None if log_ratios is None else np.exp(log_ratios, dtype=np.float64).round(4).tolist(),
        "finish": sample.finish,
        "outcome": sample.outcome,
        "verdict": sample.verdict,
        "reward": member.reward,
        "reward_parts": dict(sample.reward_parts),
        "advantage": member.advantage,
        "token_advantages": _rounded(member.token_advantages),
    }


def _rounded(values: FloatArray | None) -> list[float] | None:
    return None if values is None else [round(float(x), 5) for x in values]


def _attempt(mixed: MixedGroup, texts: TokenTexts, notes: StepNotes) -> dict[str, Any]:
    """The attempt that a reflection prompt shows, for the first row of its group."""
    shown = mixed.group.context.shown
    sample = notes.shown.get(shown) if shown is not None else None
    if sample is None:
        return {}
    text = texts.decode(sample.tokens)
    return {"attempt": {"id": shown, "step": sample.step, "verdict": sample.verdict, "response": text}}


def group_summaries(result: StepResult) -> list[dict[str, Any]]:
    """A summary of every group of the step: the rows without their texts and per-token numbers."""
    return [_summary(mixed) for mixed in result.groups]


def _summary(mixed: MixedGroup) -> dict[str, Any]:
    samples = [member.sample for member in mixed.members]
    return {
        "query": mixed.group.query.id,
        "question": question(mixed.group.query)[:MOST_QUESTION],
        "answer": mixed.group.query.answer[:MOST_QUESTION],
        "context": mixed.group.context.kind,
        "shown": mixed.group.context.shown,
        "replay": mixed.replay,
        "fresh": len(mixed.group),
        "origins": [member.origin for member in mixed.joined],
        "epoch": mixed.group.samples[0].epoch,
        "ids": [s.id for s in samples],
        "steps": [s.step for s in samples],
        "versions": [s.policy_version for s in samples],
        "outcomes": [s.outcome for s in samples],
        "truncated": [int(s.truncated) for s in samples],
        "lengths": [len(s) for s in samples],
        "rewards": [round(float(m.reward), 5) for m in mixed.members],
        "ranking": [_ranking(m) for m in mixed.members],
        "advantages": [round(float(m.advantage), 5) for m in mixed.members],
    }


def _ranking(member: Member) -> float | None:
    """What SERR paid in this group; a replayed sample may carry what another group once paid it."""
    paid = None if member.origin == "replayed" else member.sample.reward_parts.get("ranking")
    return None if paid is None else round(float(paid), 5)


def question(query: Query) -> str:
    """What the query asks: its text, or the last user turn of its chat."""
    if isinstance(query.prompt, str):
        return query.prompt
    turns: Sequence[str] = [turn.content for turn in query.prompt if turn.role == "user"]
    return turns[-1] if turns else ""


_UNFINISHED = "\ufffd"
"""What a tokenizer makes of bytes that are not yet a character."""


class TokenTexts:
    """A tokenizer's texts of single tokens, each asked for once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._texts: dict[int, str] = {}
        # Some decoders drop a leading space: a token's own text is what it adds behind another one.
        self._before: list[int] = list(tokenizer.encode("a", add_special_tokens=False))[-1:]
        self._before_text: str = tokenizer.decode(self._before)

    def decode(self, tokens: IntArray) -> str:
        """The response's text."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def widths(self, tokens: IntArray, text: str) -> list[int] | None:
        """How many characters of `text` each token wrote: 0 for special tokens and for the first bytes of a character.

        None where the text is not what the tokens say one by one (a tokenizer that cleans up after itself).
        """
        widths: list[int] = []
        waiting: list[int] = []
        at = 0
        for token in tokens.tolist():
            written = "" if token in self._special else self._text(token)
            if waiting or _UNFINISHED in written:
                waiting.append(token)
                written = self._tokenizer.decode(waiting)
                if _UNFINISHED in written and len(waiting) < 4:  # no character has more bytes
                    widths.append(0)
                    continue
                waiting = []
            if not text.startswith(written, at):
                return None
            widths.append(len(written))
            at += len(written)
        return widths if at == len(text) or text[at:] == _UNFINISHED * (len(text) - at) else None

    def _text(self, token: int) -> str:
        known = self._texts.get(token)
        if known is None:
            after = str(self._tokenizer.decode([*self._before, token]))
            follows = after.startswith(self._before_text)
            known = after[len(self._before_text) :] if follows else str(self._tokenizer.decode([token]))
            self._texts[token] = known
        return known


ORIGINS: tuple[Origin, ...] = get_args(Origin)
FAILURES = ("timeout", "memory", "crashed", "error")
"""Verdicts that are failures of the verifier, not of the answer."""
MOST_FAILURES = 0.01
"""Warn if the verifier fails on more than this share of a step's answers."""


def alarms(metrics: Mapping[str, float], answers: int) -> list[str]:
    """Warnings about a step: answers that count as wrong although nobody judged them wrong.

    >>> alarms({"verify/timeout": 2}, 300)
    []
    >>> alarms({"verify/timeout": 4}, 300)[0][:64]
    'the verifier gave up on 4 of 300 answers (timeout), which count '
    """
    return [
        f"the verifier gave up on {count:.0f} of {answers} answers ({reason}), which count as wrong: "
        "if the machine is not overloaded, see docs/verifier.md"
        for reason in FAILURES
        if (count := metrics.get(f"verify/{reason}", 0)) > MOST_FAILURES * answers
    ]


class NeverRight:
    """Warns once if the user's function that says right or wrong never says right, though answers differ in worth."""

    def __init__(self, task: TaskSettings) -> None:
        decides = task.decides
        scored = decides is not None and decides.function != "correct" and decides.weight != 0
        self._decides = decides if scored else None
        name = "" if decides is None else decides.called
        self._watch = OutcomeWatch(name, task.right_above, threshold="task.right_above", outcome="task.outcome")

    def alarms(self, result: StepResult) -> list[str]:
        """The warning, in the step where it is time."""
        decides = self._decides
        if decides is None:
            return []
        scored = [sample for sample in result.samples if decides.called in sample.reward_parts]
        warning = self._watch.see(
            [sample.reward_parts[decides.called] / decides.weight for sample in scored],
            [sample.reward for sample in scored],
            [bool(sample.outcome) for sample in scored],
        )
        return [] if warning is None else [warning]


def step_metrics(
    result: StepResult,
    report: UpdateReport,
    seconds: Mapping[str, float],
    reflections: Mapping[str, int],
    failed: Mapping[str, int] | None = None,
) -> dict[str, float]:
    """All metrics of a step; `failed` counts the answers on which a reward function failed in its cage, by its name."""
    fresh = result.samples
    plain = [s for s in fresh if s.context.kind == "plain"]
    reflected = [s for s in fresh if s.context.kind == "reflection"]
    counts = result.counts
    groups = max(1.0, counts["groups/plain"])
    tokens = sum(len(s) for s in fresh)
    return {
        "accuracy": _mean(s.outcome for s in plain),
        "accuracy/reflection": _mean(s.outcome for s in reflected),
        **_lift(plain, reflected),
        **_successes(result),
        "reward": _mean(s.reward for s in fresh),
        **{f"reward/{part}": _mean(s.reward_parts.get(part, 0.0) for s in fresh) for part in _parts(fresh)},
        **{f"reward/{name}/failed": count for name, count in sorted((failed or {}).items())},
        "solve_none": counts["groups/solve_none"] / groups,
        "solve_all": counts["groups/solve_all"] / groups,
        "truncated": _mean(s.truncated for s in fresh),
        "entropy": _mean_entropy(fresh),
        "length/mean": _mean(len(s) for s in fresh),
        "length/max": max((len(s) for s in fresh), default=0),
        **{f"verify/{reason}": sum(s.reason == reason for s in fresh) for reason in FAILURES},
        "tokens/generated": tokens,
        "tokens/trained": report.tokens,
        **counts,
        **{f"reflection/{reason}": count for reason, count in sorted(reflections.items())},
        "update/count": report.updates,
        "update/skipped": report.skipped,
        "update/loss": _mean(report.losses),
        "update/grad_norm": _mean(report.grad_norms),
        "update/learning_rate": report.learning_rate,
        "update/entropy": report.entropy,
        "update/microbatches": report.microbatches,
        **{f"update/{name}": value for name, value in report.diagnostics.items()},
        **{f"seconds/{stage}": value for stage, value in seconds.items()},
        "tokens_per_second": tokens / max(1e-9, seconds["step"]),
        "memory/peak_gb": peak_memory_gb(),
    }


def _lift(plain: Sequence[Sample], reflected: Sequence[Sample]) -> dict[str, float]:
    """What a shown failure adds: right answers per token, and plain answers to the queries that were reflected on."""
    asked_twice = {sample.query_id for sample in reflected}
    same = [sample for sample in plain if sample.query_id in asked_twice]
    return {
        "lift/plain": _mean(sample.outcome for sample in same),
        **_tried("plain", same),
        **_tried("reflection", reflected),
        "lift/right_per_1k_tokens/plain": _right_per_1k(same),
        "lift/right_per_1k_tokens/reflection": _right_per_1k(reflected),
        "tokens/reflection": sum(map(len, reflected)),
    }


def _tried(kind: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Counts to be summed over steps, since one step has few: a mean of their shares would weigh empty steps."""
    return {f"lift/tried/{kind}": len(samples), f"lift/right/{kind}": sum(bool(sample.outcome) for sample in samples)}


def _successes(result: StepResult) -> dict[str, float]:
    """Where a step's right answers come from, and what those that were generated cost; replayed ones cost no token."""
    members = [member for mixed in result.groups for member in mixed.members]
    drawn = {origin: [m.sample for m in members if m.origin == origin] for origin in ORIGINS}
    return {
        **{f"successes/{origin}": sum(bool(s.outcome) for s in samples) for origin, samples in drawn.items()},
        "yield/plain": _right_per_1k(drawn["fresh"]),
        "yield/reflection": _right_per_1k(drawn["reflection"]),
    }


def ranking_metrics(result: StepResult, limit: int, settings: RankingSettings) -> dict[str, float]:
    """Whether SERR's order at half the length limit tells which of a query's answers finish right (AUC; 0.5: no).

    A step has few such pairs: sum `ranking/pairs_in_order` and `ranking/pairs` over many before believing it.
    """
    groups = pairs_of_groups((m.group for m in result.groups), limit=limit, peak_fraction=settings.peak_fraction)
    in_order, pairs = sum(ordered for ordered, _ in groups), sum(of for _, of in groups)
    auc = in_order / pairs if pairs else float("nan")
    return {"ranking/auc": auc, "ranking/pairs_in_order": in_order, "ranking/pairs": pairs}


def _right_per_1k(samples: Sequence[Sample]) -> float:
    tokens = sum(map(len, samples))
    return 1000 * sum(bool(sample.outcome) for sample in samples) / tokens if tokens else float("nan")


def _parts(samples: Sequence[Sample]) -> list[str]:
    return sorted({"ranking"} | {part for s in samples for part in s.reward_parts})


def _mean(values: Iterable[float | bool | None]) -> float:
    numbers = [float(value) for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else float("nan")


def _mean_entropy(samples: Sequence[Sample]) -> float:
    known = [s.entropies for s in samples if s.entropies is not None]
    return float(np.concatenate(known).mean(dtype=np.float64)) if known else float("nan")


def peak_memory_gb() -> float:
    """Peak memory: of the card if there is one, else of this process."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated()) / 1e9
    # Linux hands the peak of getrusage on to whoever a large process starts; that of /proc is this process's own.
    status = Path("/proc/self/status")
    peaks = re.findall(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE) if status.exists() else []
    if peaks:
        return int(peaks[0]) * 1024 / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
