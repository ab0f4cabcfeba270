"""What documents name and show is so: each code block runs in a test, or its commands are checked."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer

from r3.cli import main, parser
from r3.commands.eval_tasks import ALL_TASKS, OWN_TASK
from r3.config import Config, load_config
from r3.config_text import all_keys, load_yaml
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


# Every code block of the documents is run here or in a test that is named here, or its commands are checked. Commands
# are read by the parser of `r3` itself, and their settings, sets, recipes, make targets and extras are looked up. What
# is shown of `--dry-run` is printed anew. docs/results/ and docs/pilots.md are written by a tool, which
# tests/compare/test_results_page.py checks.


PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
RUN_BY = {
    ("README.md", "# my_rewards.py"): "tests/test_docs.py",
    ("README.md", "import r3"): "tests/test_algorithm.py",
    ("docs/rewards.md", "import re"): "tests/test_docs.py",
    ("docs/evaluation.md", "from r3.evaluate.run import Benchmark, evaluate_model"): "tests/test_docs.py",
    ("docs/training.md", "# my_judges.py"): "tests/test_docs.py",
    ("docs/trl.md", "import random"): "tests/test_docs.py",
    ("docs/trl.md", 'args = R3Config(output_dir="sums-dapo", '): "tests/test_docs.py",
    ("docs/verifier.md", "from r3.verify import MathVerifier"): "tests/test_docs.py",
}
"""Which test runs a block of Python, by its page and how it begins; those of docs/python.md run as one program."""


class Block(NamedTuple):
    page: str
    language: str
    text: str


def blocks(*languages: str, page: str | None = None) -> list[Block]:
    found = []
    for name in PAGES if page is None else [page]:
        for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / name).read_text("utf-8"), re.S | re.M):
            if language in languages:
                found.append(Block(name, language, text))
    return found


def code(page: str, begins: str) -> str:
    (text,) = [block.text for block in blocks("python", page=page) if block.text.startswith(begins)]
    return text


def commands() -> list[tuple[str, list[str]]]:
    """Every command line that a page shows, with its page: without prompt, comment, and what is optional."""
    found = []
    for block in blocks("", "sh", "bash", "console"):
        for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
            shown = re.split(r"\s{3,}", line.removeprefix("$ "))[0]
            typed = re.sub(r"(?<= )\[[^\]]*\]", "", shown)
            if re.match(r"(\w+=\S+ )*(r3|make|torchrun|accelerate|python|pip|recipes/\S+) [^─]", typed):
                found.append((block.page, shlex.split(typed, comments=True)))
    return found


def test_every_block_of_python_is_run_somewhere() -> None:
    there = [block for block in blocks("python") if block.page != "docs/python.md"]
    known = {(page, begins) for block in there for page, begins in RUN_BY if _is(block, page, begins)}
    assert known == set(RUN_BY)
    assert [block for block in there if not any(_is(block, *of) for of in RUN_BY)] == []
    for (page, _), test in RUN_BY.items():
        assert Path(page).name in (ROOT / test).read_text()


def _is(block: Block, page: str, begins: str) -> bool:
    return block.page == page and block.text.startswith(begins)


def test_languages_are_those_that_are_looked_at() -> None:
    known = {"", "sh", "bash", "console", "python", "yaml", "json"}
    named = [line for page in PAGES for line in re.findall(r"^```(\w+)$", (ROOT / page).read_text("utf-8"), re.M)]
    assert set(named) <= known


@pytest.mark.parametrize(("page", "typed"), commands(), ids=lambda given: given if isinstance(given, str) else None)
def test_a_command_that_is_shown_is_one(page: str, typed: list[str]) -> None:
    while re.fullmatch(r"[A-Z]\w*=\S*", typed[0]):
        typed = typed[1:]
    if "-m" in typed and typed[typed.index("-m") + 1] == "r3":  # torchrun … -m r3 train …
        typed = typed[typed.index("-m") + 1 :]
    program, *rest = typed
    for argument in rest:
        if argument.startswith("recipes/"):
            assert (ROOT / argument).is_file(), argument
    if program == "r3":
        _check_r3(rest)
    elif program == "make":
        (target,) = rest
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
    elif program == "python":
        there = importlib.util.find_spec(rest[1]) is not None if rest[0] == "-m" else (ROOT / rest[0]).is_file()
        assert there
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        ours = re.findall(r"(?:r3-rl|\.)\[([\w,-]+)\]", " ".join(rest))
        assert {name for names in ours for name in names.split(",")} <= extras.keys()
    else:
        assert (ROOT / program).is_file()


def _check_r3(typed: list[str]) -> None:
    given = ["1" if argument == "N" else argument for argument in typed]
    arguments, rest = parser().parse_known_args(given)
    assert not [argument for argument in rest if argument.startswith("-")]
    recipe = getattr(arguments, "recipe", None)
    overrides = [*getattr(arguments, "overrides", []), *rest, *([recipe] if recipe and "=" in recipe else [])]
    keys = {override.partition("=")[0] for override in overrides}
    assert keys <= {*all_keys(Config), "method"}
    tasks = getattr(arguments, "tasks", None) or []
    assert all(name in (*ALL_TASKS, OWN_TASK) or Path(name).suffix for name in tasks)
    against = getattr(arguments, "against", None) or ""
    assert all(name in ALL_TASKS for name in against.split(",") if name)


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.page)
def test_a_recipe_that_is_shown_is_valid(block: Block) -> None:
    recipe = load_yaml(block.text, block.page)
    if recipe is None:  # the editor's line, a comment
        assert block.text.startswith("# yaml-language-server: $schema=r3.schema.json")
        assert "`r3 train --schema > r3.schema.json`" in (ROOT / block.page).read_text()
    else:
        load_config(recipe)


def test_rows_that_are_shown_are_rows() -> None:
    shown = blocks("json")
    assert shown
    for block in shown:
        assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())


@pytest.mark.parametrize("page", ["docs/training.md", "docs/scale.md"])
def test_a_dry_run_prints_what_the_page_shows(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = [block for block in blocks("", page=page) if block.text.startswith("$ r3 train") and "dry" in block.text]
    command, *shown = block.text.splitlines()
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("R3_DATA", raising=False)
    assert main(shlex.split(command)[2:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert shown[0] != "…" or shown[1:] == [line for line in printed if line in shown]
    assert shown[0] == "…" or shown == printed


def test_the_judge_of_the_training_page() -> None:
    names: dict[str, Any] = {}
    exec(code("docs/training.md", "# my_judges.py"), names)
    judge = names["close_enough"]
    assert judge("6 * 7 = 42.0004", answer="42", id="q0")
    assert not judge("6 * 7 = 42.1", answer="42", id="q0")
    assert not judge("I do not know.", answer="42", id="q0")


def test_the_verifiers_page_says_what_it_answers() -> None:
    text = code("docs/verifier.md", "from r3.verify import MathVerifier")
    names: dict[str, Any] = {"completion": r"\boxed{2}", "gold": "3"}
    lines = [re.sub(r"^    (\w.*?)\s+#.*$", r"    said.append(\1)", line) for line in text.splitlines()]
    exec("said = []\n" + "\n".join(lines).replace(", …]", "]"), names)
    one, many, counts = names["said"]
    assert (one.right, one.reason) == (True, "match")
    assert [verdict.right for verdict in many] == [False]
    assert counts["match"] == 1


def test_the_evaluation_pages_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from r3.method.reflection import plain_prompt
    from r3.policy import ModelSettings
    from r3.policy.model import Policy
    from r3.rollout import Sampling
    from r3.rollout.transformers import TransformersEngine
    from r3.verify import FunctionJudge

    monkeypatch.setenv("R3_DATA", str(ROOT / "tests" / "data"))
    policy = Policy.load(ModelSettings(path=str(save_model(tmp_path / "model", context=4096)), device="cpu"))
    policy.tokenizer.chat_template = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    names: dict[str, Any] = {
        "judge": FunctionJudge("tests.train.tiny.judge"),
        "engine": TransformersEngine(policy.base, max_rows=64),
        "tokenizer": policy.tokenizer,
        "sampling": Sampling(max_tokens=2, stop_tokens=policy.stop_tokens),
        "out": tmp_path / "out",
        "encode": lambda query: plain_prompt(query, policy.tokenizer),
    }
    text = code("docs/evaluation.md", "from r3.evaluate.run import Benchmark, evaluate_model")
    exec(text.replace("sampling, 16, out", "sampling, 1, out"), names)
    assert names["results"].as_dict()["tasks"]["aime24"]["problems"] == 30


def test_the_trl_pages_examples(tmp_path: Path) -> None:
    example = code("docs/trl.md", "import random").replace("num_train_epochs=4", "num_train_epochs=1")
    resampling = code("docs/trl.md", 'args = R3Config(output_dir="sums-dapo", ')
    resampling = resampling.replace("epsilon_high=0.28)", "epsilon_high=0.28, bf16=False, use_cpu=True)")
    (tmp_path / "example.py").write_text(f"{example}\n{resampling}\nassert args.r3_method")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    names = r"epoch 1 reward \d\.\d+ r3/groups/teaching \d+\.\d+ r3/replay/samples 0.00 r3/groups/reflection 0.00"
    assert re.search(names, done.stdout)
