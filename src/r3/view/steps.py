"""The saved rollouts of a run: tables of a step's groups, and one group and one sample in full.

A table and a single group are read without reading the others. A sample in full has its text, its per-token numbers,
the ranking's order, and the attempt that was shown.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from r3.errors import NotThere
from r3.method.ranking import dominance_scores, structure
from r3.run.rollouts import Contents, Rollouts

if TYPE_CHECKING:
    from r3.view.runs import ViewedRun

KEPT_TABLES = 16
"""Tables of steps kept in memory: about half a megabyte each at 2,048 samples per step."""


class StepTables:
    """Tables of contents by step, the last few of them remembered."""

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        self._turn = threading.Lock()
        self._tables: OrderedDict[int, tuple[tuple[int, int], Contents]] = OrderedDict()
        self._listed: tuple[int, list[int]] = (-1, [])

    def steps(self) -> list[int]:
        """The steps with saved rollouts."""
        try:
            changed = os.stat(self.rollouts.folder).st_mtime_ns
        except OSError:
            return []
        if changed != self._listed[0]:
            self._listed = (changed, self.rollouts.steps())
        return self._listed[1]

    def stamp(self, step: int) -> tuple[int, int]:
        """Time and size of the step's file, which change when it is written again."""
        try:
            status = os.stat(self.rollouts.path(step))
        except OSError as error:
            raise NotThere(self._missing(step)) from error
        return status.st_mtime_ns, status.st_size

    def table(self, step: int) -> Contents:
        """The groups of a step; `NotThere` if none were saved, `RunError` if the file is damaged."""
        stamp = self.stamp(step)
        with self._turn:
            known = self._tables.get(step)
            if known is not None and known[0] == stamp:
                self._tables.move_to_end(step)
                return known[1]
        table = self.read(step)
        with self._turn:
            self._tables[step] = (stamp, table)
            while len(self._tables) > KEPT_TABLES:
                self._tables.popitem(last=False)
        return table

    def read(self, step: int) -> Contents:
        """The same, always read from the file."""
        contents = self.rollouts.contents(step)
        if contents is not None:
            return contents
        # An older file has no table. Its rows, which may fill hundreds of megabytes, are read one by one.
        summaries = [summary(list(rows)) for _, rows in groupby(self.rollouts.read(step), lambda row: row.get("group"))]
        return Contents(summaries, [None] * len(summaries))

    def rows(self, step: int, group: int) -> list[dict[str, Any]]:
        """The saved rows of a group; none where only its summary was kept."""
        table = self.table(step)
        if not 0 <= group < len(table.summaries):
            raise NotThere(f"step {step} has {len(table.summaries)} groups, numbered from 0; there is no group {group}")
        place = table.places[group]
        if place is not None:
            return self.rollouts.read_group(step, place)
        if any(table.places) or self.rollouts.contents(step) is not None:
            return []
        return [row for row in self.rollouts.read(step) if row.get("group") == group]

    def search(self, step: int, text: str) -> list[int]:
        """The groups of a step with `text` in a prompt or a response, ignoring case."""
        wanted = text.casefold()
        table = self.table(step)
        matching = []
        for group, place in enumerate(table.places):
            about = table.summaries[group]
            named = wanted in f"{about.get('query')}\n{about.get('question')}".casefold()
            if named or (place is not None and self._holds(step, place, text)):
                matching.append(group)
        if not any(table.places):  # an older file, or one without rows
            matching += [row.get("group", 0) for row in self.rollouts.read(step) if _in_row(row, wanted)]
        return sorted(set(matching))

    def _holds(self, step: int, place: tuple[int, int], text: str) -> bool:
        raw = self.rollouts.read_bytes(step, place)
        # Searching the raw bytes is far quicker than decoding them. Only ASCII is written as it is.
        if text.isascii() and json.dumps(text)[1:-1].lower().encode() not in raw.lower():
            return False
        return any(_in_row(row, text.casefold()) for row in self.rollouts.read_group(step, place))

    def _missing(self, step: int) -> str:
        steps = self.steps()
        kept = f"they are kept of {len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else "none are kept at all"
        return f"no rollouts were saved for step {step}; {kept} (run.rollouts_every)"


def _in_row(row: dict[str, Any], wanted: str) -> bool:
    return wanted in str(row.get("response", "")).casefold() or wanted in str(row.get("prompt", "")).casefold()


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A group's summary made from its rows, as `r3.train.record` writes it into tables; for files without one."""
    first = rows[0]
    return {
        "query": str(first.get("query", "?")),
        "question": str(first.get("prompt", ""))[:240],
        "context": first.get("context", "plain"),
        "shown": plain(first.get("shown")),
        "replay": first.get("replay", "off"),
        "fresh": sum(row.get("origin", "fresh") == "fresh" for row in rows),
        "origins": [row["origin"] for row in rows if row.get("origin", "fresh") != "fresh"],
        "epoch": plain(first.get("epoch")),
        "ids": [plain(row.get("id")) for row in rows],
        "steps": [plain(row.get("step")) for row in rows],
        "versions": [plain(row.get("policy_version")) for row in rows],
        "outcomes": [plain(row.get("outcome")) for row in rows],
        "truncated": [int(row.get("finish") == "length") for row in rows],
        "lengths": [len(row.get("tokens") or ()) for row in rows],
        "rewards": [_rounded(row.get("reward")) for row in rows],
        "ranking": [_paid(row) for row in rows],
        "advantages": [_rounded(row.get("advantage")) for row in rows],
    }


def origin_of(about: dict[str, Any], sample: int) -> str:
    """Where an answer that joined its group comes from; in runs of earlier versions replay was the only place."""
    origins, joined = about.get("origins") or [], sample - about["fresh"]
    return str(origins[joined]) if 0 <= joined < len(origins) else "replayed"


def _paid(row: dict[str, Any]) -> float | None:
    fresh = row.get("origin", "fresh") == "fresh"
    return _rounded((row.get("reward_parts") or {}).get("ranking")) if fresh else None


def plain(value: Any) -> Any:
    """The value with None for NaN, which is how the run's reader returns `null`."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _rounded(value: Any) -> float | None:
    value = plain(value)
    return None if value is None else round(float(value), 5)


# -------------------------------------------------------- one group, one sample


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
