"""The real vLLM in the trainer's process, on a CPU: the engine, and a whole `r3 train` with it (make test-vllm)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from r3.cli import main
from r3.policy.model import Policy
from r3.rollout import Sampling
from r3.rollout.vllm.engine import VllmEngine
from tests.rollout.models import answers, reference_distribution, teacher_forced
from tests.train.tiny import overrides, read_metrics

from .models import gap, policy_of, questions, save_model, shake, tokens_of

# In float32 both forwards are the same sums in another order.
BOUND = 1e-5


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """One engine for the tests of a model, started from other weights than the policy has by then."""
    folder = save_model(tmp_path_factory.mktemp("model"), tied=request.param)
    policy = policy_of(folder)
    shake(policy, 1)
    engine = VllmEngine(policy.base, str(folder), max_rows=12)
    yield engine, policy
    engine.release()


Running = tuple[VllmEngine, Policy]
Report = Callable[[float], None]


def test_it_draws_from_the_policys_weights_as_they_are_now(running: Running, report_gap: Report) -> None:
    engine, policy = running
    sampling = Sampling(40, (2,))
    responses = answers(engine, questions(), sampling)
    first = gap(policy, questions(), responses)
    report_gap(first)
    assert first < BOUND
    assert all(response.entropies is None for response in responses.values())
    for seed in (2, 3):
        shake(policy, seed)
        engine.release()
        changed = answers(engine, questions(), sampling)
        assert gap(policy, questions(), changed) < BOUND
        assert gap(policy, questions(), responses) > 100 * BOUND, "the old responses no longer fit"
        assert tokens_of(changed) != tokens_of(responses)
        responses = changed


def test_a_response_depends_on_its_prompt_and_seed_alone(running: Running) -> None:
    engine, _ = running
    sampling = Sampling(30, (2,))
    whole = tokens_of(answers(engine, questions(), sampling))
    assert tokens_of(answers(engine, questions(), sampling)) == whole
    backwards = tokens_of(answers(engine, questions()[::-1], sampling))
    assert {(len(questions()) - 1 - place, index): tokens for (place, index), tokens in backwards.items()} == whole
    other = [replace(request, seed=request.seed + 1) for request in questions()]
    assert tokens_of(answers(engine, other, sampling)) != whole
    assert len({tuple(tokens) for (place, _), tokens in whole.items() if place == 0}) > 1, "a group is not one answer"


@pytest.mark.parametrize(
    "sampling", [Sampling(30, (), 0.7), Sampling(30, (), 1.3, top_p=0.8), Sampling(30, (), top_k=5)]
)
def test_log_probs_are_those_of_the_distribution_drawn_from(running: Running, sampling: Sampling) -> None:
    engine, policy = running
    for (place, _), response in answers(engine, questions(n=2), sampling).items():
        logits = teacher_forced(policy.base, questions()[place].prompt, response.tokens)
        expected = [
            np.log(reference_distribution(row, sampling)[token])
            for row, token in zip(logits, response.tokens, strict=True)
        ]
        np.testing.assert_allclose(response.logprobs, expected, atol=1e-3)


def test_greedy(running: Running) -> None:
    engine, policy = running
    for (place, _), response in answers(engine, questions(n=1), Sampling(20, (), temperature=0)).items():
        logits = teacher_forced(policy.base, questions()[place].prompt, response.tokens)
        assert response.tokens.tolist() == logits.argmax(-1).tolist()


def test_stop_tokens_and_limits(running: Running) -> None:
    engine, _ = running
    stops = tuple(range(0, 90, 9))
    limits = (1, 5, 60, 60)
    asked = [replace(request, limits=limits) for request in questions()]
    responses = answers(engine, asked, Sampling(40, stops))
    for (_, index), response in responses.items():
        stopped = int(response.tokens[-1]) in stops
        assert response.finish == ("stop" if stopped else "length")
        assert stopped or len(response.tokens) == min(limits[index], 40)
        assert not set(response.tokens[:-1].tolist()) & set(stops)
    assert {response.finish for response in responses.values()} == {"stop", "length"}


def test_a_call_left_unfinished_ends_and_leaves_nothing_behind(running: Running) -> None:
    engine, policy = running
    core = engine._llm.llm_engine
    left = engine.generate(questions(), Sampling(200, ()))
    next(left)
    engine.release()
    assert list(left) == []
    assert not core.has_unfinished_requests()
    left = engine.generate(questions(), Sampling(200, ()))
    next(left)
    del left  # dropped by its caller
    assert not core.has_unfinished_requests()
    again = answers(engine, questions(), Sampling(10, ()))
    assert gap(policy, questions(), again) < BOUND


def test_a_diverged_policy_is_refused(running: Running) -> None:
    engine, policy = running
    kept = {name: parameter.detach().clone() for name, parameter in policy.base.named_parameters()}
    with torch.no_grad():
        policy.base.model.norm.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="NaN"):
        answers(engine, questions(n=1), Sampling(5, ()))
    policy.base.load_state_dict(kept, strict=False)
    assert gap(policy, questions(), answers(engine, questions(), Sampling(5, ()))) < BOUND


def test_the_process_keeps_its_threads_and_its_random_state(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    policy = policy_of(folder)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    set_num_threads = torch.set_num_threads
    VllmEngine(policy.base, str(folder), max_rows=2)
    assert torch.equal(torch.rand(3), expected)
    assert torch.set_num_threads is set_num_threads


def test_lora_adapters_are_merged_into_vllms_copy(tmp_path: Path, report_gap: Report) -> None:
    folder = save_model(tmp_path)
    policy = policy_of(folder, lora={"enabled": True, "rank": 4, "alpha": 8})
    engine = VllmEngine(policy.base, str(folder), max_rows=12)
    before = answers(engine, questions(), Sampling(30, (2,)))
    assert gap(policy, questions(), before) < BOUND
    shake(policy, 3, scale=0.2)  # adapters alone
    engine.release()
    after = answers(engine, questions(), Sampling(30, (2,)))
    report_gap(gap(policy, questions(), after))
    assert gap(policy, questions(), after) < BOUND
    assert gap(policy, questions(), before) > 1e-2


def test_heads_that_vllms_cpu_kernels_do_not_know_are_refused_at_the_start(tmp_path: Path) -> None:
    from tests.train.tiny import save_model as save_narrow

    folder = save_narrow(tmp_path)
    with pytest.raises(ValueError, match=r"heads of 32, .* and this model's have 8; use the transformers engine"):
        VllmEngine(policy_of(folder).base, str(folder), max_rows=2)


# -------------------------------------------------------------------- a whole run

MECHANISMS = ("replay/samples", "groups/reflection", "ranking/samples")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    save_model(folder / "model", seed=1)
    settings = {"rollout__engine": "vllm", "train__epochs": 4, "run__keep_checkpoints": 9}
    assert main(["train", "--quiet", *overrides(folder, **settings)]) == 0
    return folder


def test_all_mechanisms_are_at_work(whole: Path) -> None:
    metrics = read_metrics(whole / "run")
    assert len(metrics) == 9  # the evaluation before training, and 8 steps
    for name in MECHANISMS:
        assert sum(line.get(name) or 0 for line in metrics) > 0, name


def on_policy(run: Path) -> None:
    """In every step the trainer's weights gave each fresh token the probability that vLLM said it had."""
    lines = [line for line in read_metrics(run)[1:] if "update/ratio_max/fresh" in line]
    assert lines
    for line in lines:
        for name in ("p01", "p50", "p99", "max"):
            assert line[f"update/ratio_{name}/fresh"] == pytest.approx(1, abs=1e-4)


def test_every_step_is_drawn_from_the_weights_of_its_time(whole: Path) -> None:
    on_policy(whole / "run")


def test_resumed_it_writes_the_lines_of_the_uninterrupted_run(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole / "run", run)
    for checkpoint in (run / "checkpoints").glob("step-*"):
        if checkpoint.name > "step-000004":
            shutil.rmtree(checkpoint)
    assert main(["train", "--quiet", "--resume", str(run)]) == 0
    assert read_metrics(run) == read_metrics(whole / "run")


def test_lora(tmp_path: Path) -> None:
    save_model(tmp_path / "model", seed=1)
    settings = {"rollout__engine": "vllm", "model__lora__enabled": "true", "model__lora__rank": 4, "train__epochs": 2}
    assert main(["train", "--quiet", *overrides(tmp_path, **settings)]) == 0
    on_policy(tmp_path / "run")
