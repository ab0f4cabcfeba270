"""A tiny real setting for `r3 train`: a random two-layer Llama, a file of questions, and a judge with even odds.

The model knows nothing, so outcomes are chance, and the judge makes them vary by query: some are never solved, some
nearly always, some now and then. Every mechanism has something to do within a few steps of a second each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from tests.tokenizing import char_tokenizer

ROOT = Path(__file__).parents[2]
transformers_logging.disable_progress_bar()


def judge(completion: str, answer: str, **_: Any) -> bool:
    """Right if the first character falls into the share of characters that `answer` (in percent) allows."""
    return bool(completion) and (ord(completion[0]) * 7919 % 100) < float(answer)


def judged(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, **_: Any) -> float:
    """The same as a user of verl writes it (`reward.custom_reward_function`)."""
    assert data_source == "contract"
    return float(judge(solution_str, ground_truth))


def save_model(folder: Path, *, seed: int = 0, context: int = 256, tied: bool = False) -> Path:
    """A random Llama with a character tokenizer, in Hugging Face format; its answers end by chance."""
    tokenizer = char_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # end-of-text likely enough that most answers end within a dozen tokens
        model.lm_head.weight[tokenizer.eos_token_id] *= 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_task(path: Path, *, problems: int = 12) -> Path:
    """Questions that are solved never, rarely, often or always, in turn."""
    shares = [0, 10, 30, 60, 90, 100]
    rows = [
        {"id": f"q{i}", "problem": f"What is {i} + {i}?", "answer": str(shares[i % len(shares)])}
        for i in range(problems)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def helped(folder: Path) -> list[str]:
    """Settings that give the same questions demonstrations, hints and feedback; to be laid over `overrides`.

    Every third demonstration is wrong by the judge, and so is that of each question that no answer solves.
    """
    path = save_task(folder / "helped.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for i, row in enumerate(rows):
        letters = [c for c in "abcdefghijklmnopqrstuvwxyz" if judge(c, row["answer"]) is (i % 3 > 0)]
        row |= {"trace": f"{(letters or ['z'])[0]}bc", "tips": ["a ", "a b "], "critic": f"No {i}."}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *(f"task.path={path}", "task.demonstration_column=trace", "task.hint_column=tips"),
        *("task.feedback_column=critic", "method.hint.template='{question} HINT {hint}'"),
        *("method.hint.max_prompt_tokens=200", "method.critique.max_prompt_tokens=200"),
        "method.critique.template='{question} NOT {attempt} FOR {feedback}'",
    ]


def overrides(folder: Path, **more: Any) -> list[str]:
    """`key=value` settings of a run that takes a second or two; `more` uses __ for the dot."""
    model, task = folder / "model", folder / "task.jsonl"
    if not model.exists():
        save_model(model)
    if not task.exists():
        save_task(task)
    settings = {
        "model.path": model,
        "model.device": "cpu",
        "task.name": "file",
        "task.path": task,
        "task.chat": "false",
        "task.instruction": "''",
        "task.verifier": "tests.train.tiny.judge",
        "task.heldout": 4,
        "method": "r3-paper",
        "method.reflection.max_prompt_tokens": 200,
        "method.distill.max_prompt_tokens": 200,
        "method.reflection.template": "'{question} NOT {attempt} BUT '",
        "method.reflection.cut_marker": "'...'",
        "method.ranking.peak_fraction": 0.25,
        "reward.length_bonus": "true",
        "reward.length_limit": 24,
        "rollout.group_size": 4,
        "rollout.max_tokens": 12,
        "rollout.max_rows": 16,
        "train.queries_per_step": 4,
        "train.epochs": 3,
        "train.learning_rate": "1e-3",
        "run.dir": folder / "run",
        "run.seed": 1,
        "run.checkpoint_every": 2,
        "run.threads": 1,
        "run.tensorboard": "false",
    }
    settings |= {key.replace("__", "."): value for key, value in more.items()}
    return [f"{key}={value}" for key, value in settings.items()]


def command(*arguments: str | Path) -> list[str]:
    """`r3 …` as a subprocess's command line."""
    return [sys.executable, "-m", "r3", *map(str, arguments)]


def run_r3(*arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `r3 …` in a process of its own, from the repository's root (where the judge can be imported)."""
    done = subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert not check or done.returncode == 0, done.stderr
    return done


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The run's metrics without what depends on the machine's speed and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    machine = ("seconds/", "tokens_per_second", "memory/")
    return [{key: value for key, value in line.items() if not key.startswith(machine)} for line in lines]
