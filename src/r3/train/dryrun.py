"""`r3 train --dry-run`: everything but the weights, and the arithmetic of memory and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from r3.config import Config
from r3.errors import ConfigError, MissingData, RunError
from r3.method.reflection import PlainPrompts
from r3.policy.layers import chunk_size
from r3.policy.model import load_model_config, load_tokenizer, new_adapters, pick_device, pick_dtype, resolve
from r3.policy.source import adapters_in
from r3.rollout.causal_lm import CausalLM
from r3.rollout.vllm import check_version, installed_version
from r3.run.directory import check_folder
from r3.tasks import load_problems
from r3.train.build import (
    check_ahead,
    check_batch,
    check_extras,
    check_passes,
    check_prompts,
    check_reference,
    check_stop_tokens,
    check_task,
    prompt_length,
)
from r3.train.checks import check_help
from r3.train.record import peak_memory_gb
from r3.train.session import run_path, total_steps

# Shapes of models that recipes name, as published in their config.json, for machines that cannot reach the hub.
_QWEN = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rope_theta": 10000,
}
KNOWN_SHAPES: dict[str, dict[str, Any]] = {
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _QWEN
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _QWEN
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
}


def dry_run(config: Config, processes: int = 1) -> str:
    """Refuse what `train` would refuse, without loading weights. Returns a report on what a process would need."""
    try:
        check_folder(run_path(config))
        return _looked_at(config, processes)
    except RunError as error:  # of a run directory, this one or one that the task names: nothing was started
        raise ConfigError(str(error)) from error


def _looked_at(config: Config, processes: int) -> str:
    notes: list[str] = []
    check_extras(config)
    check_ahead(config, processes)
    shape = _shape(config, notes)
    model = _model(config, shape)
    parameters = sum(p.numel() for p in model.parameters())
    _check_engine(config, model)
    trained = _trained(config, model, parameters)
    tokenizer = _tokenizer(config, shape, notes)
    queries, longest = _queries(config, shape, tokenizer, notes)
    lines = [
        f"model      {config.model.path}: {parameters / 1e9:.2f} B parameters, {type(model).__name__}",
        *_batch(config, queries),
        *_memory(config, shape, parameters, trained, processes, longest),
        *(f"note       {note}" for note in notes),
        "dry run passed: nothing was loaded, nothing was written",
    ]
    return "\n".join(lines)


def _shape(config: Config, notes: list[str]) -> Any:
    known = KNOWN_SHAPES.get(config.model.path)
    if known is None:
        return load_model_config(resolve(config.model.path), config.model)
    try:  # first what is on this machine, then our table, and only then the network
        return load_model_config(config.model.path, config.model, local_files_only=True)
    except ConfigError:
        notes.append(f"{config.model.path} is not on this machine; used its published shape")
        options = dict(known)
        return AutoConfig.for_model(options.pop("model_type"), **options)


def _model(config: Config, shape: Any) -> PreTrainedModel:
    """The model without its weights; if its folder is here, the weights must be in it."""
    folder = Path(resolve(config.model.path))
    if folder.is_dir() and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ConfigError(f"model.path={config.model.path}: holds no weights (*.safetensors); get the whole folder")
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                shape, trust_remote_code=config.model.trust_remote_code
            )
            return model
    except ValueError as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigError(f"model.path={config.model.path}: cannot be a causal language model ({first})") from error


def _trained(config: Config, model: PreTrainedModel, parameters: int) -> int:
    """How many parameters are trained: all, or those of adapters (which are put on the model)."""
    adapters = adapters_in(resolve(config.model.path), config.model)
    check_reference(config, adapters is not None and config.model.lora.enabled)
    if not config.model.lora.enabled:
        return parameters
    with torch.device("meta"):
        adapted = new_adapters(model, config.model)
    return sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def _check_engine(config: Config, model: PreTrainedModel) -> None:
    try:
        CausalLM(model)
        if config.rollout.engine == "vllm":
            check_version(installed_version())
    except ValueError as error:
        raise ConfigError(f"rollout.engine={config.rollout.engine}: {error}") from error


def _tokenizer(config: Config, shape: Any, notes: list[str]) -> Any:
    """The tokenizer, or None if the model is known but not on this machine."""
    known = config.model.path in KNOWN_SHAPES
    try:
        tokenizer = load_tokenizer(resolve(config.model.path), config.model, local_files_only=known)
    except ConfigError:
        if not known:
            raise
        notes.append("prompts not checked: the tokenizer is not on this machine")
        return None
    ends = (tokenizer.eos_token_id, getattr(shape.get_text_config(), "eos_token_id", None))
    check_stop_tokens(config, [end for end in ends if isinstance(end, int)] or [*(ends[1] or ())])
    return tokenizer


def _queries(config: Config, shape: Any, tokenizer: Any, notes: list[str]) -> tuple[int | None, int]:
    """Number of training queries (None where a known set is not on this machine), and tokens of the longest prompt."""
    try:
        task = load_problems(config.task, config.run.seed, None if tokenizer is None else prompt_length(config))
    except MissingData as error:
        notes.append(f"task not checked: {error}")
        return None, 0
    longest = 0
    try:
        check_task(task)
        check_batch(config, task)
        check_help(config, task)
        check_passes(config, task)
        if tokenizer is not None:
            context = getattr(shape.get_text_config(), "max_position_embeddings", None)
            longest = check_prompts(config, task, PlainPrompts(tokenizer), context)
            notes.append(f"longest prompt: {longest} tokens")
        return len(task.train), longest
    finally:
        task.judge.close()


def _batch(config: Config, queries: int | None) -> list[str]:
    rollout, train = config.rollout, config.train
    samples = train.queries_per_step * rollout.group_size
    tokens = samples * rollout.max_tokens
    steps = "unknown" if queries is None else f"{total_steps(config, queries):,}"
    return [
        f"method     {config.method.name}: replay {_on(config.method.replay.enabled)}, reflection "
        f"{_on(config.method.reflection.enabled)}, ranking {_on(config.method.ranking.enabled)}, resampling "
        f"{_on(config.method.resample.enabled)}, objective {config.method.objective.name}",
        f"task       {config.task.name}: {'unknown' if queries is None else f'{queries:,}'} queries, "
        f"{_passes(config, queries)}, {steps} steps",
        f"batch      {train.queries_per_step} queries × {rollout.group_size} samples = {samples:,} responses per step, "
        f"at most {tokens:,} tokens",
        f"update     {train.updates_per_batch} per batch, micro-batches of {train.tokens_per_microbatch:,} tokens: "
        f"at most {-(-tokens // train.tokens_per_microbatch):,} of them",
    ]


def _passes(config: Config, queries: int | None) -> str:
    """How many passes over the queries the run makes, in words."""
    if config.train.steps is None:
        return f"{config.train.epochs} epochs"
    if queries is None:
        return "train.steps whatever the epochs"
    return f"{config.train.steps * config.train.queries_per_step / queries:.2g} epochs"


def _on(enabled: bool) -> str:
    return "on" if enabled else "off"


def _memory(config: Config, shape: Any, parameters: int, trained: int, processes: int, prompt: int) -> list[str]:
    """Bytes by purpose, and the peak: rollout and update take turns."""
    shards = processes if config.train.shard else 1
    device, width = pick_device(config.model), _width(config)
    here = device.type == "cpu" and width == 4
    responses = -(-config.train.queries_per_step * config.rollout.group_size // processes)
    most = responses * (config.rollout.max_tokens + prompt)  # a batch may be less than a micro-batch holds
    budget = min(most, max(config.train.tokens_per_microbatch, config.rollout.max_tokens))
    rows = min(config.rollout.max_rows, responses)
    split = f", split over {shards} processes" if shards > 1 else ""
    longest = max(config.rollout.max_tokens, config.evaluation_limit)
    masters_are_weights = width == 4 and shards == 1
    always = {
        "Python, torch and transformers": peak_memory_gb() * 1e9 if here else 0,
        "weights": parameters * width,
        f"optimiser ({'' if masters_are_weights else 'float32 masters and '}two moments){split}": trained
        * (8 if masters_are_weights else 12)
        / shards,
    }
    update = {
        f"gradients (float32){split}": trained * 4 / shards,
        f"activations of {budget:,} tokens (estimate)": _activations(config, shape, budget) * width,
        **_logits(shape, device, budget, width),
    }
    elsewhere = config.rollout.engine == "vllm-server"  # with the weights and the cache to draw from
    at_rollout = {
        "weights before the update, to draw from": parameters * width * config.rollout.ahead,
        f"KV cache of {rows} rows × {longest:,} tokens (upper bound)": rows * longest * _cache(shape) * width,
    }
    rollout = {} if elsewhere else at_rollout
    parts = {name: size for name, size in (always | update | rollout).items() if size}
    lines = [f"memory     {size / 1e9:8.2f} GB  {name}" for name, size in parts.items()]
    turns = (sum(update.values()), sum(rollout.values()))
    held = sum(always.values()) + (sum(turns) if config.rollout.ahead else max(turns))
    where = "" if processes == 1 else f" in each of {processes} processes"
    when = "the cache is free while the policy is updated"
    if elsewhere:
        when = "answers are drawn on rollout.servers"
    elif config.rollout.ahead:
        when = "answers are drawn while the policy is updated"
    return [*lines, f"memory     {held / 1e9:8.2f} GB  at most at once{where} ({when})"]


def _width(config: Config) -> int:
    """Bytes per weight: as on this machine, or as on a card for published shapes, which need one."""
    if config.model.dtype == "auto" and config.model.path in KNOWN_SHAPES:
        return 2
    return pick_dtype(config.model, pick_device(config.model)).itemsize


def _activations(config: Config, shape: Any, tokens: int) -> float:
    """Numbers kept for the backward: a layer's input, or without checkpointing 16 of its size and 3 of the MLP's."""
    text = shape.get_text_config()
    per_layer = 1 if config.model.gradient_checkpointing else 16 + 3 * text.intermediate_size / text.hidden_size
    return float(tokens * text.hidden_size * text.num_hidden_layers * per_layer)


def _logits(shape: Any, device: torch.device, tokens: int, width: int) -> dict[str, int]:
    vocabulary = shape.get_text_config().vocab_size
    chunk = min(tokens, chunk_size(vocabulary, device))
    copies = 3 * 4 if device.type == "cpu" else 2 * width  # eager float32 copies; compiled, logits and their gradient
    return {f"logits of {chunk} positions": copies * chunk * vocabulary}


def _cache(shape: Any) -> int:
    """Numbers per token in the key-value cache."""
    text = shape.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * text.num_key_value_heads * head_dim)
