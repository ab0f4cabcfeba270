"""What each token of a step weighs in the loss, and the prompts that its sequences are trained under.

`times_counted` says how often the loss counts each group, where groups without variance leave the batch (`resample`).

    fill: draw    DAPO, arXiv 2503.14476: other queries were drawn in their place; each group that stays counts once
    fill: copy    POLARIS, ChenxinAn-fdu/POLARIS, `dyn_sampling_polaris`: random copies of the groups that stay take the
                  place of those that leave; if at most min_share of the batch stays, the step trains on nothing

A copy is a weight: a group that counts twice has twice the gradient and counts twice in the denominators.

Departures from POLARIS: copies are drawn with putting back; a copy goes into the same share of the batch as its group
(with several updates per batch theirs may fall into two); reflection groups that teach stay, and are not copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from r3.method.mixed import Member, MixedGroup, WeightedSample
from r3.method.settings import MethodSettings, ObjectiveSettings, ResampleSettings
from r3.samples import FloatArray, Group, IntArray, Joins


def weighted(
    groups: Sequence[MixedGroup],
    times: Sequence[int],
    settings: MethodSettings,
    joins: Mapping[str, Mapping[bytes, Joins]],
) -> Iterator[WeightedSample]:
    """The sequences of a step to train on; `times` says how often the loss counts each group."""
    in_loss = {g: members for g, mixed in enumerate(groups) if times[g] and (members := _in_loss(mixed, settings))}
    plain = [g for g in in_loss if groups[g].group.context.kind in ("plain", "hint")]
    # The loss is a mean over all groups, or one per query: the plain one, or the hinted one that took its place.
    base = plain if plain and settings.objective.mean_over == "queries" else list(in_loss)
    counted = sum(times[g] for g in base)
    tokens = sum(times[g] * len(groups[g].members[i].sample) for g in base for i in in_loss[g])
    for g, members in in_loss.items():
        for i in members:
            member = groups[g].members[i]
            if not member.teaches:
                continue
            weight = token_weight(len(member.sample), counted, len(members), tokens, settings.objective) * times[g]
            prompts = training_prompts(groups[g].group, member, settings)
            for prompt, moved in prompts:
                yield WeightedSample(
                    prompt,
                    member.sample,
                    member.advantage,
                    weight / len(prompts),
                    member.origin,
                    moved,
                    g,
                    i,
                    member.token_advantages,
                    _first_logprobs(member, settings, joins) if moved else None,
                )


def _first_logprobs(
    member: Member, settings: MethodSettings, joins: Mapping[str, Mapping[bytes, Joins]]
) -> FloatArray | None:
    """The log-probs of a replayed sample from another context at its first replay, if the ratio is taken to those."""
    if member.origin != "replayed" or settings.replay.ratio == "drawn":
        return None
    before = joins.get(member.sample.query_id, {}).get(member.sample.fingerprint)
    return None if before is None else before.logprobs


def _in_loss(mixed: MixedGroup, settings: MethodSettings) -> list[int]:
    """The members of a group that the loss and its denominators count."""
    return [
        i for i, m in enumerate(mixed.members) if not (m.left_out or (settings.mask_truncated and m.sample.truncated))
    ]


def token_weight(length: int, groups: int, members: int, tokens: int, objective: ObjectiveSettings) -> float:
    """What one token of a sample of `length` tokens weighs, in a batch of `groups` groups and `tokens` tokens.

    >>> [token_weight(10, 2, 5, 400, ObjectiveSettings(name=n)) for n in ("grpo", "dapo")]  # 1/(2·5·10), 1/400
    [0.01, 0.0025]
    """
    if objective.normalise == "token":
        return 1.0 / tokens
    per_sequence = objective.constant if objective.normalise == "constant" else length
    return 1.0 / (groups * members * per_sequence)


def training_prompts(group: Group, member: Member, settings: MethodSettings) -> list[tuple[IntArray, bool]]:
    """The prompt(s) a member is trained under, each with whether it was drawn under another one.

    That is its group's prompt; answers to a reflection prompt may go under the plain one instead, or under both.
    """
    if member.origin != "reflection" or settings.reflection.train_as == "reflection":
        return [(group.prompt, member.sample.context.kind != group.context.kind)]
    if group.plain_prompt is None:
        raise ValueError(
            f"train_as={settings.reflection.train_as} needs the plain prompt of the reflection group of "
            f"{group.query.id!r}"
        )
    plain = (group.plain_prompt, True)
    return [plain] if settings.reflection.train_as == "plain" else [(group.prompt, False), plain]


def times_counted(groups: Sequence[MixedGroup], settings: ResampleSettings, rng: np.random.Generator) -> list[int]:
    """How often the loss counts each group."""
    if not settings.enabled:
        return [1] * len(groups)
    times = [int(mixed.kept) for mixed in groups]
    if settings.fill == "draw":
        return times
    plain = [index for index, mixed in enumerate(groups) if mixed.group.context.kind == "plain"]
    stay = [index for index in plain if times[index]]
    # A share that is a fraction of the batch, such as 1/3 of 6, is meant exactly.
    if len(stay) <= math.floor(settings.min_share * len(plain) + 1e-9):
        return [0] * len(groups)
    for index in rng.choice(stay, len(plain) - len(stay)).tolist():
        times[index] += 1
    return times
