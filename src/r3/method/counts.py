"""How often each mechanism acted in a step, for the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

import numpy as np

from r3.method.help import Demonstrations, Help
from r3.method.mixed import MixedGroup, WeightedSample
from r3.method.replay import ReplayReason


def step_counts(mixed: Sequence[MixedGroup], weighted: Sequence[WeightedSample], version: int) -> dict[str, float]:
    """How often each mechanism acted, and why not where it did not."""
    reasons = Counter(m.replay for m in mixed)
    plain = [m for m in mixed if m.group.context.kind == "plain"]
    ages = [version - s.policy_version for m in mixed for s in m.replayed]
    counts: dict[str, float] = {
        "groups": len(mixed),
        "groups/plain": len(plain),
        "groups/reflection": sum(m.group.context.kind == "reflection" for m in mixed),
        "groups/solve_none": sum(m.group.solve_none for m in plain),
        "groups/solve_all": sum(m.group.solve_all for m in plain),
        "groups/teaching": sum(m.teaches for m in mixed),
        "replay/samples": len(ages),
        "replay/cross_context": sum(s.context.kind != "plain" for m in mixed for s in m.replayed),
        "replay/at_once": sum(s.step == m.group.samples[0].step for m in mixed for s in m.replayed),
        "replay/age_mean": float(np.mean(ages)) if ages else 0.0,
        "replay/age_max": max(ages, default=0),
        "homogeneous/groups": sum(m.by_itself for m in mixed),
        "ranking/groups": sum(m.ranked > 0 for m in mixed),
        "ranking/samples": sum(m.ranked for m in mixed),
        "reflection/solved": sum(any(m.group.outcomes) for m in mixed if m.group.context.kind == "reflection"),
        "samples/trained": len(weighted),
        "samples/skipped": sum(not member.teaches for m in mixed for member in m.members),
    }
    for reason in get_args(ReplayReason):
        counts[f"replay/{reason}"] = reasons[reason]
    return counts


def help_counts(mixed: Sequence[MixedGroup], help: Help, demonstrations: Demonstrations) -> dict[str, float]:
    """How often groups were helped, and with what success."""
    hinted = [m for m in mixed if m.group.context.kind == "hint"]
    refined = [m.group.outcomes for m in mixed if m.group.context.kind == "critique"]
    joined = Counter(member.origin for m in mixed for member in m.joined)
    return {
        "groups/hint": len(hinted),
        "hint/queries": len({m.group.follows for m in hinted}),
        "hint/solved": len(help.replaced),
        "groups/critique": len(refined),
        "critique/right": sum(map(any, refined)),
        "critique/joined": joined["critique"],
        "demonstration/joined": joined["demonstration"],
        "demonstration/wrong": sum(not sample.outcome for sample in demonstrations.values()),
    }
