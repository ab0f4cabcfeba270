"""Two real vLLM servers on a CPU generate for a trainer in this process; they are killed and come back.

Covers r3.rollout.vllm.client.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3.cli import main
from r3.policy.model import Policy
from r3.rollout import Request, Response, Sampling
from r3.rollout.vllm.client import Broken, Client
from r3.rollout.vllm.servers import VllmServerEngine
from r3.rollout.vllm.weights import Publisher, merged_weights
from tests.rollout.models import answers
from tests.train import tiny
from tests.train.test_engines import logprobs_of, rows_of
from tests.train.tiny import overrides, read_metrics

from .models import gap, policy_of, questions, save_model, shake, tokens_of
from .test_engine import MECHANISMS, on_policy

BOUND = 1e-5
SAMPLING = Sampling(40, (2,))


class Server:
    """A vLLM server on a port of its own, which can die and come back there."""

    def __init__(self, model: Path, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.model, self.log = model, folder / f"server-{self.port}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.address = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--max-num-seqs", "16", "--skip-tokenizer-init"]
        command = [sys.executable, "-m", "r3.rollout.vllm.serve", str(self.model), *options]
        with self.log.open("ab") as log:  # a session of its own, so that all its processes can be killed at once
            self.process = subprocess.Popen(command, cwd=tiny.ROOT, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        """Until it answers; if it ends instead, say what it said."""
        assert self.process is not None
        while True:
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=60):
                    return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                time.sleep(0.2)

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("served") / "model", seed=2, tied=True)


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[tuple[Server, Server]]:
    both = Server(model, model.parent), Server(model, model.parent)
    try:
        for server in both:
            server.start()
        for server in both:
            server.wait()
        yield both
    finally:
        for server in both:
            server.kill()


def engine_over(policy: Policy, *given: Server, patience: float = 300) -> VllmServerEngine:
    return VllmServerEngine(policy.base, [server.address for server in given], max_rows=12, patience=patience)


def weights_of(server: Server) -> str:
    with urllib.request.urlopen(f"{server.address}/weight_info", timeout=60) as answer:
        return str(json.load(answer)["weight_version"])


def test_servers_draw_from_the_policys_weights_as_they_are_now(
    pair: tuple[Server, Server], model: Path, report_gap: Callable[[float], None]
) -> None:
    policy = policy_of(model)
    shake(policy, 1)
    engine = engine_over(policy, *pair)
    before = answers(engine, questions(), SAMPLING)
    report_gap(gap(policy, questions(), before))
    assert gap(policy, questions(), before) < BOUND
    assert tokens_of(answers(engine, questions(), SAMPLING)) == tokens_of(before)
    assert [weights_of(server) for server in pair] == [engine.version] * 2
    engine.release()
    shake(policy, 2)
    after = answers(engine, questions(), SAMPLING)
    assert gap(policy, questions(), after) < BOUND
    assert gap(policy, questions(), before) > 100 * BOUND
    alone = answers(engine_over(policy, pair[1]), questions(), SAMPLING)
    assert tokens_of(alone) == tokens_of(after), "whoever draws them, responses depend on prompt, seed and weights"


def test_lora_stops_limits_and_filters(pair: tuple[Server, Server], model: Path) -> None:
    policy = policy_of(model, lora={"enabled": True, "rank": 4})
    shake(policy, 3, scale=0.2)
    engine = engine_over(policy, *pair)
    requests = [Request(request.prompt, 4, request.seed, limits=(1, 3, 9, 60)) for request in questions()]
    stops = tuple(range(0, 90, 9))
    responses = answers(engine, requests, Sampling(20, stops, temperature=0.8))
    for (_, index), response in responses.items():
        stopped = int(response.tokens[-1]) in stops
        assert response.finish == ("stop" if stopped else "length")
        assert stopped or len(response.tokens) == (1, 3, 9, 20)[index]
    assert gap(policy, requests, responses, temperature=0.8) < BOUND


def test_a_call_left_unfinished_ends_at_the_servers_too(pair: tuple[Server, Server], model: Path) -> None:
    policy = policy_of(model)
    engine = engine_over(policy, *pair)
    left = engine.generate(questions(), Sampling(200, ()))
    next(left)
    engine.release()
    assert list(left) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "r3-rollout"]
    assert gap(policy, questions(), answers(engine, questions(), SAMPLING)) < BOUND


def test_a_model_that_is_not_the_servers_is_refused(pair: tuple[Server, Server], tmp_path: Path) -> None:
    policy = policy_of(tiny.save_model(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"it serves another model than model.path \(.*hidden_size 64 instead of 32"):
        engine_over(policy, pair[0])


def test_a_trainer_that_dies_while_it_gives_weights_leaves_the_server_usable(
    pair: tuple[Server, Server], model: Path
) -> None:
    def cut() -> Iterator[tuple[str, torch.Tensor]]:
        weights = merged_weights(policy.base)
        for _ in range(5):
            yield next(weights)
        raise BrokenPipeError

    policy = policy_of(model)
    broken = Publisher(cut, host="127.0.0.1")
    with pytest.raises(Broken, match="is the trainer gone"):
        Client(pair[0].address, 60).load(broken.url, "cut")
    broken.close()
    shake(policy, 5)
    engine = engine_over(policy, pair[0])
    assert gap(policy, questions(), answers(engine, questions(), SAMPLING)) < BOUND


class Fate:
    """Kills a server when so many responses have come, in the middle of a rollout, and may start it again."""

    def __init__(self, server: Server, at: int, *, returns: bool) -> None:
        self.server, self.at, self.returns, self.responses = server, at, returns, 0
        self.beside = False
        """Whether it struck while responses came on another thread than the update's."""

    def count(self) -> None:
        self.responses += 1
        if self.responses == self.at:
            self.beside = threading.current_thread() is not threading.main_thread()
            self.server.kill()
            if self.returns:
                self.server.start()


