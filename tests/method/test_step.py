"""Algorithm 1's inner part: what each method makes of the same groups, and which queries it asks before their turn.

Covers r3.method.step, r3.method.mixed, r3.method.revisit.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from r3.method.presets import METHODS
from r3.method.revisit import RevisitSettings, Seen, candidates, choose, ready_again
from r3.method.settings import MethodSettings
from r3.method.step import step
from r3.samples import Group, Sample
from tests.method.makers import BATCH, HISTORY, REFLECTION, make_group, make_sample

# Those that compare answers and nothing else; groups that teach by themselves: `test_advantage`.
METHOD = st.sampled_from(sorted(set(METHODS) - {"rl-zvp", "lens", "w-reinforce"}))


def constant(name: str, **more: Any) -> MethodSettings:
    """A method with the constant that some objectives divide by, which a recipe takes from its length limit."""
    return MethodSettings.model_validate({"name": name, "objective": {"constant_length": 64}, **more})


@given(BATCH, HISTORY, METHOD)
def test_advantages_of_every_group_are_centred_and_weights_share_the_batch(
    batch: tuple[Group, ...], history: dict[str, list[Sample]], name: str
) -> None:
    result = step(batch, constant(name), history=history, policy_version=20)
    for mixed in result.groups:
        assert sum(mixed.advantages) == pytest.approx(0, abs=1e-6)
        assert len(mixed.advantages) == len(mixed.members) == len(mixed.rewards)
    assert all(w.advantage != 0 for w in result.weighted)
    objective = MethodSettings(name=name).objective
    if objective.normalise == "sequence":
        # Every query has an equal share, a member of one of its groups an equal share of that: plain groups weigh 1.
        queries = sum(m.group.context.kind == "plain" for m in result.groups) or len(result.groups)
        whole = sum(1 / (queries * len(m.members)) for m in result.groups for a in m.advantages if a != 0)
        assert sum(w.weight * len(w.sample) for w in result.weighted) == pytest.approx(whole)


@given(BATCH, METHOD)
def test_a_homogeneous_group_without_history_contributes_exactly_zero(batch: tuple[Group, ...], name: str) -> None:
    result = step(batch, constant(name, ranking=False), policy_version=20)
    for number, mixed in enumerate(result.groups):
        if len({s.reward for s in mixed.group.samples}) == 1:
            assert set(mixed.advantages) == {0.0}
            assert not any(w.group == number for w in result.weighted)


@given(BATCH, HISTORY)
def test_queries_and_contexts_never_mix(batch: tuple[Group, ...], history: dict[str, list[Sample]]) -> None:
    result = step(batch, MethodSettings(name="r3"), history=history, policy_version=20)
    for mixed in result.groups:
        assert {m.sample.query_id for m in mixed.members} == {mixed.group.query.id}
        assert len(mixed.replayed) <= MethodSettings().replay.k
        if mixed.group.context.kind == "reflection":
            assert not mixed.replayed


@given(BATCH, HISTORY, st.permutations(range(3)))
def test_a_group_does_not_depend_on_the_others(
    batch: tuple[Group, ...], history: dict[str, list[Sample]], order: list[int]
) -> None:
    settings = MethodSettings(name="r3", replay={"order": "random"})
    straight = step(batch, settings, history=history, policy_version=20, seed=7)
    shuffled = step([batch[i] for i in order], settings, history=history, policy_version=20, seed=7)
    for place, i in enumerate(order):
        assert shuffled.groups[place].advantages == straight.groups[i].advantages
        assert shuffled.groups[place].replayed == straight.groups[i].replayed


@given(BATCH, HISTORY)
def test_grpo_is_eq_1_and_nothing_else(batch: tuple[Group, ...], history: dict[str, list[Sample]]) -> None:
    result = step(batch, MethodSettings(name="grpo"), history=history, policy_version=20)
    for mixed, group in zip(result.groups, batch, strict=True):
        rewards = [s.reward for s in group.samples]
        assert mixed.fresh == group.samples
        assert not mixed.replayed
        spread = statistics.pstdev(rewards) + 1e-6
        expected = [(r - statistics.fmean(rewards)) / spread for r in rewards]
        assert mixed.advantages == pytest.approx(expected, abs=1e-9)


def truncated(*entropies: float, **more: Any) -> Sample:
    return make_sample(False, tokens=range(len(entropies)), entropies=entropies, finish="length", **more)


FORKING, FLAT, COMPLETE = truncated(0, 0, 0, 3), truncated(1, 1, 1, 2), make_sample(False)


def test_ranking_pays_truncated_answers_of_solve_none_groups_only() -> None:
    settings = MethodSettings(name="r3-paper", ranking={"peak_fraction": 0.25, "max_reward": 0.2})
    none = step([make_group([FORKING, FLAT, COMPLETE])], settings)
    assert none.groups[0].rewards == (0.2, 0.0, 0.0)
    assert none.counts["ranking/samples"] == 2
    assert none.samples[0].reward_parts == {"ranking": 0.2}  # what the buffer gets
    some = step([make_group([FORKING, FLAT, make_sample(True)])], settings)
    assert some.groups[0].rewards == (0.0, 0.0, 1.0)
    assert some.counts["ranking/samples"] == 0


def test_centred_ranking_orders_truncated_answers_without_preferring_them() -> None:
    settings = MethodSettings(name="r3", ranking={"peak_fraction": 0.25, "max_reward": 0.2, "centred": True})
    result = step([make_group([FORKING, FLAT, COMPLETE])], settings)
    assert result.groups[0].rewards == pytest.approx((0.1, -0.1, 0.0))


MIDDLE = truncated(0.5, 0.5, 0.5, 2.5)


def test_a_centred_ranking_reward_of_nothing_is_exactly_nothing() -> None:
    """The second of three is paid the mean, and a complete wrong answer lies there too: both used to get 1e-17."""
    for max_reward in (0.05, 0.1, 0.2, 0.3, 0.7):
        ranking = {"peak_fraction": 0.25, "max_reward": max_reward, "centred": True, "standardised": False}
        result = step([make_group([FORKING, MIDDLE, FLAT, COMPLETE])], MethodSettings(name="r3-paper", ranking=ranking))
        assert result.samples[1].reward_parts == {"ranking": 0.0}
        assert [w.member for w in result.weighted] == [0, 2]


@given(st.lists(st.lists(st.floats(0, 3, width=32), min_size=4, max_size=4), min_size=2, max_size=8), st.booleans())
def test_no_sample_is_trained_on_a_rounding_error(entropies: list[list[float]], standardised: bool) -> None:
    ranking = {"peak_fraction": 0.25, "centred": True, "standardised": standardised}
    group = make_group([*(truncated(*row) for row in entropies), COMPLETE, COMPLETE])
    result = step([group], MethodSettings(name="r3-paper", ranking=ranking))
    assert all(abs(weighted.advantage) > 1e-6 for weighted in result.weighted)


RIGHT = [
    make_sample(True, tokens=[9, i, *[1] * (2000 + 100 * i)], reward=2 - (2002 + 100 * i) / 32768) for i in range(8)
]
"""Eight right answers of 2,002 to 2,702 tokens, with the paper's length bonus."""


