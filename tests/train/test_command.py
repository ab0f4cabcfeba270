"""What a person meets around a run: its length, what comes next, names that are wrong, streams, numbers that are none;
and `--dry-run`, which refuses what training would refuse, with exit code 2, and writes nothing.

Covers r3.commands.train, r3.policy.source, r3.train.dryrun, r3.train.build, r3.train.checks.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import queue
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from r3.cli import main
from r3.config import load_config
from r3.policy import source, world
from r3.train import build
from r3.train.dryrun import dry_run
from tests.tokenizing import char_tokenizer
from tests.train.test_bad_input import refused
from tests.train.tiny import ROOT, command, overrides, read_metrics, run_r3, save_model, save_task


def test_steps_go_beyond_the_epochs_as_max_steps_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = overrides(tmp_path, train__epochs=1, train__steps=5, method="grpo")
    assert main(["train", "--dry-run", *settings]) == 0
    assert "8 queries, 2.5 epochs, 5 steps" in capsys.readouterr().out
    assert main(["train", "--quiet", *settings]) == 0
    lines = read_metrics(tmp_path / "run")
    assert [(line["step"], line["epoch"]) for line in lines[1:]] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)]
    whole = overrides(tmp_path, train__epochs=3, method="grpo", run__dir=tmp_path / "whole")
    assert main(["train", "--quiet", *whole]) == 0
    longer = read_metrics(tmp_path / "whole")
    assert [line["reward"] for line in longer[1:6]] == [line["reward"] for line in lines[1:]]


def next_command(text: str) -> list[str]:
    line = next(line for line in text.splitlines() if "the same with" in line)
    return shlex.split(line[line.index("r3 train") :])


def test_next_is_the_users_own_command_with_another_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "my recipe.yaml"
    recipe.write_text("rollout: {temperature: 0.9}\n")
    settings = overrides(tmp_path, train__steps=1)
    assert main(["train", str(recipe), *settings]) == 0
    command = next_command(capsys.readouterr().out)
    assert command[:3] == ["r3", "train", str(recipe)]
    assert set(settings) - set(command) == {"method=r3-paper", f"run.dir={tmp_path / 'run'}"}
    assert command[-2:] == ["method=grpo", f"run.dir={tmp_path / 'run'}-grpo"]
    assert main(command[1:]) == 0
    other = yaml.safe_load((tmp_path / "run-grpo" / "config.yaml").read_text())
    assert (other["method"]["name"], other["rollout"]["temperature"]) == ("grpo", 0.9)
    back = next_command(capsys.readouterr().out)
    assert back[-2:] == ["method=r3", f"run.dir={tmp_path / 'run'}-grpo-r3"]
    assert main(["train", "--resume", str(tmp_path / "run"), "train.steps=2"]) == 0
    assert next_command(capsys.readouterr().out)[2] == str(tmp_path / "run" / "config.yaml")


def test_a_recipes_paths_lie_beside_it_and_survive_a_resume_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, desk = tmp_path / "project", tmp_path / "desk"
    project.mkdir()
    desk.mkdir()
    save_model(project / "model")
    save_task(project / "task.jsonl")
    sections: dict[str, dict[str, str]] = {}
    for setting in overrides(project, model__path="model", task__path="task.jsonl", train__steps=2):
        key, _, value = setting.partition("=")
        section, _, rest = key.partition(".")
        if rest and "." not in rest and section != "run":
            sections.setdefault(section, {})[rest] = yaml.safe_load(value)
    sections["train"]["learning_rate"] = 1e-3  # type: ignore[assignment]
    (project / "recipe.yaml").write_text(yaml.safe_dump(sections))
    monkeypatch.chdir(desk)
    small = ["method=grpo", "run.threads=1", "run.tensorboard=false", "run.dir=here"]
    assert main(["train", "--quiet", "../project/recipe.yaml", *small]) == 0
    monkeypatch.chdir("/")
    assert main(["train", "--quiet", "--resume", str(desk / "here"), "train.steps=3"]) == 0
    monkeypatch.chdir(project)
    again = ["train", "--quiet", "recipe.yaml", *small, f"run.dir={desk / 'here'}", "train.steps=4"]
    assert main([*again, "--resume", str(desk / "here")]) == 0
    assert read_metrics(desk / "here")[-1]["step"] == 4


HANGING = """
import socket, sys, threading
socket.getaddrinfo = lambda *_, **__: threading.Event().wait()
from r3.cli import main
code = main({arguments})
print("imported torch:", "torch" in sys.modules)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("Qwen/Qwen2.5-0.5B-Instrukt", "cannot be reached: "),
        ("{}/modle", "there is no such folder); did you mean {}/model?"),
        ("./model/no/such", "there is no such folder); give a folder"),
        ("embeded", "cannot be reached: "),
        ("embeded", "did you mean embedded?"),
    ],
)
def test_a_model_that_is_not_there_is_told_without_trying_for_a_minute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: str, told: str
) -> None:
    save_model(tmp_path / "model")
    monkeypatch.setattr(source.constants, "ENDPOINT", "http://127.0.0.1:1")  # nobody listens there
    monkeypatch.setattr(source.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)  # must not be asked
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    source._unreachable.cache_clear()
    message = refused(capsys, "train", *overrides(tmp_path, model__path=path.format(tmp_path)))
    assert told.format(tmp_path) in message
    source._unreachable.cache_clear()


