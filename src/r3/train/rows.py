"""Rows of a step's saved rollouts: one a sample, with what R³ did to its group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from r3.method.step import MixedGroup, StepResult
from r3.samples import Sample


def rollout_rows(result: StepResult, tokenizer: Any, groups: int) -> Iterator[dict[str, Any]]:
    """The samples of the first `groups` groups, fresh ones first, then the replayed ones."""
    for number, mixed in enumerate(result.groups[:groups]):
        prompt = tokenizer.decode(mixed.group.prompt.tolist())
        for index, sample in enumerate(mixed.members):
            yield {"group": number, "prompt": prompt, **_row(mixed, index, sample, tokenizer)}


def _row(mixed: MixedGroup, index: int, sample: Sample, tokenizer: Any) -> dict[str, Any]:
    replayed = index >= len(mixed.group)
    text = (
        sample.text if sample.text is not None else tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True)
    )
    return {
        "query": sample.query_id,
        "context": mixed.group.context.kind,
        "shown": mixed.group.context.shown,
        "origin": "replayed" if replayed else "fresh",
        "replay": mixed.replay.reason,
        "id": sample.id,
        "step": sample.step,
        "policy_version": sample.policy_version,
        "response": text,
        "tokens": sample.tokens.tolist(),
        "logprobs": [round(float(x), 5) for x in sample.logprobs],
        "entropies": None if sample.entropies is None else [round(float(x), 5) for x in sample.entropies],
        "finish": sample.finish,
        "outcome": sample.outcome,
        "verdict": sample.verdict,
        "reward": mixed.rewards[index],
        "reward_parts": dict(sample.reward_parts),
        "advantage": mixed.advantages[index],
    }