def settings(folder: Path, model: Path, *given: Server, **more: Any) -> list[str]:
    addresses = ", ".join(server.address for server in given)
    more = {"rollout__engine": "vllm-server", "rollout__servers": f"[{addresses}]", "train__epochs": 4} | more
    folder.mkdir(exist_ok=True)
    return overrides(folder, model__path=model, **more)


def train(arguments: list[str], fate: Fate) -> int:
    """`r3 train`, with somebody who counts the responses that it gets."""
    generate = VllmServerEngine.generate

    def counted(self: VllmServerEngine, *given: Any) -> Iterator[Response]:
        for response in generate(self, *given):
            fate.count()
            yield response

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmServerEngine, "generate", counted)
        code = main(["train", "--quiet", *arguments])
    assert fate.responses >= fate.at
    return code


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """The same run, up to the order in which kernels add up."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            expected = pytest.approx(value, rel=1e-3, abs=1e-5) if isinstance(value, float) else value
            assert one[key] == expected, key


@pytest.fixture(scope="module")
def undisturbed(pair: tuple[Server, Server], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert main(["train", "--quiet", *settings(folder, model, *pair)]) == 0
    return folder / "run"


def test_a_whole_run_on_two_servers(undisturbed: Path) -> None:
    metrics = read_metrics(undisturbed)
    assert len(metrics) == 9
    for name in MECHANISMS:
        assert sum(line.get(name) or 0 for line in metrics) > 0, name
    on_policy(undisturbed)


def test_one_of_two_killed_and_restarted_under_the_run_changes_nothing(
    pair: tuple[Server, Server], model: Path, undisturbed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert train(settings(tmp_path, model, *pair), Fate(pair[1], 40, returns=True)) == 0
    assert f"{pair[1].address} is gone" in caplog.text
    same(read_metrics(tmp_path / "run"), read_metrics(undisturbed))


def test_the_only_server_killed_and_restarted_the_run_waits_for_it(
    pair: tuple[Server, Server], model: Path, undisturbed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert train(settings(tmp_path, model, pair[0]), Fate(pair[0], 40, returns=True)) == 0
    assert f"{pair[0].address} is gone" in caplog.text
    assert f"{pair[0].address} is back" in caplog.text
    same(read_metrics(tmp_path / "run"), read_metrics(undisturbed))


def test_a_server_that_came_back_has_a_share_again(pair: tuple[Server, Server], model: Path) -> None:
    pair[1].wait()
    policy = policy_of(model)
    engine = engine_over(policy, *pair)
    assert gap(policy, questions(), answers(engine, questions(), SAMPLING)) < BOUND
    assert [weights_of(server) for server in pair] == [engine.version] * 2


# ------------------------------------------------------------- generating while the update runs


@pytest.fixture(scope="module")
def ahead(pair: tuple[Server, Server], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    more = {"rollout__ahead": 1, "run__checkpoint_every": 1, "run__keep_checkpoints": 9}
    assert main(["train", "--quiet", *settings(folder, model, *pair, **more)]) == 0
    return folder / "run"


def test_a_whole_run_one_step_ahead(ahead: Path, model: Path) -> None:
    """The servers drew each step's answers from the weights before the last update, by a plain forward of those."""
    metrics = read_metrics(ahead)
    assert len(metrics) == 9
    for name in MECHANISMS:
        assert sum(line.get(name) or 0 for line in metrics) > 0, name
    weights = [model, *sorted(ahead.glob("checkpoints/step-*/policy"))]
    for step in range(2, 9):
        fresh = [row for row in rows_of(ahead, step) if row["step"] == step and row["drawn_in"] == row["context"]]
        for row in fresh[:3]:
            np.testing.assert_allclose(row["logprobs"], logprobs_of(weights[step - 2], row), atol=1e-4)
            moved = np.abs(row["logprobs"] - logprobs_of(weights[step - 1], row)).max()
            assert moved > 1e-3 or not metrics[step - 1]["update/count"]
    assert metrics[2]["update/count"], "for the next test: the third step's answers are of other weights than its own"