def test_a_hub_that_never_answers_is_not_waited_for(tmp_path: Path) -> None:
    """Without a name server a look-up hangs for half a minute; here it hangs until the test has its answer."""
    done = subprocess.run(
        [sys.executable, "-c", HANGING.format(arguments=["eval", "no/such-model", "--tasks", "arithmetic"])],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if "proxy" not in key.lower()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "model.path=no/such-model: cannot load it" in done.stderr
    assert "no answer in 2 seconds; if the network is only slow, fetch the model first: hf download" in done.stderr
    assert "imported torch: False" in done.stdout


def test_recipes_are_listed_and_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes"]) == 0
    assert "deepscaler-1.5b" in capsys.readouterr().out
    assert main(["recipes", "copy", "compare-embedded", "sft-spelling-tiny"]) == 0
    text = capsys.readouterr().out
    assert "run it with r3 train recipes/compare-embedded.yaml" in text
    assert "run it with r3 sft recipes/sft-spelling-tiny.yaml" in text
    assert main(["train", "recipes/compare-embedded.yaml", "--print-config"]) == 0
    capsys.readouterr()
    assert "is there already" in refused(capsys, "recipes", "copy", "compare-embedded")
    assert "did you mean deepscaler-7b?" in refused(capsys, "recipes", "copy", "deepscaler-7")


# What stands around a run: streams that are closed or poor, ranks that are stopped, numbers that are none.


@pytest.mark.parametrize("stdout", ["closed", "no reader", "ascii", "full"])
def test_a_finished_run_is_finished_whatever_reads_it(stdout: str, tmp_path: Path) -> None:
    arguments = command("train", *overrides(tmp_path, train__steps=1))
    environment = os.environ | {"PYTHONIOENCODING": "ascii:strict", "LC_ALL": "C"}
    reader, writer = os.pipe()
    if stdout == "closed":
        arguments = ["bash", "-c", 'exec "$@" >&-', "r3", *arguments]
    if stdout == "no reader":
        os.close(reader)
    if stdout == "full":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    done = subprocess.run(arguments, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, env=environment, text=True)
    os.close(writer)
    if stdout != "no reader":
        os.close(reader)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert read_metrics(tmp_path / "run")[-1]["step"] == 1


def test_a_run_that_diverged_names_a_command_that_resume_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from r3.policy.optimiser import Optimiser

    with monkeypatch.context() as patch:
        patch.setattr(Optimiser, "_clip", lambda _: float("nan"))
        settings = overrides(tmp_path, train__max_bad_updates=1, train__steps=4)
        assert main(["train", "--quiet", *settings]) == 3
    line = capsys.readouterr().err.strip().split("\n")[-1]
    assert line.startswith("r3: 1 updates in a row had NaN or infinite gradients: lower train.learning_rate")
    advice = line.split("r3 train ")[1].split()
    assert advice == ["--resume", str(tmp_path / "run"), "train.learning_rate=0.0005"]
    assert main(["train", "--quiet", *advice]) == 0
    assert read_metrics(tmp_path / "run")[-1]["step"] == 4


def test_waiting_for_a_stopped_process_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "WORD", 0.0)
    said: queue.Queue[str] = queue.Queue()
    handler = logging.Handler()
    handler.emit = lambda record: said.put(record.getMessage())  # type: ignore[method-assign]
    world.log.addHandler(handler)
    try:
        with world._connected(0):
            assert "still waiting for another process of this job" in said.get(timeout=60)
    finally:
        world.log.removeHandler(handler)


