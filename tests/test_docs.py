"""What documents name and show is so: the settings and metrics of troubleshooting.md are there, and the example of
rewards.md and of README, the code of python.md and the notebook run as they are written.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from r3.cli import main
from r3.config import Config
from r3.config_text import all_keys
from tests.tokenizing import CHAT_TEMPLATE
from tests.train.tiny import ROOT, overrides, read_metrics, save_model

NAMES = {"json": "questions.jsonl", "python": "my_rewards.py", "yaml": "mine.yaml"}
NOTEBOOK = ROOT / "examples" / "r3_in_a_notebook.ipynb"


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("run")
    assert main(["train", "--quiet", *overrides(folder, method__reflection__give_up_after=4)]) == 0
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {key for line in lines for key in line}


def test_settings_and_metrics_of_the_troubleshooting_page_exist(metrics: set[str]) -> None:
    named = re.findall(r"`([a-z_]+(?:[./][a-z_]+)+)(?:=[^`]*)?`", (ROOT / "docs" / "troubleshooting.md").read_text())
    settings = {name for name in named if "/" not in name} - {"metrics.jsonl"}
    assert settings
    assert settings <= set(all_keys(Config))
    counts = {name for name in named if "/" in name}
    # Counted only once they happen: a run this small need not meet every reason.
    seldom = {"replay/too_old", "reflection/too_long", "reflection/given_up"}
    assert counts - seldom <= metrics


def test_the_example_of_the_rewards_page_runs_as_it_stands(tmp_path: Path) -> None:
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
    (row,) = re.findall(r"```json\n(.*?)```", page, flags=re.S)
    (functions,) = [block for block in re.findall(r"```python\n(.*?)```", page, flags=re.S) if "my_rewards.py" in block]
    (commands,) = [block for block in re.findall(r"```\n(.*?)```", page, flags=re.S) if "my_rewards.right" in block]
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


def test_the_guides_code_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)
    module, *rest = blocks
    assert module.startswith("# judges.py\n")
    (tmp_path / "judges.py").write_text(module)
    (tmp_path / "guide.py").write_text("\n".join(rest))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "guide.py"], cwd=tmp_path, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "http://127.0.0.1" in done.stdout
    steps = [json.loads(line)["step"] for line in (tmp_path / "runs/sums/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(7))


@pytest.mark.filterwarnings("default")  # the libraries' own deprecations are theirs
def test_the_notebook_runs_in_a_kernel(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs a notebook's kernel: pip install nbclient ipykernel")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # committed without the results of a machine
    nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = "".join(output.get("text", "") for output in outputs)
    shown = "".join(str(output["data"]) for output in outputs if "data" in output)
    assert "step 4/4" in texts
    assert "('callback', " in shown
    assert re.search(r"\d\.\d% \[\d", texts)
    assert "http://127.0.0.1" in shown
