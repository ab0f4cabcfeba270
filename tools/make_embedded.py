"""Make the bundled model: a character-level Llama of 0.67 M parameters, warm-started on careless written working.

    python -m tools.make_embedded --out model

One command makes the whole folder (config, weights, tokenizer) from nothing, the same from the same seed, and prints
what the model can do. `r3.tasks.arithmetic` is the task, `tools.writer` has the bad habits put into the working.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from r3.config import embedded_recipe
from r3.models import Shape, character_tokenizer, untrained
from r3.rollout import Request, Sampling
from r3.rollout.transformers import TransformersEngine
from r3.tasks.arithmetic import Problem, draw_problem, judge, problem_set
from tools.writer import CAREFUL, Habits, write_working

POOL = 16  # batches drawn at a time and sorted by length
TEMPLATE = str(embedded_recipe()["method"]["reflection"]["template"])
ELISION = str(embedded_recipe()["method"]["reflection"]["cut_marker"])


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights."""

    seed: int = 0
    difficulties: tuple[int, ...] = (3, 4, 5, 6, 7, 8, 9, 10)
    habits: Habits = field(default_factory=Habits)
    retry_slips: float = 0.5  # slips in a retry after a wrong attempt, as a share of the plain writer's
    reflection_share: float = 0.25  # of the examples are retries
    attempt_limit: int = 64  # characters of a wrong attempt shown in a retry
    elided_share: float = 0.1  # of the retries show the attempt with its middle left out
    response_limit: int = 72  # characters of a response learnt from; a longer one is cut, without its end
    shape: Shape = field(default_factory=lambda: Shape(context=256))
    grown: float = 0.4  # share of the steps by which the problems have grown from 3 terms to full length
    careful: float = 0.5  # share of the steps taught by careful writers alone
    careless: float = 0.65  # share of the steps from which on all writers are careless
    steps: int = 1500
    batch: int = 64
    rows: int = 32  # of a batch at a time, which is faster on a CPU
    learning_rate: float = 2e-3
    warmup: float = 0.05
    weight_decay: float = 0.01


@dataclass(frozen=True)
class Example:
    """One supervised example; `ended` says whether the response stops by itself."""

    prompt: str
    response: str
    ended: bool


def is_right(problem: Problem, response: str, *, truncated: bool) -> bool:
    """Whether the task's verifier would call the response right."""
    return not truncated and judge(problem.answer, response).right


def reflection_prompt(question: str, attempt: str) -> str:
    """The reflection prompt of the embedded recipe."""
    return TEMPLATE.replace("{question}", question).replace("{attempt}", attempt)


def shorten(text: str, limit: int) -> str:
    """Leave out a text's middle if it is longer than the limit."""
    if len(text) <= limit:
        return text
    head = (limit - len(ELISION)) // 2
    return text[:head] + ELISION + text[len(text) - (limit - len(ELISION) - head) :]


def wrong_attempt(problem: Problem, rng: random.Random, recipe: Recipe) -> str:
    """A realistic wrong response: one with a slip, or one cut off by a length limit."""
    while True:
        attempt = write_working(problem, rng, recipe.habits)
        truncated = len(attempt) > recipe.attempt_limit
        if truncated:
            attempt = attempt[: recipe.attempt_limit]
        if not is_right(problem, attempt, truncated=truncated):
            break
        if rng.random() < 0.05:  # some problems leave hardly any room for a slip
            attempt = write_working(problem, rng, replace(recipe.habits, miscount=1.0))[: recipe.attempt_limit]
            break
    if rng.random() < recipe.elided_share:
        attempt = shorten(attempt, rng.randint(24, recipe.attempt_limit))
    return attempt


def draw_example(rng: random.Random, recipe: Recipe, progress: float) -> Example:
    """One example: the plain question, or a retry after a wrong attempt.

    The procedure is taught first, on problems that grow (a tiny model hardly finds it in long, careless working), and
    the bad habits afterwards.
    """
    longest = 3 + (max(recipe.difficulties) - 3) * progress / recipe.grown
    problem = draw_problem(rng, rng.choice([level for level in recipe.difficulties if level <= longest]), "warm")
    is_careless = rng.random() < (progress - recipe.careful) / (recipe.careless - recipe.careful)
    prompt, habits = problem.question, recipe.habits if is_careless else CAREFUL
    if rng.random() < recipe.reflection_share:
        prompt = reflection_prompt(problem.question, wrong_attempt(problem, rng, recipe))
        habits = replace(
            habits, drop_carry=habits.drop_carry * recipe.retry_slips, miscount=habits.miscount * recipe.retry_slips
        )
    response = write_working(problem, rng, habits)
    return Example(prompt, response[: recipe.response_limit], len(response) <= recipe.response_limit)


def batches(recipe: Recipe) -> Iterator[list[Example]]:
    """Batches of examples of similar length."""
    rng = random.Random(recipe.seed)
    for start in range(0, recipe.steps, POOL):
        pool = [draw_example(rng, recipe, start / recipe.steps) for _ in range(POOL * recipe.batch)]
        pool.sort(key=lambda example: len(example.prompt) + len(example.response))
        chunks = [pool[first : first + recipe.batch] for first in range(0, len(pool), recipe.batch)]
        rng.shuffle(chunks)
        yield from chunks


