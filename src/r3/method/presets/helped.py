"""Methods that give a policy what it cannot find: a demonstration, a hint, or a critique of what it wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r3.method.presets.base import PLAIN, MethodName, Preset

UNCLIPPED: Mapping[str, Any] = {
    "name": "reinforce",
    "ratio_gate": None,
    "shaping": {"by": "policy", "beta": 0.1},
}
"""Fresh tokens by their ratio without a clip, what joined by x/(x + β) of its probability; sums over the limit."""

HELPED: Mapping[MethodName, Preset] = {
    "luffy": Preset(
        "a demonstration joins every group as if drawn with probability 1; its rare tokens are pulled the hardest",
        "arXiv 2504.14945; ElliottYan/LUFFY luffy/verl/verl/mix_src/mix_core_alg.py",
        {
            **PLAIN,
            "advantage": {"scale": "none"},
            "demonstration": {"enabled": True, "when": "always", "trusted": False},
            "objective": UNCLIPPED,
        },
        needs="demonstrations (task.demonstration_column, or a made task's own)",
        departures=(
            "the demonstration comes beside the group's answers, not in the place of one (rollout.group_size=7 makes "
            "the published group of 8); the judge must find it right, unless demonstration.trusted; one longer than "
            "rollout.max_tokens stays out; the baseline is over all, never over fresh answers alone; no entropy bonus"
        ),
    ),
    "sage": Preset(
        "queries that nobody solved are asked again with a hint, a plainer one if need be, and trained under it",
        "arXiv 2602.03143; BaohaoLiao/SAGE recipe/hint/hint_trainer.py",
        {
            **PLAIN,
            "objective": {"name": "dapo", "dual_clip": 3.0},
            "hint": {"enabled": True, "levels": None, "from_step": 1},
        },
        needs="hints (task.hint_column, or a made task's own), further rollouts for failed groups",
        departures=(
            "hints are the data's, where theirs are written by the policy itself from the reference solution; a "
            "hinted group takes the plain one's place only if it solved some, else the plain one stays; its light "
            "variant, which starts at the level that fits the last epoch's accuracy, is not here; the token mean is "
            "the batch's"
        ),
    ),
    "critique": Preset(
        "failures are shown with the right answer, and the first right refinement joins its group, plain prompt above",
        "arXiv 2506.03106; zhangxy-2019/critique-GRPO verl/verl/critique_grpo",
        {
            **PLAIN,
            "advantage": {"scale": "none"},
            "critique": {"enabled": True, "feedback": "gold", "when": "solve_none", "attempts": None, "joins": 1},
            "objective": UNCLIPPED,
        },
        needs="gold answers (or critique.feedback=verdict, or a column), an answer more for each failure",
        departures=(
            "groups that solved none alone, as the paper's text has it (critique.when=failures: wrong answers of "
            "every group; its code refines right ones too); the refinement comes beside the group's answers, not in "
            "the place of one (rollout.group_size=7 makes the published group of 8); a wrong one never joins, where "
            "theirs takes the best; no critiques by another model but those of a column; no entropy bonus"
        ),
    ),
}
