"""Where a model's weights come from: a folder or a hub, as a whole model or as LoRA adapters of another.

A model that is neither on this machine nor on a reachable hub is an early error, before minutes of retries.

A checkpoint of a LoRA run, or anything else that peft saved, holds only adapters and the name of their base model.
transformers would load them onto the base, and new adapters would then silently take their place. So they are looked
for first, and then trained further or merged.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import queue
import socket
import threading
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from huggingface_hub import constants, try_to_load_from_cache

from r3.errors import ConfigError
from r3.policy import ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


@dataclass(frozen=True, slots=True)
class Adapters:
    """Trained adapters, not yet put on a model."""

    folder: str
    """A local folder or a hub id."""
    base: str
    """The folder or hub id of the model that they were trained on."""
    config: Any
    """Their peft config."""

    @property
    def has_tokenizer(self) -> bool:
        return (Path(self.folder) / "tokenizer_config.json").exists()

    def __str__(self) -> str:
        return f"LoRA adapters (rank {self.config.r}) of {self.base}"


def adapters_in(path: str, settings: ModelSettings) -> Adapters | None:
    """The adapters at `path`, or None if it is a whole model. For a hub id only the local cache is checked."""
    from transformers.utils.peft_utils import (
        find_adapter_config_file,  # here: the hub is checked before torch is loaded
    )

    try:
        config_file = find_adapter_config_file(path, revision=settings.revision, local_files_only=True)
    except (OSError, ValueError):  # not a valid hub id: loading it as a model will say so
        return None
    if config_file is None:
        return None
    from peft import PeftConfig

    try:
        config: Any = PeftConfig.from_pretrained(str(Path(config_file).parent))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"model.path={settings.path}: its adapter_config.json cannot be read ({reason})") from error
    if config.peft_type != "LORA" or not config.base_model_name_or_path:
        raise ConfigError(
            f"model.path={settings.path}: holds adapters of the kind {config.peft_type} for "
            f"{config.base_model_name_or_path or 'no named base model'}, and only LoRA with a named base can be used: "
            "give a whole model"
        )
    return Adapters(path, config.base_model_name_or_path, config)


def continued(base: PreTrainedModel, adapters: Adapters, settings: ModelSettings) -> Any:
    """The base with these adapters, to be trained further. The settings, which a run records, must match theirs."""
    lora, config = settings.lora, adapters.config
    theirs = {"rank": config.r, "alpha": config.lora_alpha, "dropout": config.lora_dropout}
    if other := {name: value for name, value in theirs.items() if value != getattr(lora, name)}:
        wanted = " ".join(f"model.lora.{name}={value:g}" for name, value in other.items())
        raise ConfigError(
            f"model.path={settings.path}: going on with its {adapters} needs {wanted}; for other adapters merge these "
            f"first: r3 models merge {settings.path} --to FOLDER"
        )
    return on(base, adapters.folder, settings, is_trainable=True)


def merged(base: PreTrainedModel, adapters: Adapters, settings: ModelSettings) -> PreTrainedModel:
    """The base with the adapters merged into its weights."""
    model: PreTrainedModel = on(base, adapters.folder, settings).merge_and_unload()
    return model.requires_grad_(True)  # peft has frozen it


def on(base: PreTrainedModel, folder: str, settings: ModelSettings, **options: Any) -> Any:
    """peft's model of the base with the adapters of a folder."""
    from peft import PeftModel

    try:
        with quiet():
            return PeftModel.from_pretrained(base, folder, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"model.path={settings.path}: its adapters do not fit {base.name_or_path} ({reason}); give the base model "
            "that they were trained on"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silences a warning that peft 0.21 causes: it uses a name that transformers 5.23 deprecates."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        yield