def solved_all(past: list[Sample], **advantage: Any) -> list[float]:
    settings = MethodSettings.model_validate({"name": "r3", "advantage": advantage})
    return list(step([make_group(RIGHT)], settings, history={"q": past}).groups[0].advantages)


def test_length_alone_pulls_as_hard_as_right_and_wrong_unless_it_is_left_unscaled() -> None:
    assert statistics.pstdev(solved_all([])) == pytest.approx(1, abs=1e-3)
    unscaled = solved_all([], solve_all="unscaled")
    assert unscaled[0] == pytest.approx(350 / 32768)
    assert unscaled == pytest.approx([(350 - 100 * i) / 32768 for i in range(8)])
    by_batch = step(
        [make_group(RIGHT), make_group([make_sample(True, query_id="a"), make_sample(query_id="a")], query_id="a")],
        constant("reinforce++", advantage={"solve_all": "unscaled"}),
    )
    assert by_batch.groups[0].advantages == pytest.approx(unscaled)
    assert by_batch.groups[1].advantages == pytest.approx((1, -1), abs=1e-5)


def test_failures_that_join_eight_right_answers_get_minus_two_unless_unscaled() -> None:
    past = [make_sample(False, tokens=[5, i], id=i + 1) for i in range(2)]
    assert solved_all(past)[8:] == pytest.approx([-2, -2], abs=0.01)
    mean = sum(sample.reward for sample in RIGHT) / 10
    assert solved_all(past, solve_all="unscaled")[8:] == pytest.approx([-mean, -mean])
    plain = [make_sample(True, tokens=[9, i]) for i in range(8)]  # without the bonus: the worked example
    settings = MethodSettings.model_validate({"name": "r3", "advantage": {"solve_all": "unscaled"}})
    joined = step([make_group(plain)], settings, history={"q": past}).groups[0].advantages
    assert joined == pytest.approx([0.2] * 8 + [-0.8] * 2)


