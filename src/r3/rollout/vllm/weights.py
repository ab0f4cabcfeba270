"""The policy's weights on their way into vLLM: adapters merged, and from the trainer's memory to other processes.

`Publisher` listens on a port that the system picks, under a path that nobody can guess; a server's worker reads the
stream and loads each tensor as it comes, so neither side holds a second copy of the model and nothing touches a disk.
The stream is one record per tensor (a line of JSON with its name, dtype and shape, then its bytes) and an empty line.

`WeightReceiver` runs inside vLLM's workers and takes the weights: vLLM mixes it into its worker class by name. The
names of its methods begin with `r3_` because they join those of vLLM's own worker.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.request import ProxyHandler, build_opener

import torch
from torch import Tensor
from transformers import PreTrainedModel

from r3.rollout.vllm import shape_of

_BASE = ".base_layer."


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Each weight of the model by name, as it is now; LoRA adapters are added to what they adapt, one layer at a time.

    The model itself stays as it is. Weights without an adapter are not copied.
    """
    for name, parameter in model.named_parameters():
        owner, adapted, leaf = name.rpartition(_BASE)
        if not adapted:
            if ".lora_" not in name:
                yield name, parameter.data
        elif leaf == "weight":
            yield f"{owner}.{leaf}", _merged(model.get_submodule(owner), parameter.data)
        else:
            yield f"{owner}.{leaf}", parameter.data


def _merged(layer: Any, weight: Tensor) -> Tensor:
    """A peft layer's weight with its active adapters added, in float32 and rounded once."""
    total = weight.float()
    for adapter in layer.active_adapters:
        total = total + layer.get_delta_weight(adapter).float()
    return total.to(weight.dtype)


Weights = Callable[[], Iterable[tuple[str, Tensor]]]


class Publisher:
    """Serves what `weights` gives, as it is when somebody asks."""

    def __init__(self, weights: Weights, *, host: str) -> None:
        secret = secrets.token_urlsafe(24)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if not secrets.compare_digest(self.path.encode(), f"/{secret}".encode()):
                    self.send_error(404)
                    return
                self.send_response(200)
                self.end_headers()
                for name, tensor in weights():
                    head = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": [*tensor.shape]}
                    self.wfile.write(json.dumps(head).encode() + b"\n")
                    self.wfile.write(_bytes_of(tensor))
                self.wfile.write(b"\n")

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        self._server = Server((host, 0), Handler)
        bracketed = f"[{host}]" if ":" in host else host
        self.url = f"http://{bracketed}:{self._server.server_port}/{secret}"
        Thread(target=self._server.serve_forever, name="r3-publish", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def fetch(url: str, *, timeout: float = 600.0) -> Iterator[tuple[str, Tensor]]:
    """The weights published under this address; a stream that breaks off is an error, not a shorter model."""
    direct = build_opener(ProxyHandler({}))  # machines of one network, whatever proxy leads out of it
    with direct.open(url, timeout=timeout) as stream:
        while (line := stream.readline()) != b"\n":
            if not line.endswith(b"\n"):
                raise ConnectionError(f"the weights from {url.rsplit('/', 1)[0]} broke off: is the trainer gone?")
            head = json.loads(line)
            tensor = torch.empty(head["shape"], dtype=getattr(torch, head["dtype"]))
            _read_into(_flat(tensor).numpy().data, stream, head["name"])
            yield head["name"], tensor


def _read_into(buffer: memoryview, stream: Any, name: str) -> None:
    done = 0
    while done < len(buffer):
        count = stream.readinto(buffer[done:])
        if not count:
            raise ConnectionError(f"the weights broke off in {name}: is the trainer gone?")
        done += count


def _bytes_of(tensor: Tensor) -> memoryview:
    return _flat(tensor.detach().cpu().contiguous()).numpy().data


def _flat(tensor: Tensor) -> Tensor:
    """The tensor's memory, byte by byte."""
    return tensor.reshape(-1).view(torch.uint8)


EXTENSION = "r3.rollout.vllm.weights.WeightReceiver"


class WeightReceiver:
    """New weights for the model of a vLLM worker."""

    device: Any
    model_runner: Any

    def r3_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy these weights into the worker's model, in place."""
        if self.device.type != "cpu":
            self.model_runner.model.load_weights(weights)
            return
        # On a CPU vLLM packs matrices for its kernels when it loads them and drops the originals: a reload packs anew.
        self.model_runner.reload_weights(weights_iterator=weights)
        self._pack_heads()

    def r3_fetch(self, url: str) -> None:
        """Copy the weights that a trainer publishes under this address."""
        weights = fetch(url)
        # A reload that breaks off leaves vLLM's CPU worker unable to load ever again: begin when all is here.
        self.r3_load(list(weights) if self.device.type == "cpu" else weights)

    def r3_shape(self) -> dict[str, Any]:
        """What must agree for a trainer's weights to fit."""
        return shape_of(self.model_runner.model_config.hf_config)

    def _pack_heads(self) -> None:
        """Pack the heads again: vLLM's reload leaves out one that shares its weight with the embedding (0.32)."""
        from vllm.model_executor.layers.vocab_parallel_embedding import (  # type: ignore[import-not-found,unused-ignore]
            ParallelLMHead,
        )

        for module in self.model_runner.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
