"""One group and one sample in full: texts, per-token numbers, the ranking's order, the attempt that was shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from r3.errors import NotThere
from r3.method.ranking import dominance_scores, structure
from r3.view.runs import ViewedRun
from r3.view.steps import plain

_PREVIEW = 280
_DIGITS = 5


def group_view(run: ViewedRun, step: int, group: int) -> dict[str, Any]:
    """A group with its samples, but without their per-token numbers."""
    table = run.tables.table(step)
    rows = run.tables.rows(step, group)
    about = table.summaries[group]
    shown = rows[0].get("attempt") if rows else None
    return {
        "step": step,
        "group": group,
        "groups": len(table.summaries),
        "summary": about,
        "kept": bool(rows),
        "prompt": rows[0].get("prompt", "") if rows else about.get("question", ""),
        "attempt": shown or _unseen_attempt(about),
        "samples": [_sample(row) for row in rows],
        "ranking": ranking(rows, run.about()["peak_fraction"]),
    }


def sample_view(run: ViewedRun, step: int, group: int, sample: int) -> dict[str, Any]:
    """One sample with everything that was saved of it."""
    rows = run.tables.rows(step, group)
    if not rows:
        raise NotThere(
            f"only a summary was saved of group {group} of step {step}: raise run.rollouts_groups to keep more in full"
        )
    if not 0 <= sample < len(rows):
        raise NotThere(f"group {group} of step {step} has {len(rows)} samples, numbered from 0; there is no {sample}")
    row = rows[sample]
    entropies = _numbers(row.get("entropies"))
    return {
        **_sample(row),
        "response": str(row.get("response", "")),
        "pieces": pieces(row),
        "tokens": row.get("tokens") or [],
        "entropies": entropies,
        "logprobs": _numbers(row.get("logprobs")),
        "ratios": _numbers(row.get("ratios")),
        "peaks": peaks(entropies, run.about()["peak_fraction"]) if entropies else [],
    }


def pieces(row: dict[str, Any]) -> list[str] | None:
    """The text of each token; None where the rows do not tell (older runs, tokenizers that clean up spaces)."""
    text, tokens = str(row.get("response", "")), row.get("tokens") or []
    widths = row.get("widths")
    if not isinstance(widths, list) or len(widths) != len(tokens):
        return None
    ends = np.cumsum(widths).tolist()
    return [text[end - width : end] for end, width in zip(ends, widths, strict=True)]


def peaks(entropies: Sequence[float], peak_fraction: float) -> list[int]:
    """Positions of the tokens that peak entropy is the mean over: the max(1, ⌊p·L⌋) with the highest entropy."""
    k = max(1, int(peak_fraction * len(entropies)))
    order = np.argsort(-np.asarray(entropies), kind="stable")
    return sorted(int(i) for i in order[:k])


def ranking(rows: Sequence[dict[str, Any]], peak_fraction: float) -> dict[str, Any] | None:
    """Peak and global entropy of every fresh sample, and the dominance order of those that SERR ranked."""
    known = [i for i, row in enumerate(rows) if _numbers(row.get("entropies"))]
    fresh = [i for i in known if rows[i].get("origin", "fresh") == "fresh"]
    if not fresh:
        return None
    peaks_N, globals_N = structure([rows[i]["entropies"] for i in fresh], peak_fraction=peak_fraction)
    places = {i: (float(peak), float(mean)) for i, peak, mean in zip(fresh, peaks_N, globals_N, strict=True)}
    ranked = [i for i in fresh if "ranking" in (rows[i].get("reward_parts") or {})]
    chosen = np.array([fresh.index(i) for i in ranked], dtype=np.int64)
    scores = dict(zip(ranked, dominance_scores(peaks_N[chosen], globals_N[chosen]).tolist(), strict=True))
    beats = [[i, j] for i in ranked for j in ranked if places[i][0] > places[j][0] and places[i][1] < places[j][1]]
    order = sorted(ranked, key=lambda i: -scores[i])
    points = [
        {
            "sample": i,
            "peak": round(places[i][0], _DIGITS),
            "global": round(places[i][1], _DIGITS),
            "score": scores.get(i),
            "rank": order.index(i) if i in scores else None,
            "reward": plain((rows[i].get("reward_parts") or {}).get("ranking")),
        }
        for i in fresh
    ]
    return {"peak_fraction": peak_fraction, "points": points, "beats": beats}


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    text = str(row.get("response", ""))
    return {
        "origin": row.get("origin", "fresh"),
        "drawn_in": row.get("drawn_in", row.get("context", "plain")),
        "id": plain(row.get("id")),
        "step": plain(row.get("step")),
        "policy_version": plain(row.get("policy_version")),
        "preview": text[:_PREVIEW],
        "length": len(row.get("tokens") or ()),
        "finish": row.get("finish"),
        "outcome": plain(row.get("outcome")),
        "verdict": str(row.get("verdict", "")),
        "reward": plain(row.get("reward")),
        "reward_parts": {name: plain(value) for name, value in (row.get("reward_parts") or {}).items()},
        "advantage": plain(row.get("advantage")),
        "trained": isinstance(row.get("ratios"), list),
    }


def _unseen_attempt(about: dict[str, Any]) -> dict[str, Any] | None:
    """The attempt of a reflection group where only its number was saved."""
    shown = about.get("shown")
    return None if shown is None else {"id": shown, "step": None, "verdict": "", "response": None}


def _numbers(values: Any) -> list[float]:
    """A list of numbers; empty where an older run has none."""
    return [float(value) for value in values] if isinstance(values, list) else []
