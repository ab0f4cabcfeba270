"""Methods and objectives by name: what each sets, where its numbers come from, and where ours departs from it.

A preset is a handful of values of the settings tree (`r3.method.settings`), never a branch of the loop. Two things of
the reward belong to a method as well: whether it was published with a bonus for short right answers and whether it
punishes answers near the length limit; `reward.length_bonus` and `reward.overlong.enabled` follow them while they are
`auto`.

Naming a preset sets every key of `GOVERNED` to what the preset says, or to the default where it says nothing, and
beside them what the preset itself sets (`governed`); all other settings (how many samples R³ replays, when reflection
gives up, …) are left as they are. R³ and its ablations set every switch that has a paper's way and another (`LETTER`),
so that naming one of them says which; their numbers (k, τ, budgets, templates) are the recipe's.

Departures that all presets share: rewards of outcomes are 0 and 1 (papers with ±1: the same after normalising, and
penalties are halved to keep their proportion); the standard deviation is the population's, where most code divides by
n − 1 (a common factor √(n/(n−1))); learning rate, batch, group size and limits are the recipe's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MethodName = Literal[
    "grpo",
    "dapo",
    "polaris",
    "prompt-replay",
    "dr_grpo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce++",
    "justrl",
    "maxrl",
    "rl-zvp",
    "lens",
    "w-reinforce",
    "repo",
    "rlep",
    "exgrpo",
    "sdpo",
    "r3",
    "r3-paper",
    "r3-no-replay",
    "r3-no-reflection",
    "r3-no-ranking",
]
ObjectiveName = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "reinforce"]

UNBOUNDED = 1e6
"""A clip so wide that no ratio reaches it."""

OBJECTIVES: Mapping[ObjectiveName, Mapping[str, Any]] = {
    "grpo": {},
    "dapo": {"normalise": "token", "clip_high": 0.28, "dual_clip": 10.0},
    "dr_grpo": {"normalise": "constant"},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None},
    "cispo": {"surrogate": "cispo", "normalise": "token", "clip_low": 1.0, "clip_high": 4.0},
    "reinforce": {"normalise": "constant", "clip_low": 1.0, "clip_high": UNBOUNDED, "dual_clip": None},
}

GOVERNED_BY_OBJECTIVE = ("ratio", "surrogate", "normalise", "clip_low", "clip_high", "dual_clip")
"""What naming an objective sets, below `objective`."""

GOVERNED = (
    "replay.enabled",
    "reflection.enabled",
    "ranking.enabled",
    "resample.enabled",
    "revisit.enabled",
    "distill.enabled",
    "mask_truncated",
    "advantage.scale",
    "advantage.baseline",
    "advantage.homogeneous",
    "objective.name",
    *(f"objective.{name}" for name in GOVERNED_BY_OBJECTIVE),
)
"""What naming any method sets, below `method`."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A method by name."""

    summary: str
    """What it does, in a line."""
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Its values, over the defaults of the settings tree."""
    needs: str = "nothing"
    """Data or compute beyond one group of answers for each query."""
    departures: str = ""
    """Where ours differs from the source, beyond what all presets share."""
    length_bonus: bool = False
    """Whether it was published with a bonus for short right answers (`reward.length_bonus: auto`)."""
    overlong: bool = False
    """Whether it punishes answers near the length limit (`reward.overlong.enabled: auto`)."""


_OFF: Mapping[str, Any] = {"enabled": False}
_PLAIN: Mapping[str, Any] = {"replay": _OFF, "reflection": _OFF, "ranking": _OFF}
"""The three mechanisms of R³ off."""
_R3 = "arXiv 2601.19620"

LETTER: Mapping[str, Mapping[str, Any]] = {
    "replay": {
        "when": "homogeneous",
        "mode": "join",
        "baseline": "joint",
        "failures": True,
        "max_repeats": None,
        "ratio": "drawn",
    },
    "reflection": {
        "train_as": "reflection",
        "window": None,
        "when": "hard",
        "at_once": False,
        "budget": "extra",
        "max_share": 1.0,
        "min_lift": 0.0,
    },
    "ranking": {"scope": "truncated", "centred": False, "standardised": True, "alone": True, "gate": False},
}
"""The paper's way, of every switch that R³ and its ablations govern."""

BY_EVIDENCE: Mapping[str, Mapping[str, Any]] = {
    "replay": {},
    "reflection": {"window": 16, "at_once": True, "budget": "shared", "min_lift": 2.0},
    "ranking": {"centred": True, "standardised": False, "alone": False},
}
"""What `r3` and its ablations have instead, since experiments speak for it (docs/results.md); keys of `LETTER`."""


def _r3(without: str | None = None) -> dict[str, dict[str, Any]]:
    """R³ as `r3` has it, whole or without one of its mechanisms."""
    sections = {name: {**switches, **BY_EVIDENCE[name]} for name, switches in LETTER.items()}
    return sections if without is None else {**sections, without: {**sections[without], **_OFF}}


