"""What groups without variance teach by themselves, by past answers, or by a teacher."""

from __future__ import annotations

from collections.abc import Mapping

from r3.method.presets.base import PLAIN, MethodName, Preset

REMEDIES: Mapping[MethodName, Preset] = {
    "rl-zvp": Preset(
        "groups all right or all wrong teach by themselves: sign by outcome, size by each token's entropy",
        "arXiv 2509.21880, Eq. 5",
        {**PLAIN, "objective": {"name": "dapo"}, "advantage": {"homogeneous": "zvp"}},
        needs="entropies (a forward pass more where the engine gives none)",
        departures=(
            "no code of the authors' is known: clip 0.2/0.28 is a re-implementation's, the token mean is DAPO's; "
            "entropies are those at sampling time, the current ones with one update per batch"
        ),
    ),
    "lens": Preset(
        "a wrong answer costs more the surer the policy was of it, so that all-wrong groups have a spread",
        "arXiv 2510.08696",
        {**PLAIN, "objective": {"name": "grpo"}, "advantage": {"homogeneous": "lens"}},
        needs="sampling at temperature 1 without top-p and top-k",
        departures=(
            "no code of the authors' is known; the importance term uses an answer's geometric mean probability where "
            "the paper writes its probability; the weight of all-wrong groups (0.25) multiplies their advantages"
        ),
    ),
    "w-reinforce": Preset(
        "no baseline: a right answer gets 0.1, a wrong one −1, so that learning is mostly from failures",
        "arXiv 2506.01347; TianHongZXY/RLVR-Decomposed",
        {
            **PLAIN,
            "objective": {"name": "grpo", "normalise": "token"},
            "advantage": {"scale": "none", "baseline": "sign"},
        },
        departures=(
            "no entropy bonus (theirs: 0.001); with advantage.right_weight=0 (NSR) right answers leave the loss but "
            "not its denominator"
        ),
    ),
    "repo": Preset(
        "past answers of a query, right and wrong, are trained on beside the fresh ones, compared among themselves",
        "arXiv 2506.09340; SihengLi99/RePO src/replay_grpo_trainer.py",
        {
            **PLAIN,
            "replay": {
                "enabled": True,
                "when": "always",
                "mode": "join",
                "baseline": "split",
                "k": 8,
                "order": "highest_reward",
                "candidates": 16,
                "min_history": 16,
                "distinct": False,
                "failures": True,
            },
            "objective": {"name": "grpo", "correction": "naive", "dual_clip": None, "ratio_gate": None},
        },
        needs="a buffer on disk",
        departures=(
            "the history is a query's newest 16 samples, whole steps old; buffer.per_query may keep more; no KL "
            "penalty (theirs is on fresh samples alone, with weight 0); of their orders, the highest reward first is "
            "set, replay.order=max_variance and newest are there too"
        ),
    ),
    "rlep": Preset(
        "two past successes join every group, as if the policy had just drawn them; best with those of an earlier run",
        "arXiv 2507.07451; Kwai-Klear/RLEP recipe/rlep",
        {
            **PLAIN,
            "replay": {
                "enabled": True,
                "when": "always",
                "mode": "join",
                "baseline": "joint",
                "k": 2,
                "order": "random",
                "candidates": 64,
                "min_history": 1,
                "distinct": True,
                "failures": False,
            },
            "objective": {"name": "dapo", "correction": "recomputed", "ratio_gate": None},
        },
        needs="an earlier run (buffer.successes_from), else it replays its own successes",
        departures=(
            "the earlier run's successes are those of its training, not 64 samples of a checkpoint; the run's own "
            "successes join the pool, newest first; a query with a single success replays that one, one without none "
            "(theirs pads with empty answers); the token mean is the batch's"
        ),
    ),
    "exgrpo": Preset(
        "half of a batch from a pool of partly solved queries, each with its surest past success for a fresh answer",
        "arXiv 2510.02245; ElliottYan/LUFFY ExGRPO",
        {
            **PLAIN,
            "advantage": {"scale": "none"},
            "revisit": {
                "enabled": True,
                "share": 0.5,
                "weights": "gaussian",
                "sigma": 1.0,
                "min_rate": 0.0,
                "max_rate": 1.0,
                "cooldown": 0,
                "max_reuse": None,
                "start_at": 0.35,
                "retire": True,
            },
            "replay": {
                "enabled": True,
                "when": "revisited",
                "mode": "replace",
                "baseline": "joint",
                "k": 1,
                "order": "lowest_entropy",
                "candidates": 64,
                "min_history": 1,
                "distinct": True,
                "failures": False,
            },
            "objective": {"name": "reinforce", "ratio_gate": None, "shaping": {"by": "ratio", "beta": 0.1}},
        },
        needs="a buffer on disk, entropies",
        departures=(
            "entropies are those at sampling time, not the current policy's; successes of before the start may be "
            "replayed too; the answer whose place is taken is generated all the same; no entropy bonus, no clip before "
            "the start either. Where 0.35 of a batch are never right it never starts: revisit.start_at=null begins at "
            "once"
        ),
    ),
    "sdpo": Preset(
        "the policy that sees a right answer of the group, or a past one, teaches the one that does not, by token",
        "arXiv 2601.20802; lasgroup/SDPO; TRL experimental/sdpo (sampled tokens, α = 1)",
        {
            **PLAIN,
            "objective": {"name": "cispo", "clip_high": 1.0},
            "distill": {"enabled": True, "weight": 1.0},
        },
        needs="one more forward pass per answer, a buffer on disk; all-wrong queries without history need feedback",
        departures=(
            "sampled tokens alone, α = 1 (theirs: top 100 and a rest, α = 0.5); the teacher is the live policy, not a "
            "moving average; past successes teach all-wrong groups, which it lacks (distill.history=false leaves them "
            "out); no rollout correction"
        ),
    ),
}