def test_other_groups_are_scaled_as_ever() -> None:
    groups = [make_group([make_sample(True), make_sample(False), make_sample(False)])]
    unscaled = MethodSettings.model_validate({"name": "r3", "advantage": {"solve_all": "unscaled"}})
    assert step(groups, unscaled).groups[0].advantages == step(groups, MethodSettings()).groups[0].advantages


def test_scope_failed_ranks_complete_failures_too() -> None:
    settings = MethodSettings(name="r3", ranking={"peak_fraction": 0.25, "max_reward": 0.2, "scope": "failed"})
    result = step([make_group([FORKING, FLAT, COMPLETE])], settings)
    assert result.counts["ranking/samples"] == 3


def test_tied_truncated_answers_do_not_outrank_a_complete_one() -> None:
    result = step([make_group([FLAT, FLAT, COMPLETE])], MethodSettings(name="r3"))
    assert result.groups[0].rewards == (0.0, 0.0, 0.0)
    assert result.weighted == ()


def test_ranking_without_entropies_says_so() -> None:
    blind = Sample("q", np.array([1, 2]), np.array([-1.0, -1.0]), finish="length", outcome=False)
    with pytest.raises(ValueError, match="needs entropies"):
        step([make_group([blind, blind])], MethodSettings(name="r3"))
    assert step([make_group([blind, blind])], MethodSettings(name="grpo")).weighted == ()


def test_alpha_tempers_groups_with_replay_and_no_others() -> None:
    none, mixed = make_group([make_sample(False)] * 3), make_group([make_sample(False), make_sample(True)])
    history = {"q": [make_sample(True)]}
    plain = step([none, mixed], MethodSettings(name="r3"), history=history)
    tempered = step([none, mixed], MethodSettings(name="r3", advantage={"alpha": 2.0}), history=history)
    assert tempered.groups[0].advantages == pytest.approx([a / 2 for a in plain.groups[0].advantages], rel=1e-5)
    assert tempered.groups[1].advantages == plain.groups[1].advantages


def test_a_success_found_in_reflection_is_replayed_under_the_plain_prompt_with_recomputed_log_probs() -> None:
    found = make_sample(True, context=REFLECTION, tokens=[5, 5])
    group = make_group([make_sample(False)] * 2)
    result = step([group], MethodSettings(name="r3"), history={"q": [found]})
    replayed = [w for w in result.weighted if w.origin == "replayed"]
    assert len(replayed) == 1
    assert replayed[0].other_context
    assert replayed[0].prompt.tolist() == group.prompt.tolist()
    assert result.counts["replay/cross_context"] == 1


@pytest.mark.parametrize(
    ("train_as", "prompts"), [("reflection", [(7, 8, 9)]), ("plain", [(1, 2)]), ("both", [(7, 8, 9), (1, 2)])]
)
def test_reflection_answers_train_under_the_chosen_prompt(train_as: str, prompts: list[tuple[int, ...]]) -> None:
    members = [make_sample(True, context=REFLECTION), make_sample(False, context=REFLECTION)]
    group = make_group(members, context=REFLECTION, plain_prompt=np.array([1, 2]))
    result = step([group], MethodSettings(name="r3", reflection={"train_as": train_as}))
    by_member: dict[int, list[Any]] = defaultdict(list)
    for w in result.weighted:
        by_member[w.member].append(w)
    assert list(by_member) == [0, 1]
    for weighted in by_member.values():
        assert [tuple(w.prompt.tolist()) for w in weighted] == prompts
        assert [w.other_context for w in weighted] == [p == (1, 2) for p in prompts]
        assert sum(w.weight for w in weighted) * 3 == pytest.approx(1 / 2)  # the same total either way


