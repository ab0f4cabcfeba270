"""What the vLLM engines are made of, as far as it needs no vLLM; the engines themselves: make test-vllm.

Covers r3.rollout.vllm, r3.rollout.vllm.weights, r3.rollout.vllm.serve.
"""

from __future__ import annotations

import copy
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from pydantic import ValidationError

from r3.cli import main
from r3.rollout import RolloutSettings
from r3.rollout.vllm import check_version, cpu_cache_bytes
from r3.rollout.vllm.servers import VllmServerEngine
from r3.rollout.vllm.weights import Publisher, fetch, merged_weights
from tests.train.tiny import overrides

from .models import build, shared


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated", "ignore:fan_in_fan_out")
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_merged_weights_are_those_that_peft_itself_merges(architecture: str) -> None:
    model = build(architecture)
    targets = {"gpt2": ["c_attn", "c_fc"]}.get(architecture, ["q_proj", "v_proj", "down_proj"])
    wrapped = get_peft_model(model, LoraConfig(r=3, lora_alpha=7, target_modules=targets, task_type="CAUSAL_LM"))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    merged = dict(merged_weights(model))
    expected = dict(copy.deepcopy(wrapped).merge_and_unload().named_parameters())
    assert merged.keys() == expected.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(weight, expected[name].data)
    changed = [name for name, weight in shared(architecture).named_parameters() if not merged[name].equal(weight)]
    assert changed
    assert all(any(target in name for target in targets) for name in changed)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_weights_without_adapters_are_not_copied() -> None:
    model = shared("llama")
    given = dict(merged_weights(model))
    assert all(given[name].data_ptr() == parameter.data_ptr() for name, parameter in model.named_parameters())
    assert len(given) == len(list(model.named_parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_weights_arrive_bit_by_bit_and_as_they_are_when_fetched(dtype: torch.dtype) -> None:
    weights = {
        "matrix": torch.randn(5, 3).to(dtype),
        "transposed": torch.randn(4, 6).to(dtype).T,
        "scalar": torch.tensor(2.5).to(dtype),
        "empty": torch.empty(0, 3).to(dtype),
        "integers": torch.arange(7),
    }
    publisher = Publisher(lambda: weights.items(), host="127.0.0.1")
    try:
        for _ in range(2):
            got = dict(fetch(publisher.url))
            assert list(got) == list(weights)
            for name, tensor in weights.items():
                assert got[name].dtype == tensor.dtype
                assert torch.equal(got[name], tensor)
            weights["matrix"].mul_(2)
        with pytest.raises(HTTPError, match="404"):
            dict(fetch(publisher.url[:-1] + "!"))
    finally:
        publisher.close()


def test_a_stream_that_breaks_off_is_an_error() -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "first", torch.ones(3)
        raise RuntimeError("the trainer dies")

    class Quiet(http.server.ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            pass

    publisher = Publisher(weights, host="127.0.0.1")
    publisher._server.__class__ = type("Quiet", (Quiet, type(publisher._server)), {})
    try:
        with pytest.raises(ConnectionError, match="is the trainer gone"):
            dict(fetch(publisher.url))
    finally:
        publisher.close()


@pytest.mark.parametrize("version", ["0.23.1", "0.33.0", "1.0.0", "0.6.3.post1", "dev"])
def test_versions_that_were_not_tested_are_refused(version: str) -> None:
    with pytest.raises(ValueError, match=r"vLLM .* is not supported; install one from 0.24 to before 0.33"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.24.0", "0.30.1", "0.32.0", "0.32.1rc1+cpu"])
def test_versions_in_the_range_are_taken(version: str) -> None:
    check_version(version)


def test_the_cache_on_a_cpu_is_what_the_rows_can_fill_but_no_more_than_there_is() -> None:
    config = shared("qwen2").config  # 3 layers, 2 heads of 8 for keys and values, 64 positions
    assert cpu_cache_bytes(config, torch.float32, 9, 0.85) == 10 * (64 + 128) * 2 * 3 * 2 * 8 * 4
    assert cpu_cache_bytes(config, torch.float32, 10**6, 0.85) <= 4 * 2**30
    assert cpu_cache_bytes(config, torch.float32, 10**6, 1e-6) < 2**20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "vllm-server"}, "engine=vllm-server needs addresses"),
        ({"servers": ["http://a:1"]}, "rollout.servers is for engine=vllm-server, not auto"),
        ({"engine": "vllm-server", "servers": ["a:1"]}, "'a:1' is not the address of a server; write http://HOST:PORT"),
        ({"engine": "vllm-server", "servers": ["http://a:1/v1"]}, "write http://HOST:PORT"),
        ({"engine": "vllm-server", "servers": ["http://a:x"]}, "write http://HOST:PORT"),
        ({"engine": "vllm-server", "servers": ["http://a:1", "http://a:1"]}, "names a server twice"),
    ],
)
def test_addresses_that_cannot_be_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RolloutSettings(**settings)


class Other(http.server.BaseHTTPRequestHandler):
    """Some other server, or vLLM without our switches."""

    answers: dict = {}  # noqa: RUF012  # set by the test

    def do_GET(self) -> None:
        body = self.answers.get(self.path.partition("?")[0])
        self.send_response(200 if body else 404)
        self.end_headers()
        self.wfile.write(body or b"not found")

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "GET /version gave 404: not found"),
        ({"/version": b'{"version": "0.31.0"}'}, "vLLM 0.31.0 is not supported; install one from 0.32"),
        ({"/version": b'{"version": "0.32.0"}'}, "GET /server_info gave 404"),
        ({"/version": b"<html>"}, "it is not a vLLM server"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_at_the_start(given: dict, message: str) -> None:
    handler = type("Handler", (Other,), {"answers": given})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        with pytest.raises(ValueError, match=message) as caught:
            VllmServerEngine(shared("llama"), [address], max_rows=4, patience=5)
        assert str(caught.value).startswith(address)
        assert "python -m r3.rollout.vllm.serve MODEL --port PORT" in str(caught.value)
    finally:
        server.shutdown()
        server.server_close()


def test_an_address_where_nobody_listens_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"http://127.0.0.1:9: no answer \(.*\); start it with: python -m r3"):
        VllmServerEngine(shared("llama"), ["http://127.0.0.1:9"], max_rows=4, patience=5)


def test_a_resume_takes_other_addresses_though_they_do_not_go_with_the_default_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--quiet", *overrides(tmp_path, train__steps=1)]) == 0
    path = tmp_path / "run" / "config.yaml"
    saved = yaml.safe_load(path.read_text())
    saved["rollout"] |= {"engine": "vllm-server", "servers": ["http://a:1"]}
    path.write_text(yaml.safe_dump(saved))
    capsys.readouterr()
    resumed = ["train", "--print-config", "--resume", str(tmp_path / "run")]
    assert main([*resumed, "rollout.servers=[http://b:2, http://c:3]"]) == 0
    said = capsys.readouterr().out
    assert "http://b:2" in said
    assert "http://a:1" not in said
    assert main([*resumed, "rollout.engine=native", "rollout.servers=[]"]) == 2, "the engine is part of the experiment"