METHODS: Mapping[MethodName, Preset] = {
    "grpo": Preset(
        "advantages over the group's mean, divided by its standard deviation; symmetric clip, mean by sequence",
        "arXiv 2402.03300",
        _PLAIN,
        departures="no KL penalty unless objective.kl is set; dual clip 3, as in verl",
    ),
    "dapo": Preset(
        "clip-higher 0.2/0.28, token mean, dynamic sampling decided on outcomes, soft punishment of overlong answers",
        "arXiv 2503.14476; verl recipe/dapo (dual clip 10; truncated answers are not masked)",
        {**_PLAIN, "objective": {"name": "dapo"}, "resample": {"enabled": True}},
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
            **_PLAIN,
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
            **_PLAIN,
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
        {**_PLAIN, "objective": {"name": "dr_grpo"}, "advantage": {"scale": "none"}},
        departures="dual clip 3, as in verl",
    ),
    "gspo": Preset(
        "one ratio for each sequence, clipped at 3e-4/4e-4",
        "arXiv 2507.18071",
        {**_PLAIN, "objective": {"name": "gspo"}},
        needs="several updates per batch, or its clip never acts",
    ),
    "cispo": Preset(
        "the ratio, clipped into [0, 5], as a weight without gradient on the log-prob; token mean",
        "arXiv 2506.13585; upper bound 5 after ScaleRL, arXiv 2510.13786",
        {**_PLAIN, "objective": {"name": "cispo"}},
        needs="several updates per batch, or its clip never acts",
        departures="the paper leaves the lower side open too and tunes the upper; verl's example bounds it at 1.2",
    ),
    "rloo": Preset(
        "REINFORCE on whole sequences over the mean of the group's other answers; no clip, no standard deviation",
        "arXiv 2402.14740",
        {
            **_PLAIN,
            "objective": {"name": "reinforce"},
            "advantage": {"scale": "none", "baseline": "leave_one_out"},
        },
        departures="a sequence's sum is divided by the length limit, a constant; no KL penalty unless objective.kl",
    ),
    "reinforce++": Preset(
        "over the group's mean, divided by the batch's standard deviation (REINFORCE++-baseline); token mean",
        "arXiv 2501.03262",
        {
            **_PLAIN,
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
        {**_PLAIN, "objective": {"name": "dapo"}},
        departures="the token mean is the batch's, not each mini-batch's; recipes/justrl-1.5b.yaml has its numbers",
    ),
    "maxrl": Preset(
        "advantages divided by the group's mean reward: a query weighs like 1/p, so hard ones count more",
        "arXiv 2602.02710; tajwarfahim/maxrl verl/trainer/ppo/core_algos.py",
        {**_PLAIN, "objective": {"name": "grpo", "normalise": "token"}, "advantage": {"scale": "mean"}},
        departures="published with a gradient norm of 0.3 (train.max_grad_norm)",
    ),
    "rl-zvp": Preset(
        "groups all right or all wrong teach by themselves: sign by outcome, size by each token's entropy",
        "arXiv 2509.21880, Eq. 5",
        {**_PLAIN, "objective": {"name": "dapo"}, "advantage": {"homogeneous": "zvp"}},
        needs="entropies (a forward pass more where the engine gives none)",
        departures=(
            "no code of the authors' is known: clip 0.2/0.28 is a re-implementation's, the token mean is DAPO's; "
            "entropies are those at sampling time, the current ones with one update per batch"
        ),
    ),
    "lens": Preset(
        "a wrong answer costs more the surer the policy was of it, so that all-wrong groups have a spread",
        "arXiv 2510.08696",
        {**_PLAIN, "objective": {"name": "grpo"}, "advantage": {"homogeneous": "lens"}},
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
            **_PLAIN,
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
            **_PLAIN,
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
            **_PLAIN,
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
            **_PLAIN,
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
            **_PLAIN,
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
    "r3": Preset(
        "replay, reflection and ranking rewards for groups that teach nothing",
        _R3,
        _r3(),
        needs="a buffer on disk, further rollouts for reflection",
        departures=(
            "reflection shares a hard query's own answers, joins in the same step, goes by the newest 16 plain answers "
            "and pauses below a lift of 2; ranking rewards are centred, keep their own size and make no update alone. "
            "r3-paper has the paper's way of each"
        ),
        length_bonus=True,
    ),
    "r3-paper": Preset(
        "R³ with every switch at the paper's letter, whatever r3 or the recipe have instead",
        _R3,
        LETTER,
        needs="a buffer on disk, further rollouts for reflection",
        departures=(
            "numbers (k, τ, p, R_max, …), templates and what bounds stale samples (method.objective) are the recipe's"
        ),
        length_bonus=True,
    ),
    "r3-no-replay": Preset(
        "R³ without replay", _R3, _r3("replay"), needs="further rollouts for reflection", length_bonus=True
    ),
    "r3-no-reflection": Preset(
        "R³ without reflection", _R3, _r3("reflection"), needs="a buffer on disk", length_bonus=True
    ),
    "r3-no-ranking": Preset(
        "R³ without ranking rewards",
        _R3,
        _r3("ranking"),
        needs="a buffer on disk, further rollouts for reflection",
        length_bonus=True,
    ),
}


def governed(*names: Any) -> tuple[str, ...]:
    """What naming one of these methods after the other sets, below `method`; names of no method count for nothing."""
    own = [key for name, preset in METHODS.items() if name in names for key in _keys(preset.settings)]
    return tuple(dict.fromkeys([*GOVERNED, *own]))


def _keys(settings: Mapping[str, Any]) -> list[str]:
    """Sections' own keys, dotted; a mapping within a section (objective.shaping) is one value."""
    return [
        f"{section}.{key}" if isinstance(value, Mapping) else section
        for section, value in settings.items()
        for key in (value if isinstance(value, Mapping) else [section])
    ]


def reset(method: dict[str, Any], name: str) -> None:
    """Name a method in a plain mapping of method settings: what it and the one before govern goes, the rest stays."""
    for key in governed(method.get("name"), name):
        _drop(method, *key.split("."))
    method["name"] = name


def reset_objective(objective: dict[str, Any], name: str) -> None:
    """The same for an objective in its section."""
    for key in GOVERNED_BY_OBJECTIVE:
        objective.pop(key, None)
    objective["name"] = name


def _drop(method: dict[str, Any], key: str, below: str | None = None) -> None:
    section = method.get(key)
    if below is None or not isinstance(section, dict):  # a setting, or a section's short form (replay: off)
        method.pop(key, None)
    else:
        section.pop(below, None)