def test_masking_truncated_answers_takes_them_out_of_the_denominators() -> None:
    members = [make_sample(True), make_sample(False), truncated(1, 1, 1), truncated(1, 1, 1)]
    kept = step([make_group(members)], MethodSettings(name="grpo"))
    masked = step([make_group(members)], MethodSettings(name="grpo", mask_truncated=True))
    assert [w.weight for w in kept.weighted] == pytest.approx([1 / (4 * 3)] * 4)
    assert [w.weight for w in masked.weighted] == pytest.approx([1 / (2 * 3)] * 2)
    # The baseline still counts them: being cut is a failure.
    assert masked.weighted[0].advantage == kept.weighted[0].advantage
    token = step([make_group(members)], MethodSettings(name="grpo", mask_truncated=True, objective="dapo"))
    assert [w.weight for w in token.weighted] == pytest.approx([1 / 6] * 2)
    # A group that is masked altogether is not counted as a group either.
    other = make_group([truncated(1, 1), truncated(1, 1)])
    both = step([make_group(members), other], MethodSettings(name="grpo", mask_truncated=True))
    assert [w.weight for w in both.weighted] == [w.weight for w in masked.weighted]


def test_skipping_zero_advantages_keeps_their_tokens_in_the_denominator() -> None:
    flat, taught = make_group([make_sample(False)] * 2), make_group([make_sample(True), make_sample(False)])
    for objective, share in (("grpo", 1 / (2 * 2 * 3)), ("dapo", 1 / 12)):
        result = step([flat, taught], MethodSettings(name="grpo", objective=objective))
        assert [w.weight for w in result.weighted] == pytest.approx([share] * 2)
        assert result.counts["samples/skipped"] == 2


@pytest.mark.parametrize("objective", ["grpo", "dapo"])
def test_a_reflection_group_adds_to_the_gradient_and_takes_from_none(objective: str) -> None:
    plain = make_group([make_sample(True), make_sample(False)])
    silent = make_group([make_sample(False, context=REFLECTION)] * 2, context=REFLECTION)
    telling = make_group(
        [make_sample(True, context=REFLECTION), make_sample(False, context=REFLECTION)], context=REFLECTION
    )

    def weights(*groups: Group, over: str) -> list[float]:
        settings = MethodSettings(name="r3", objective={"name": objective, "mean_over": over})
        return [w.weight for w in step(groups, settings).weighted]

    alone = weights(plain, over="queries")
    assert weights(plain, silent, over="queries") == alone
    assert weights(plain, telling, over="queries") == alone * 2
    assert weights(plain, silent, over="groups") == pytest.approx([w / 2 for w in alone])
    assert weights(telling, over="queries") == weights(telling, over="groups")  # a batch of reflection groups alone


def test_dapo_leaves_groups_without_variance_out_of_the_batch() -> None:
    flat, taught = make_group([make_sample(False)] * 2), make_group([make_sample(True), make_sample(False)])
    with_flat = step([flat, taught], MethodSettings(name="dapo"))
    without = step([taught], MethodSettings(name="dapo"))
    assert [w.weight for w in with_flat.weighted] == [w.weight for w in without.weighted]


def test_every_ablation_turns_off_one_mechanism() -> None:
    full = MethodSettings(name="r3")
    assert (full.replay.enabled, full.reflection.enabled, full.ranking.enabled) == (True, True, True)
    for part in ("replay", "reflection", "ranking"):
        ablated = MethodSettings(name=f"r3-no-{part}")
        assert not getattr(ablated, part).enabled
        same = ablated.model_copy(update={"name": "r3", part: getattr(full, part)})
        assert same == full


def test_unverified_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="verify it first"):
        step([make_group([make_sample(None)])], MethodSettings())


def test_a_batch_with_ranking_rewards_alone_makes_an_update_or_none() -> None:
    ranked, mixed = make_group([FORKING, FLAT, COMPLETE]), make_group([make_sample(False), make_sample(True)])
    for alone, trained in ((True, 3), (False, 0)):
        settings = MethodSettings(name="r3-paper", ranking={"peak_fraction": 0.25, "alone": alone})
        assert len(step([ranked], settings).weighted) == trained
        assert len(step([ranked, mixed], settings).weighted) == 5  # beside an outcome they teach either way


# Which queries are asked again before their turn: the worked examples, and a naive choice on random ones.


