"""The examples do what they say: `nano_r3.py` is the method in one file, `own_loop.py` a trainer of one's own.

Covers r3.method.
"""

from __future__ import annotations

import ast
import importlib.util
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import r3
from r3.buffer import SampleBuffer
from r3.config import embedded_recipe
from r3.method.mixed import StepResult
from r3.method.objective import policy_loss
from r3.method.ranking import structural_entropy_rewards
from r3.method.reflection import is_hard, reflection_prompt
from r3.method.replay import choose_replay
from r3.method.settings import MethodSettings, ObjectiveSettings
from r3.method.step import step
from r3.policy.update import token_batch
from r3.samples import PLAIN, Context, Group, Query, Sample
from r3.tasks.arithmetic import problem_set
from tests.method.makers import REFLECTION
from tests.train.tiny import ROOT

NANO = ROOT / "examples" / "nano_r3.py"
SETTINGS = MethodSettings(**{**embedded_recipe()["method"], "name": "r3-paper"})
VERSION = 30
PROMPTS = {"plain": [7, 8, 9], "reflection": [7, 8, 9, 4, 4]}


def load(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


nano = load(NANO)


# ---------------------------------------------------------------- recorded groups, as both know them


def recorded(rng: np.random.Generator, query: str, right: bool, context: Context, version: int) -> Sample:
    """A random answer, with few different texts and entropies, so that some are equal."""
    length = int(rng.integers(1, 9))
    return Sample(
        query,
        rng.choice([5, 16, 17], length),  # a space and two digits
        -rng.integers(1, 256, length) / 64,  # the buffer keeps fewer bits than float32 has, and these need few
        rng.integers(0, 64, length) / 64,  # whose sums are exact, in any order
        finish="stop" if right or rng.random() < 0.4 else "length",
        outcome=right,
        reward=float(right),
        reward_parts={"correct": float(right)},
        context=context,
        policy_version=version,
    )


def batch(seed: int) -> tuple[list[Group], dict[str, list[Sample]]]:
    """A batch of mixed, solve-none and solve-all groups, some with reflection, and the past of some, oldest first."""
    rng = np.random.default_rng(seed)
    groups: list[Group] = []
    past: dict[str, list[Sample]] = {}
    for number in range(6):
        query = Query(f"q{number}", "1+1=")
        contexts = [PLAIN, REFLECTION] if rng.random() < 0.4 else [PLAIN]
        for context in contexts:
            share = rng.choice([0.0, 0.5, 1.0])
            right = rng.random(int(rng.integers(1, 9))) < share
            samples = [recorded(rng, query.id, bool(r), context, VERSION) for r in right]
            groups.append(Group(query, tuple(samples), np.array(PROMPTS[context.kind]), context))
        past[query.id] = [
            recorded(rng, query.id, bool(rng.random() < 0.5), REFLECTION if rng.random() < 0.3 else PLAIN, version)
            for version in sorted(rng.integers(0, VERSION, int(rng.integers(0, 9))))
        ]
    return groups, past


def answer(sample: Sample) -> object:
    """The sample as the example knows it."""
    assert sample.entropies is not None
    return nano.Answer(
        PROMPTS[sample.context.kind],
        sample.tokens.tolist(),
        sample.logprobs.tolist(),
        sample.entropies.tolist(),
        sample.truncated,
        sample.query_id,
        sample.context.kind == "reflection",
        bool(sample.outcome),
    )


def answers(samples: Sequence[Sample]) -> list[object]:
    return [answer(sample) for sample in samples]


def from_buffer(past: dict[str, list[Sample]], path: Path) -> dict[str, list[Sample]]:
    """The history as training reads it from the sample buffer."""
    with SampleBuffer(path) as buffer:
        buffer.add([sample for samples in past.values() for sample in samples])
        right = buffer.history(past, outcome=True, distinct=True)
        wrong = buffer.history(past, outcome=False, context="plain", distinct=True)
    return {query: right[query] + wrong[query] for query in past}


def both(seed: int, folder: Path) -> tuple[StepResult, list[list[object]]]:
    """What the method and the example make of the same batch; the example's rows group by group."""
    groups, past = batch(seed)
    history = from_buffer(past, folder / f"{seed}.sqlite")
    result = step(groups, SETTINGS, history=history, policy_version=VERSION)
    queries = sum(group.context == PLAIN for group in groups)
    return result, [nano.compare(answers(g.samples), answers(past[g.query.id]), queries) for g in groups]


# ---------------------------------------------------------------- the same decisions


@pytest.mark.parametrize("seed", range(40))
def test_groups_and_advantages_are_those_of_the_method(seed: int, tmp_path: Path) -> None:
    result, compared = both(seed, tmp_path)
    for mixed, rows in zip(result.groups, compared, strict=True):
        assert [row.answer.tokens for row in rows] == [member.sample.tokens.tolist() for member in mixed.members]
        assert [row.replayed for row in rows] == [False] * len(mixed.group) + [True] * len(mixed.replayed)
        assert [row.advantage for row in rows] == pytest.approx(mixed.advantages, abs=1e-6)
        assert any(row.advantage for row in rows) == mixed.teaches


def test_the_recorded_batches_hold_every_case(tmp_path: Path) -> None:
    results = [both(seed, tmp_path)[0] for seed in range(40)]
    total = {name: sum(result.counts[name] for result in results) for name in results[0].counts}
    for name in (
        "groups/solve_none",
        "groups/solve_all",
        "groups/reflection",
        "ranking/groups",
        "replay/cross_context",
    ):
        assert total[name] > 5, name
    for reason in ("joined", "no_history", "mixed", "reflection"):
        assert total[f"replay/{reason}"] > 5, reason
    assert sum(m.ranked > 0 and m.replay == "joined" for result in results for m in result.groups) > 5


@pytest.mark.parametrize("seed", range(40))
def test_weights_and_loss_are_those_of_the_method(seed: int, tmp_path: Path) -> None:
    result, compared = both(seed, tmp_path)
    # Where SERR's rewards average out at 0 only up to rounding, what has advantage 0 in the one has 1e-17 in the other.
    rows = [row for group in compared for row in group if abs(row.advantage) > 1e-9]
    weighted = [w for w in result.weighted if abs(w.advantage) > 1e-9]
    assert [row.weight for row in rows] == pytest.approx([w.weight for w in weighted])
    assert [row.prompt for row in rows] == [w.prompt.tolist() for w in weighted]
    assert [row.answer.prompt != row.prompt for row in rows] == [w.other_context for w in weighted]
    if not rows:
        return
    behaviour_T = torch.cat([torch.from_numpy(w.sample.logprobs.copy()) for w in weighted])
    torch.manual_seed(seed)
    moved_T = behaviour_T + 0.5 * torch.randn(len(behaviour_T))  # beyond the clip, and beyond the cap of the weights
    # The departures that the example names: neither gate nor dual clip.
    objective = ObjectiveSettings(ratio_gate=None, dual_clip=None)
    ours_T, theirs_T = moved_T.clone().requires_grad_(), moved_T.clone().requires_grad_()
    loss = nano.surrogate(ours_T, rows)
    expected = policy_loss(theirs_T, token_batch(weighted, torch.device("cpu")), objective).loss
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(ours_T.grad, theirs_T.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_ranking_rewards_are_serr_less_its_mean(seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = [recorded(rng, "q", False, PLAIN, 0) for _ in range(8)]
    cut = [sample for sample in samples if sample.truncated]
    serr = structural_entropy_rewards(
        [s.entropies for s in cut if s.entropies is not None], peak_fraction=0.2, max_reward=0.1
    )
    expected = iter(np.array(serr) - np.mean(serr))
    assert nano.ranking_rewards(answers(samples)) == pytest.approx(
        [next(expected) if sample.truncated else 0.0 for sample in samples], abs=1e-12
    )


def test_repeated_texts_fill_up_the_replay_of_the_method_and_not_the_examples() -> None:
    rng = np.random.default_rng(0)
    wrong, success = recorded(rng, "q", False, PLAIN, VERSION), recorded(rng, "q", True, PLAIN, 1)
    group = Group(Query("q", "1+1="), (wrong,), np.array(PROMPTS["plain"]))
    assert len(choose_replay(group, [success, success], SETTINGS.replay, policy_version=VERSION).samples) == 2
    assert len(nano.replay(answers([wrong]), answers([success, success]))) == 1


@pytest.mark.parametrize("right", [3, 4, 5])  # of 16 plain answers: τ is a quarter
def test_hard_queries_get_the_reflection_prompts_of_the_method(right: int) -> None:
    rng = np.random.default_rng(right)
    random.seed(right)
    tokenizer = AutoTokenizer.from_pretrained(nano.MODEL)
    query = Query("3+4+5=", "3+4+5=")
    asked = [(number < right, PLAIN) for number in range(16)] + [(number < 4, REFLECTION) for number in range(12)]
    past = [recorded(rng, query.id, *asked[i], version=0) for i in rng.permutation(len(asked))]
    newest = [sample for sample in past if sample.outcome is False][-SETTINGS.reflection.candidates :]
    assert len(newest) == 16 < sum(sample.outcome is False for sample in past)
    built = [reflection_prompt(query, sample.tokens.tolist(), tokenizer, SETTINGS.reflection) for sample in newest]
    expected = {tuple(prompt) for prompt in built if prompt is not None}
    for epoch in (1, 2):
        words = {nano.reflect(query.id, answers(past), epoch, tokenizer) for _ in range(500)}
        if is_hard(right / 16, epoch, SETTINGS.reflection):
            assert {tuple(tokenizer.encode(text)) for text in words} == expected
        else:
            assert words == {None}
    assert nano.reflect(query.id, [], 2, tokenizer) is None


# ---------------------------------------------------------------- with the model


def test_answers_carry_the_log_probs_and_entropies_of_the_policy() -> None:
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(nano.MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(nano.MODEL)
    prompts = [tokenizer.encode(text) for text in ("3+4=", "9+8+7+6+5+4+3+2=", "1+2+3=")]
    groups = nano.generate(policy, prompts, 4, tokenizer.eos_token_id)
    assert [len(group) for group in groups] == [4, 4, 4]
    for prompt, group in zip(prompts, groups, strict=True):
        for drawn in group:
            assert drawn.prompt == prompt
            assert (drawn.tokens[-1] == tokenizer.eos_token_id) != drawn.truncated
            assert tokenizer.eos_token_id not in drawn.tokens[:-1]
            assert len(drawn.tokens) == nano.MAX_TOKENS or not drawn.truncated
            with torch.no_grad():  # one sequence at a time, without padding and without a cache
                logits_TV = policy(torch.tensor([prompt + drawn.tokens])).logits[0, len(prompt) - 1 : -1]
            distribution = torch.distributions.Categorical(logits=logits_TV)
            logprobs = distribution.log_prob(torch.tensor(drawn.tokens))
            torch.testing.assert_close(torch.tensor(drawn.logprobs), logprobs, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(torch.tensor(drawn.entropies), distribution.entropy(), atol=1e-4, rtol=1e-4)
    rows = [nano.Row(drawn.prompt, drawn, 1.0, 1.0, False) for group in groups for drawn in group]
    drawn_N = torch.tensor([logprob for row in rows for logprob in row.answer.logprobs])
    torch.testing.assert_close(nano.answer_logprobs(policy, rows).detach(), drawn_N, atol=1e-4, rtol=1e-4)


def test_a_short_run_prints_both_accuracies_and_moves_the_weights(tmp_path: Path) -> None:
    size = ["--problems", "8", "--queries", "8", "--steps", "3"]
    run = subprocess.run(
        [sys.executable, NANO, *size, "--out", tmp_path / "policy"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    for when in ("before", "after"):
        assert re.search(rf"^held-out accuracy {when} training: \d+\.\d%$", run.stdout, re.MULTILINE)
    reflected = [int(count) for count in re.findall(r"reflected (\d+)", run.stdout)]
    assert reflected[0] == 0 < max(reflected[1:])  # from the second epoch on
    before = load_file(nano.MODEL / "model.safetensors")
    after = load_file(tmp_path / "policy/model.safetensors")
    assert before.keys() == after.keys()
    assert all(after[name].isfinite().all() for name in after)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_it_stays_one_file_of_one_sitting() -> None:
    source = NANO.read_text()
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert {module for module in imported if module and module.startswith("r3")} == {"r3.tasks.arithmetic"}
    assert len(source.splitlines()) <= 250


# `examples/own_loop.py`: it runs, hands over what the policy really drew, and moves the policy the right way.


OWN_LOOP = ROOT / "examples" / "own_loop.py"
QUESTIONS = {problem.question: problem.answer for problem in problem_set(0, 12, (3, 4, 5, 8), "heldout")}


own_loop = load(OWN_LOOP)
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
    run = subprocess.run([sys.executable, OWN_LOOP], capture_output=True, text=True, check=False)
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
    imported = {node.module for node in ast.walk(ast.parse(OWN_LOOP.read_text())) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name and name.startswith("r3")} == {
        "r3.method.objective",
        "r3.tasks.arithmetic",
    }
