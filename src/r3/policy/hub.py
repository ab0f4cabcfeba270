"""Models that are neither on this machine nor to be had: said at once, before minutes of attempts to reach a hub."""

from __future__ import annotations

import difflib
import hashlib
import os
import queue
import socket
import threading
import urllib.request
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants, try_to_load_from_cache

from r3.errors import ConfigError
from r3.policy.settings import ModelSettings

PATIENCE = 2.0
"""Seconds in which a hub has to answer."""
_WEIGHTS = (".safetensors", ".bin", ".pt")
_PARTS, _PART = 256, 1 << 18
_FILES = ("config.json", "adapter_config.json", "tokenizer_config.json")


def check_reachable(path: str, named: str, revision: str | None = None) -> None:
    """`ConfigError` unless the model is a folder, in the cache, or may be on a hub that answers.

    `named` is what the setting says. What lies behind a proxy is left to the library's own patience.
    """
    if os.path.exists(path) or _is_cached(path, revision):
        return
    if path.startswith((".", "~", os.sep)) or path.count("/") > 1:
        raise ConfigError(f"model.path={named}: cannot load it (there is no such folder){_meant(path)}")
    if (reason := _unreachable(constants.ENDPOINT)) is not None:
        raise ConfigError(
            f"model.path={named}: cannot load it (it is no folder and not in the cache of the hub, and "
            f"{constants.ENDPOINT} cannot be reached: {reason}){_meant(path)}"
        )


def check_model(settings: ModelSettings) -> None:
    """The same of a section of settings, before torch is imported for nothing."""
    if settings.path != "embedded":
        check_reachable(settings.path, settings.path, settings.revision)


def _is_cached(path: str, revision: str | None) -> bool:
    try:
        return any(isinstance(try_to_load_from_cache(path, name, revision=revision), str) for name in _FILES)
    except ValueError:  # no name that a hub could have
        return False


@lru_cache(maxsize=8)
def _unreachable(endpoint: str) -> str | None:
    """Why nothing can come from there, where that is certain or as good as certain."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if urllib.request.getproxies():
        return None
    parts = urlsplit(endpoint)
    address = (parts.hostname or "", parts.port or 443)
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    # In a thread: looking up the name has no time limit of its own, and may take half a minute where nobody answers.
    threading.Thread(target=_connect, args=[address, answers], daemon=True).start()
    try:
        return answers.get(timeout=PATIENCE)
    except queue.Empty:
        return f"no answer in {PATIENCE:g} seconds; if the network is only slow, fetch the model first: hf download"


def _connect(address: tuple[str, int], answers: queue.SimpleQueue[str | None]) -> None:
    try:
        socket.create_connection(address, timeout=PATIENCE).close()
    except OSError as error:
        answers.put(str(error.strerror or error))
    else:
        answers.put(None)


def _meant(path: str) -> str:
    """A hint at what was probably meant, among folders beside it and models in the cache."""
    parent = Path(path).parent
    try:
        names = [str(parent / entry.name) for entry in parent.iterdir() if (entry / "config.json").exists()]
    except OSError:
        names = []
    cache = Path(constants.HF_HUB_CACHE)
    if cache.is_dir():
        names += [entry.name.removeprefix("models--").replace("--", "/") for entry in cache.glob("models--*")]
    near = difflib.get_close_matches(path, [*names, "embedded"], n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return "; give a folder with a Hugging Face causal LM, a hub id that this machine can reach, or 'embedded'"


def digest_of_weights(path: str) -> str | None:
    """What the weights in the folder are, whatever it is called; None where the model is no folder of this machine.

    Of a file of gigabytes 256 parts are read, evenly spread: training moves all of them.
    """
    folder = Path(path)
    files = sorted(file for file in folder.glob("*") if file.suffix in _WEIGHTS) if folder.is_dir() else []
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as data:
            for part in range(_PARTS):
                data.seek(part * size // _PARTS)
                digest.update(data.read(min(_PART, -(-size // _PARTS))))
    return digest.hexdigest() if files else None
