"""Trainers without a remedy, and those that choose or fill the batch."""

from __future__ import annotations

from collections.abc import Mapping

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
