"""`examples/own_loop.py`: it runs, hands over what the policy really drew, and moves the policy the right way."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import r3
from r3.buffer import SampleBuffer
from r3.tasks.arithmetic import problem_set
from tests.train.tiny import ROOT

SCRIPT = ROOT / "examples" / "own_loop.py"
QUESTIONS = {problem.question: problem.answer for problem in problem_set(0, 12, (3, 4, 5, 8), "heldout")}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_loop", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


own_loop = load()
tokenizer = AutoTokenizer.from_pretrained(own_loop.MODEL)


@pytest.fixture
def policy() -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(own_loop.MODEL, dtype=torch.float32)


def asked() -> tuple[r3.Algorithm, r3.Asked]:
    algorithm = r3.Algorithm(own_loop.METHOD, SampleBuffer(":memory:"), tokenizer)
    queries = [r3.Query(question, question, answer) for question, answer in QUESTIONS.items()]
    return algorithm, algorithm.ask([(query, 1) for query in queries], step=1)


def logits_of(policy: torch.nn.Module, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """One sequence, without a cache."""
    with torch.no_grad():
        return policy(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]


def test_it_runs_and_every_part_of_the_method_acts() -> None:
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = re.findall(
        r"^step (\d)/6  right \d+%  reflected (\d+)  replayed (\d+)  trained on (\d+)$", run.stdout, re.M
    )
    steps, reflected, replayed, trained = zip(*[map(int, line) for line in lines], strict=True)
    assert steps == (1, 2, 3, 4, 5, 6)
    assert reflected[:2] == (0, 0)  # the first epoch, in which there is nothing to show
    assert sum(reflected) > 0
    assert sum(replayed) > 0
    assert min(trained) > 0


def test_samples_are_what_the_policy_drew(policy: torch.nn.Module) -> None:
    _, prompts = asked()
    finishes = set()
    for prompt in prompts.prompts:
        samples = own_loop.sample(policy, tokenizer, prompt, version=0, step=1)
        assert len(samples) == own_loop.GROUP_SIZE
        for sample in samples:
            tokens = sample.tokens.tolist()
            finishes.add(sample.finish)
            assert (tokens[-1] == tokenizer.eos_token_id) == (sample.finish == "stop")
            assert tokenizer.eos_token_id not in tokens[:-1]
            assert len(tokens) == own_loop.MAX_TOKENS or sample.finish == "stop"
            distribution = torch.distributions.Categorical(logits=logits_of(policy, prompt.tokens.tolist(), tokens))
            logprobs = distribution.log_prob(torch.tensor(tokens))
            torch.testing.assert_close(torch.tensor(sample.logprobs), logprobs, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(torch.tensor(sample.entropies), distribution.entropy(), atol=1e-4, rtol=1e-4)
            said = tokenizer.decode(tokens, skip_special_tokens=True)
            assert sample.outcome == (sample.finish == "stop" and said.endswith(f"#{QUESTIONS[prompt.query.id]}"))
    assert finishes == {"stop", "length"}


def test_an_update_makes_better_answers_likelier(policy: torch.nn.Module) -> None:
    algorithm, prompts = asked()
    groups = [p.group(own_loop.sample(policy, tokenizer, p, version=0, step=1)) for p in prompts.prompts]
    result = algorithm.learn(groups, version=0)
    assert result.weighted
    own_loop.update(policy, torch.optim.SGD(policy.parameters(), lr=0.01), result.weighted)
    gain = 0.0
    for row in result.weighted:
        tokens = row.sample.tokens.tolist()
        distribution = torch.distributions.Categorical(logits=logits_of(policy, row.prompt.tolist(), tokens))
        moved = distribution.log_prob(torch.tensor(tokens)) - torch.tensor(row.sample.logprobs)
        gain += row.weight * row.advantage * float(moved.sum())
    assert gain > 0


def test_of_the_library_it_takes_what_is_exported_the_method_and_the_task() -> None:
    imported = {node.module for node in ast.walk(ast.parse(SCRIPT.read_text())) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name and name.startswith("r3")} == {
        "r3.method.objective",
        "r3.tasks.arithmetic",
    }
