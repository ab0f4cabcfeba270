"""LoRA adapters in a folder: finding their base model, training them further, merging them.

A checkpoint of a LoRA run, or anything else that peft saved, holds only adapters and the name of their base model.
transformers would load them onto the base, and new adapters would then silently take their place.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils.peft_utils import find_adapter_config_file

from r3.errors import ConfigError
from r3.policy.settings import ModelSettings


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