PROMPT_REPLAY = MethodSettings(name="prompt-replay").revisit
EXGRPO = MethodSettings(name="exgrpo").revisit
SEEN = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3),
    st.builds(lambda right, ready, reused: Seen(min(right, 8), 8, ready, reused), *[st.integers(0, 30)] * 3),
    max_size=20,
)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_prompt_replay_goes_by_the_distance_to_one_half() -> None:
    """The worked example: of .25, .5, .625 and .75 the order is .5, .625, .25, and .75 is out."""
    seen = {str(rate): Seen(round(8 * rate), 8, ready=0) for rate in (0.25, 0.5, 0.625, 0.75)}
    assert choose(seen, 4, PROMPT_REPLAY, step=1, rng=generator()) == ["0.5", "0.625", "0.25"]
    assert choose(seen, 4, PROMPT_REPLAY, step=1, rng=generator(), leave_out={"0.5"}) == ["0.625", "0.25"]
    tied = {"high": Seen(5, 8, 0), "low": Seen(3, 8, 0), "worn": Seen(4, 8, 0, reused=3), "new": Seen(4, 8, 0)}
    assert choose(tied, 9, PROMPT_REPLAY, step=1, rng=generator()) == ["new", "worn", "low", "high"]


@given(seen=SEEN, most=st.integers(0, 9), step=st.integers(0, 30))
def test_prompt_replay_is_the_naive_choice(seen: dict[str, Seen], most: int, step: int) -> None:
    naive = []
    for name in sorted(seen):
        query = seen[name]
        if 0.24 <= query.right / 8 <= 0.70 and query.ready <= step and query.reused < 20:
            naive.append((abs(query.right / 8 - 0.5), query.right, query.reused, name))
    assert choose(seen, most, PROMPT_REPLAY, step=step, rng=generator()) == [row[-1] for row in sorted(naive)[:most]]


@given(seen=SEEN, most=st.integers(0, 9), seed=st.integers(0, 99))
def test_exgrpo_draws_as_many_as_there_are_and_none_twice(seen: dict[str, Seen], most: int, seed: int) -> None:
    chosen = choose(seen, most, EXGRPO, step=40, rng=generator(seed))
    partly = {name for name, query in seen.items() if 0 < query.right < 8}
    assert set(candidates(seen, EXGRPO, step=40)) == partly
    assert len(chosen) == len(set(chosen)) == min(most, len(partly))
    assert set(chosen) <= partly
    assert chosen == choose(dict(reversed(seen.items())), most, EXGRPO, step=40, rng=generator(seed))


def test_exgrpos_buckets_weigh_by_a_gaussian_and_not_by_their_size() -> None:
    sizes = {1: 3, 3: 1, 4: 6, 6: 2}
    seen = {f"{k}-{i}": Seen(k, 8, 0) for k, size in sizes.items() for i in range(size)}
    weights = {k: math.exp(-((k - 4) ** 2) / 2) for k in sizes}
    drawn = Counter(choose(seen, 1, EXGRPO, step=1, rng=generator(seed))[0] for seed in range(6000))
    for k, size in sizes.items():
        expected = weights[k] / sum(weights.values())
        each = [drawn[f"{k}-{i}"] / 6000 for i in range(size)]
        assert sum(each) == pytest.approx(expected, abs=0.02)
        assert each == pytest.approx([expected / size] * size, abs=0.02)


def test_buckets_far_from_the_middle_alone_can_be_drawn() -> None:
    seen = {"a": Seen(1, 4096, 0), "b": Seen(2, 4096, 0)}
    assert sorted(choose(seen, 2, EXGRPO, step=1, rng=generator())) == ["a", "b"]


def test_the_cooldown_is_five_steps_and_a_fifth_more_or_less() -> None:
    ready = Counter(ready_again(10, PROMPT_REPLAY, generator(seed)) - 10 for seed in range(4000))
    assert set(ready) == {5, 6, 7}  # 4, 5 or 6 steps are left out
    assert ready[6] / 4000 == pytest.approx(0.5, abs=0.03)
    assert ready_again(10, EXGRPO, generator()) == 11


def test_rates_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"revisit\.min_rate=0\.7 is above revisit\.max_rate=0\.2"):
        RevisitSettings(min_rate=0.7, max_rate=0.2)
