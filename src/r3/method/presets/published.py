"""The methods of others: trainers without a remedy, and those that choose or fill the batch (`BASELINES`); what groups
without variance teach by themselves, by past answers, or by a teacher (`REMEDIES`); methods that give a policy what it
cannot find, be it a demonstration, a hint or a critique of what it wrote (`HELPED`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r3.method.presets.base import PLAIN, MethodName, Preset

BASELINES: Mapping[MethodName, Preset] = {
    "grpo": Preset(
        "advantages over the group's mean, divided by its standard deviation; symmetric clip, mean by sequence",
        "arXiv 2402.03300",
        PLAIN,
        departures="no KL penalty unless objective.kl is set; dual clip 3, as in verl",
    ),
    "dapo": Preset(
        "clip-higher 0.2/0.28, token mean, dynamic sampling decided on outcomes, soft punishment of overlong answers",
        "arXiv 2503.14476; verl recipe/dapo (dual clip 10; truncated answers are not masked)",
        {**PLAIN, "objective": {"name": "dapo"}, "resample": {"enabled": True}},
        needs="further rollouts for groups without variance",
        departures=(
            "draws what is missing, resample.max_rounds times at most, and then trains a batch that is not full "
            "(theirs: ten draws of three batches, surplus cut, then an error); the token mean is the batch's, not each "
            "mini-batch's. Published with 16 updates per batch: train.updates_per_batch is the recipe's"
        ),
        overlong=True,
    ),
    "polaris": Preset(
        "groups without variance are replaced by copies of the batch's others; no update if too few are left",
        "ChenxinAn-fdu/POLARIS, verl ray_trainer.py (dyn_sampling_polaris)",
        {
            **PLAIN,
            "objective": {"name": "dapo", "dual_clip": 3.0},
            "resample": {"enabled": True, "fill": "copy", "min_share": 1 / 3},
        },
        departures=(
            "copies are weights, drawn with putting back; the token mean is the batch's, not each mini-batch's. Its "
            "other parts are settings of the run: task.max_pass_rate=0.9 with task.pass_rates_from between stages, "
            "rollout.temperature 1.4 and rising by stage"
        ),
    ),
    "prompt-replay": Preset(
        "half of a batch are queries that were solved now and then, asked again; all answers are fresh",
        "arXiv 2603.21177; baroian/GRPO_prompt_replay open_instruct/grpo_fast.py",
        {
            **PLAIN,
            "objective": {"name": "grpo", "normalise": "token"},
            "revisit": {
                "enabled": True,
                "share": 0.5,
                "weights": "closest",
                "min_rate": 0.24,
                "max_rate": 0.70,
                "cooldown": 5,
                "jitter": 0.2,
                "max_reuse": 20,
                "start_at": None,
                "retire": False,
            },
        },
        departures=(
            "the objective is GRPO's with the token mean; a query's cooldown also counts from its own turn; a query "
            "that the batch has from the data already is not drawn once more"
        ),
    ),
    "dr_grpo": Preset(
        "advantages not divided by the standard deviation, sums of tokens divided by the length limit",
        "arXiv 2503.20783",
        {**PLAIN, "objective": {"name": "dr_grpo"}, "advantage": {"scale": "none"}},
        departures="dual clip 3, as in verl",
    ),
    "gspo": Preset(
        "one ratio for each sequence, clipped at 3e-4/4e-4",
        "arXiv 2507.18071",
        {**PLAIN, "objective": {"name": "gspo"}},
        needs="several updates per batch, or its clip never acts",
    ),
    "cispo": Preset(
        "the ratio, clipped into [0, 5], as a weight without gradient on the log-prob; token mean",
        "arXiv 2506.13585; upper bound 5 after ScaleRL, arXiv 2510.13786",
        {**PLAIN, "objective": {"name": "cispo"}},
        needs="several updates per batch, or its clip never acts",
        departures="the paper leaves the lower side open too and tunes the upper; verl's example bounds it at 1.2",
    ),
    "rloo": Preset(
        "REINFORCE on whole sequences over the mean of the group's other answers; no clip, no standard deviation",
        "arXiv 2402.14740",
        {
            **PLAIN,
            "objective": {"name": "reinforce"},
            "advantage": {"scale": "none", "baseline": "leave_one_out"},
        },
        departures="a sequence's sum is divided by the length limit, a constant; no KL penalty unless objective.kl",
    ),
    "reinforce++": Preset(
        "over the group's mean, divided by the batch's standard deviation (REINFORCE++-baseline); token mean",
        "arXiv 2501.03262",
        {
            **PLAIN,
            "objective": {"name": "grpo", "normalise": "token"},
            "advantage": {"scale": "batch_std"},
        },
        departures=(
            "the standard deviation is over the batch's answers, not over its tokens; no KL penalty unless objective.kl"
        ),
    ),
    "justrl": Preset(
        "GRPO with clip-higher and token mean, no remedy at all, run long",
        "arXiv 2512.16649; thunlp/JustRL run_scaling_ssh_distill.sh",
        {**PLAIN, "objective": {"name": "dapo"}},
        departures="the token mean is the batch's, not each mini-batch's; recipes/justrl-1.5b.yaml has its numbers",
    ),
    "maxrl": Preset(
        "advantages divided by the group's mean reward: a query weighs like 1/p, so hard ones count more",
        "arXiv 2602.02710; tajwarfahim/maxrl verl/trainer/ppo/core_algos.py",
        {**PLAIN, "objective": {"name": "grpo", "normalise": "token"}, "advantage": {"scale": "mean"}},
        departures="published with a gradient norm of 0.3 (train.max_grad_norm)",
    ),
}


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
