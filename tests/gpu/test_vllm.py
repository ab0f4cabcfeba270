"""vLLM behind the protocol, on a card, with the real vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from r3.policy.model import Policy
from r3.policy.packing import Trajectory
from r3.policy.settings import ModelSettings
from r3.rollout import Sampling
from r3.rollout.vllm.engine import VllmEngine
from tests.rollout.models import answers

from .test_cuda import medium, ragged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card"),
    pytest.mark.filterwarnings("default"),
]
pytest.importorskip("vllm", reason="vLLM is not installed (r3-rl[vllm])")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmEngine, Policy]]:
    """One engine for all tests, started from other weights than the policy has by then."""
    folder: Path = tmp_path_factory.mktemp("model")
    model = medium("llama", torch.bfloat16)
    model.save_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    engine = VllmEngine(model, str(folder), max_rows=32, memory=0.3)
    yield engine, Policy(model, None, ModelSettings(compile=False), base=model)
    engine.release()


def gap(policy: Policy, responses: dict) -> float:
    """Mean absolute difference between the engine's log-probs and the trainer's."""
    gaps = []
    for (place, _), response in responses.items():
        with torch.no_grad():
            own = policy.statistics([Trajectory(ragged()[place].prompt, response.tokens)], temperature=1.0)
        gaps.append(np.abs(own.logprobs_T.cpu().numpy() - response.logprobs))
    return float(np.concatenate(gaps).mean())


def test_it_draws_from_the_policys_weights_as_they_are_now(running: tuple[VllmEngine, Policy]) -> None:
    engine, policy = running
    responses = answers(engine, ragged(), Sampling(100, (0,)))
    assert all(response.entropies is None for response in responses.values())
    assert gap(policy, responses) < 0.05
    again = answers(engine, ragged(), Sampling(100, (0,)))
    assert {k: r.tokens.tolist() for k, r in again.items()} == {k: r.tokens.tolist() for k, r in responses.items()}
    with torch.no_grad():
        for parameter in policy.base.parameters():
            parameter.mul_(1.05)
    changed = answers(engine, ragged(), Sampling(100, (0,)))
    assert gap(policy, changed) < 0.05
    assert gap(policy, responses) > 0.05, "the old responses no longer fit"


def test_stop_tokens_and_limits(running: tuple[VllmEngine, Policy]) -> None:
    engine, _ = running
    stops = tuple(range(0, 4096, 50))
    responses = answers(engine, ragged(), Sampling(60, stops))
    for response in responses.values():
        stopped = response.tokens[-1] in stops
        assert response.finish == ("stop" if stopped else "length")
        assert stopped or len(response.tokens) == 60
        assert not set(response.tokens[:-1].tolist()) & set(stops)
    assert {response.finish for response in responses.values()} == {"stop", "length"}


def test_asleep_it_gives_memory_back_and_a_call_left_unfinished_ends(running: tuple[VllmEngine, Policy]) -> None:
    engine, _ = running
    left = engine.generate(ragged(), Sampling(200, ()))
    next(left)
    awake = torch.cuda.mem_get_info()[0]
    engine.release()
    assert torch.cuda.mem_get_info()[0] > awake + 2**30
    assert list(left) == []
    assert len(answers(engine, ragged(1), Sampling(5, ()))) == len(ragged())