def collate(examples: list[Example], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels (the responses alone), padded on the right, so that causal attention needs no mask."""
    rows = []
    for example in examples:
        ids = tokenizer.encode(example.prompt + example.response) + [tokenizer.eos_token_id] * example.ended
        rows.append((ids, len(example.prompt)))
    width = max(len(ids) for ids, _ in rows)
    ids_bt = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels_bt = torch.full((len(rows), width), -100)
    for row, (ids, prompt_length) in enumerate(rows):
        ids_bt[row, : len(ids)] = torch.tensor(ids)
        labels_bt[row, prompt_length : len(ids)] = ids_bt[row, prompt_length : len(ids)]
    return ids_bt, labels_bt


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
    """Supervised warm start: AdamW, linear warm-up, cosine decay to a tenth."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay
    )
    warmup = max(1, round(recipe.warmup * recipe.steps))
    started, recent = time.monotonic(), 0.0
    model.train()
    for step, examples in zip(range(1, recipe.steps + 1), batches(recipe), strict=False):
        progress = max(0.0, (step - warmup) / max(1, recipe.steps - warmup))
        scale = min(1.0, step / warmup) * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * scale
        learnt = sum(len(example.response) + example.ended for example in examples)
        mean_loss = 0.0
        for start in range(0, len(examples), recipe.rows):
            ids_bt, labels_bt = collate(examples[start : start + recipe.rows], tokenizer)
            logits_btv = model(input_ids=ids_bt).logits
            loss = cross_entropy(logits_btv[:, :-1].flatten(0, 1), labels_bt[:, 1:].flatten(), reduction="sum") / learnt
            loss.backward()
            mean_loss += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent = mean_loss if step == 1 else 0.95 * recent + 0.05 * mean_loss
        if step % 50 == 0 or step == recipe.steps:
            print(f"step {step:5d}  loss {recent:.4f}  {time.monotonic() - started:6.0f} s", flush=True)
    model.eval()


def sample(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], count: int, limit: int
) -> list[list[tuple[str, bool]]]:
    """`count` samples at temperature 1 for each prompt: the text, and whether the length limit cut it."""
    requests = [Request(np.array(tokenizer.encode(text), np.int32), count, seed) for seed, text in enumerate(prompts)]
    answers: list[list[tuple[str, bool]]] = [[] for _ in prompts]
    engine = TransformersEngine(model, max_rows=256)
    for response in engine.generate(requests, Sampling(limit, (int(tokenizer.eos_token_id),))):
        text = str(tokenizer.decode(response.tokens.tolist(), skip_special_tokens=True))
        answers[response.request].append((text, response.finish == "length"))
    return answers


def measure(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    difficulties: tuple[int, ...],
    limit: int,
    size: int = 8,
) -> dict[str, object]:
    """Figures over groups of `size` samples for 40 held-out problems of each difficulty, plain and on reflection."""
    problems = problem_set(0, 40 * len(difficulties), difficulties, "heldout")
    groups = sample(model, tokenizer, [problem.question for problem in problems], size, limit)
    right = [
        [is_right(problem, text, truncated=cut) for text, cut in group]
        for problem, group in zip(problems, groups, strict=True)
    ]
    hard = [
        (problem, next(text for (text, _), ok in zip(group, marks, strict=True) if not ok), sum(marks))
        for problem, group, marks in zip(problems, groups, right, strict=True)
        if sum(marks) <= size // 4
    ]
    retries = sample(model, tokenizer, [reflection_prompt(p.question, attempt) for p, attempt, _ in hard], size, limit)
    retried = [
        is_right(problem, text, truncated=cut)
        for (problem, _, _), group in zip(hard, retries, strict=True)
        for text, cut in group
    ]
    per_level: dict[int, list[bool]] = {}
    for problem, marks in zip(problems, right, strict=True):
        per_level.setdefault(len(problem.terms), []).extend(marks)
    total = len(problems) * size
    return {
        "limit": limit,
        "pass@1": round(sum(map(sum, right)) / total, 3),
        "by difficulty": {level: round(sum(marks) / len(marks), 3) for level, marks in sorted(per_level.items())},
        "solve-none": round(sum(not any(marks) for marks in right) / len(right), 3),
        "solve-all": round(sum(all(marks) for marks in right) / len(right), 3),
        "truncated": round(sum(cut for group in groups for _, cut in group) / total, 3),
        "mean length": round(sum(len(text) + (not cut) for group in groups for text, cut in group) / total, 1),
        "hard problems": len(hard),
        "hard, plain": round(sum(count for *_, count in hard) / (len(hard) * size), 3),
        "hard, reflection": round(sum(retried) / len(retried), 3),
    }


def main() -> None:
    """Make, train, save and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("model"))
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--drop-carry", type=float, default=Habits.drop_carry)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    habits = Habits(drop_carry=arguments.drop_carry)
    recipe = Recipe(seed=arguments.seed, steps=arguments.steps, habits=habits)
    tokenizer = character_tokenizer(recipe.shape.context)
    model = untrained(recipe.shape, tokenizer, seed=recipe.seed)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters", flush=True)
    train(model, tokenizer, recipe)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    (arguments.out / "warm_start.json").write_text(json.dumps(asdict(recipe), indent=2) + "\n")
    for difficulties, limit in (((3, 4, 5, 6, 7, 8), 44), ((8, 9, 10), 56)):
        print(json.dumps(measure(model, tokenizer, difficulties, limit)), flush=True)


if __name__ == "__main__":
    main()
