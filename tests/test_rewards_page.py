"""The examples of docs/rewards.md and of README, as a reader would follow them; the model alone is a tiny one."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from transformers import AutoTokenizer

from tests.tokenizing import CHAT_TEMPLATE
from tests.train.tiny import ROOT, read_metrics, save_model

NAMES = {"json": "questions.jsonl", "python": "my_rewards.py", "yaml": "mine.yaml"}


def test_the_example_runs_as_it_stands(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    for language, name in NAMES.items():
        (block,) = re.findall(rf"```{language}\n(.*?)```", page, flags=re.S)
        assert f"`{name}`" in page
        (tmp_path / name).write_text(block)
    model = chat_model(tmp_path / "model")
    (commands,) = re.findall(r"```\n(r3 .*?)```", page, flags=re.S)
    small = [f"model.path={model}", "rollout.max_tokens=12", "train.queries_per_step=2", "rollout.group_size=4"]
    extra = {
        "train mine": [*small, "run.threads=1", "method.reflection.max_prompt_tokens=900"],
        "eval": ["--samples", "2"],
    }
    for line in commands.splitlines():
        more = next((given for start, given in extra.items() if line.startswith(f"r3 {start}")), [])
        done = in_folder(tmp_path, *line.split()[1:], *more)
        assert done.returncode == 0, done.stderr
    lines = read_metrics(tmp_path / "runs" / "mine")[1:]
    assert len(lines) == 12  # six epochs of four questions
    assert all({"reward/right", "reward/brief"} <= line.keys() for line in lines)
    assert any("reward/working" in line for line in lines)
    shown = in_folder(tmp_path, "show", "runs/mine", "--group", "1/" + first_query(tmp_path / "runs" / "mine"))
    assert "<|system|>You are a careful clerk.<|end|><|user|>A " in shown.stdout
    assert "Reference answer: " in shown.stdout


def test_the_example_of_the_readme(tmp_path: Path) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.S | re.M)
    (row,) = [text for language, text in blocks if language == "json"]
    (functions,) = [text for language, text in blocks if language == "python" and "my_rewards.py" in text]
    (commands,) = [text for language, text in blocks if not language and "my_rewards.right" in text]
    rows = [{**json.loads(row), "question": f"What is {i} + {i}?", "answer": str(i)} for i in range(12)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(functions)
    model = chat_model(tmp_path / "model")
    train, evaluate = (shlex.split(line, comments=True)[1:] for line in commands.replace("\\\n", " ").splitlines())
    small = ["task.heldout=4", "rollout.max_tokens=12", "rollout.group_size=4", "train.queries_per_step=4"]
    more = ["train.steps=1", "run.threads=1", "method.reflection.max_prompt_tokens=900"]
    train = [argument.replace("=MODEL", f"={model}") for argument in train]
    done = in_folder(tmp_path, *train, *small, *more)
    assert done.returncode == 0, done.stderr
    done = in_folder(tmp_path, *evaluate, "--samples", "2")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "evals" / "mine" / "results.md").exists()


def chat_model(folder: Path) -> Path:
    """A tiny one with a chat template."""
    model = save_model(folder, context=1024)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(model)
    return model


def first_query(run: Path) -> str:
    from r3.view.runs import open_runs

    return str(open_runs([run])[0].tables.table(1).summaries[0]["query"])


def in_folder(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`r3 …` as its script is started: without the current folder on Python's path."""
    start = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); from r3.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", start, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
