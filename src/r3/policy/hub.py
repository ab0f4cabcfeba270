"""An early error for a model that is neither on this machine nor on a reachable hub, before minutes of retries."""

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
"""Seconds that a hub has to answer."""
_WEIGHTS = (".safetensors", ".bin", ".pt")
_PARTS, _PART = 256, 1 << 18
_FILES = ("config.json", "adapter_config.json", "tokenizer_config.json")


def check_reachable(path: str, named: str, revision: str | None = None) -> None:
    """`ConfigError` unless the model is a folder, in the cache, or may be on a hub that answers.

    `named` is the setting's value. Behind a proxy nothing is checked; the library's own timeouts apply.
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
    """The same for a section of settings, before torch is imported in vain."""
    if settings.path != "embedded":
        check_reachable(settings.path, settings.path, settings.revision)


def _is_cached(path: str, revision: str | None) -> bool:
    try:
        return any(isinstance(try_to_load_from_cache(path, name, revision=revision), str) for name in _FILES)
    except ValueError:  # not a valid hub name
        return False


@lru_cache(maxsize=8)
def _unreachable(endpoint: str) -> str | None:
    """Why the hub certainly cannot be reached; None if it may be."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if urllib.request.getproxies():
        return None
    parts = urlsplit(endpoint)
    address = (parts.hostname or "", parts.port or 443)
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    # In a thread: a name lookup has no timeout and may take half a minute.
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
    """A hint at a similar name, among the folders beside it and the models in the cache."""
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