@pytest.mark.skipif(sys.platform != "linux", reason="a process learns of its parent's end by Linux' own means")
def test_the_cells_of_a_killed_comparison_end_with_it() -> None:
    code = """if True:
        import signal, sys
        from r3.compare.runner import _launch
        _launch([sys.executable, "-c", "import signal; print('cell', flush=True); signal.pause()"], sys.stdout)
        signal.pause()
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as comparison:
        assert comparison.stdout is not None
        assert comparison.stdout.readline() == "cell\n"
        comparison.kill()
        assert comparison.stdout.read() == ""  # the end of the pipe: nobody holds it any more


# `--dry-run`.


def without_weights(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()


def without_an_end(folder: Path) -> None:
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        path = folder / "model" / name
        told = json.loads(path.read_text())
        told.pop("eos_token", None)
        told["eos_token_id"] = None
        path.write_text(json.dumps(told))


def twice(folder: Path) -> None:
    path = folder / "task.jsonl"
    path.write_text(path.read_text() * 2)


def a_run(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text('{"format": 1}')


def a_thesis(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "thesis.tex").write_text("work of years")


def a_file_in_the_way(folder: Path) -> None:
    (folder / "run").write_text("")


def nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "settings", "told"),
    [
        (nothing, {"task__verifier": "tests.nothing.judge"}, "cannot import it"),
        (twice, {}, "appears twice; ids must be unique"),
        (nothing, {"task__heldout": 12}, "nothing is left to train on"),
        (nothing, {"task__path": "no.jsonl"}, "no file no.jsonl"),
        (nothing, {"task__pass_rates_from": "no-run"}, "no-run: not a run directory"),
        (nothing, {"run__wandb": "true"}, "pip install 'r3-rl[wandb]'"),
        (nothing, {"rollout__engine": "vllm"}, "vLLM is not installed"),
        (nothing, {"model__device": "cuda"}, "torch sees no CUDA card"),
        (
            nothing,
            {"model__lora__enabled": "true", "model__lora__targets": "[nowhere]"},
            "model.lora.targets=['nowhere']",
        ),
        (nothing, {"rollout__max_tokens": 250}, "the model's context is 256"),
        (nothing, {"run__dir": "runs/{model}"}, "can be filled in"),
        (without_weights, {}, "holds no weights"),
        (without_an_end, {}, "no answer could ever end"),
        (a_run, {}, "already holds a run"),
        (a_thesis, {}, "not empty and not a run directory"),
        (a_file_in_the_way, {}, "is a file, not a directory"),
    ],
)
def test_it_refuses_what_training_refuses(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    spoil: Any,
    settings: dict[str, Any],
    told: str,
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(build, "find_spec", lambda name: None if name == "wandb" else there(name))
    save_model(tmp_path / "model")
    save_task(tmp_path / "task.jsonl")
    spoil(tmp_path)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    given = overrides(tmp_path, **settings)
    assert told in refused(capsys, "train", "--dry-run", *given)
    assert main(["train", *given]) in (1, 2)
    assert "unexpected" not in capsys.readouterr().err
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_what_passes_can_be_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = overrides(tmp_path, model__lora__enabled="true", train__steps=1)
    assert main(["train", "--dry-run", *given]) == 0
    assert "dry run passed" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert main(["train", "--quiet", *given]) == 0


def test_its_memory_is_near_what_a_run_takes(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    more = {"rollout__group_size": 8, "method__reflection": "off", "train__steps": 5, "task__heldout": 0}
    settings = overrides(tmp_path, rollout__max_tokens=32, **more)
    told = run_r3("train", "--dry-run", *settings).stdout
    match = re.search(r"([0-9.]+) GB  at most at once", told)
    assert match is not None
    run_r3("train", "--quiet", *settings)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    peak = json.loads(lines[-1])["memory/peak_gb"]
    assert 0.7 < float(match[1]) / peak < 1.3, (told, peak)


def test_what_is_drawn_on_servers_takes_no_memory_here() -> None:
    given = ["rollout.engine=vllm-server", "rollout.servers=[http://a:8000]"]
    told = {
        ahead: dry_run(load_config(ROOT / "recipes" / "deepscaler-1.5b.yaml", [*given, f"rollout.ahead={ahead}"]))
        for ahead in (0, 1)
    }
    here = dry_run(load_config(ROOT / "recipes" / "deepscaler-1.5b.yaml"))
    assert "KV cache" in here
    for text in told.values():
        sizes = [float(size) for size in re.findall(r"^memory +([0-9.]+) GB  (?!at most)", text, re.MULTILINE)]
        assert "KV cache" not in text
        assert "before the update" not in text
        assert re.search(rf"{sum(sizes):.1f}\d? GB  at most at once \(answers are drawn on rollout.servers\)", text), (
            text
        )


# -------------------------------------------------------------------- docs/scale.md

SCALE = (ROOT / "docs" / "scale.md").read_text()
PER_CARD = r"^\| ([^|]*(?:cards?)[^|]*) \| (\d+) GB \| (\d+) GB \|$"
"""A row of the table of memory per card: how many there are, and what each holds at 1.5B and at 7B."""


def dry(recipe: str, processes: int, shard: str = "true") -> str:
    return dry_run(load_config(ROOT / "recipes" / f"{recipe}.yaml", [f"train.shard={shard}"]), processes)


def kept(told: str) -> float:
    """Gigabytes that a card holds whatever it is doing, but for activations, logits and cache."""
    lines = re.findall(r"^memory +([0-9.]+) GB  (?:weights|gradients|optimiser)", told, re.MULTILINE)
    assert len(lines) == 3
    return sum(map(float, lines))


def test_the_table_of_memory_is_what_a_dry_run_says() -> None:
    rows = re.findall(PER_CARD, SCALE, re.MULTILINE)
    assert len(rows) == 4
    for cards, *sizes in rows:
        for recipe, size in zip(("deepscaler-1.5b", "deepscaler-7b"), sizes, strict=True):
            if cards.startswith("one card"):
                told = [dry(recipe, 1), dry(recipe, 8, shard="false")]
            else:
                told = [dry(recipe, int(cards.split()[0]))]
            assert {round(kept(one)) for one in told} == {int(size)}, (cards, recipe)


def test_the_dry_run_that_is_shown_is_the_one_of_today() -> None:
    shown = SCALE.partition("--dry-run --processes 8 train.shard=true\n")[2].partition("```")[0]
    lines = [line for line in shown.splitlines() if line.startswith("memory")]
    assert len(lines) == 7
    told = dry("deepscaler-7b", 8).splitlines()
    assert lines == [line for line in told if line.startswith("memory")]