def test_resumed_one_step_ahead_it_goes_on_as_if_uninterrupted(ahead: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(ahead, run)
    for checkpoint in (run / "checkpoints").glob("step-*"):
        if checkpoint.name > "step-000003":
            shutil.rmtree(checkpoint)
    assert main(["train", "--quiet", "--resume", str(run)]) == 0
    same(read_metrics(run), read_metrics(ahead))


def test_the_only_server_killed_while_the_update_runs_is_given_the_weights_before_it(
    pair: tuple[Server, Server], model: Path, ahead: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fate = Fate(pair[0], 40, returns=True)  # of 16 for each of the first two steps, and the third's
    with caplog.at_level(logging.WARNING):
        assert train(settings(tmp_path, model, pair[0], rollout__ahead=1), fate) == 0
    assert fate.beside
    assert f"{pair[0].address} is back" in caplog.text
    same(read_metrics(tmp_path / "run"), read_metrics(ahead))


# ------------------------------------------------------------- servers that stay away


def test_a_server_that_does_not_come_back_ends_the_run_which_goes_on_with_another(
    pair: tuple[Server, Server], model: Path, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = settings(tmp_path, model, pair[0], rollout__server_patience=5)
    assert train(arguments, Fate(pair[0], 70, returns=False)) == 1
    said = capsys.readouterr().err
    assert "r3: rollout.servers: none came back within rollout.server_patience=5 seconds" in said
    assert "python -m r3.rollout.vllm.serve MODEL --port PORT" in said
    again = [*arguments, f"run.dir={tmp_path / 'again'}"]
    assert main(["train", "--quiet", *again]) == 2, "a server that is gone is noticed before a run starts"
    assert not (tmp_path / "again").exists()
    other = f"rollout.servers=[{pair[1].address}]"
    assert main(["train", "--quiet", "--resume", str(tmp_path / "run"), other, "rollout.server_patience=300"]) == 0
    same(read_metrics(tmp_path / "run"), read_metrics(undisturbed))


def test_two_processes_of_our_loop_are_refused(
    pair: tuple[Server, Server], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="its servers take weights from one process"):
        engine_over(policy_of(model), pair[1])
