"""One validated config tree: defaults, then a YAML recipe, then `key=value` overrides.

Unknown keys are refused with the nearest valid one, bad values with the reason; all of them at once, each on a line.
`config_text.describe` prints the resolved tree with every setting's help text; what it prints reads back as a recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from r3.config_text import explain
from r3.method.settings import MethodSettings, RewardSettings, Settings

Tree = TypeVar("Tree", bound=BaseModel)


class ConfigError(ValueError):
    """A recipe or an override that cannot be used; the message says which key and what to write instead."""


class LoraSettings(Settings):
    """Low-rank adapters through peft: train a few million parameters instead of all."""

    enabled: bool = False
    """Train adapters instead of the whole model."""
    rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters (divided by the rank)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout inside the adapters; 0 keeps log-probs of rollout and update the same."""
    targets: str | list[str] = "all-linear"
    """Which layers get one: peft's target_modules."""


class ModelSettings(Settings):
    """The policy: any Hugging Face causal LM."""

    path: str = "embedded"
    """A local folder, a hub id, or 'embedded' for the small model that ships with r3."""
    revision: str | None = None
    """Hub revision to pin."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; auto is bfloat16 on CUDA and float32 on CPU. Optimiser state is always float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes a CUDA card if there is one."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    compile: bool = True
    """On a CUDA card, compile the layers for rollout and update (a minute at the first run, then cached on disk)."""
    lora: LoraSettings = Field(default_factory=LoraSettings)
    """Low-rank adapters."""


class TaskSettings(Settings):
    """Where the queries come from and who judges the answers."""

    name: Literal["arithmetic", "graded-arithmetic", "reasoning-gym", "file"] = "arithmetic"
    """'arithmetic' is for the embedded model, 'graded-arithmetic' the like for any chat model; 'reasoning-gym' has
    puzzles of many families (needs r3-rl[reasoning-gym]); 'file' reads a file of yours or a maths set by name."""
    difficulty: list[int] = Field(default_factory=lambda: [3, 4, 5, 6, 7, 8])
    """arithmetic, graded-arithmetic: how many terms the sums have."""
    size: int = Field(256, ge=1)
    """Made tasks (all but file): how many training problems."""
    split: Literal["train", "warm"] = "train"
    """graded-arithmetic, reasoning-gym: which problems to train on; 'warm' are others, for a supervised warm start."""
    family: str | None = None
    """reasoning-gym: the family of puzzles, e.g. letter_counting, number_sorting, knights_knaves."""
    options: dict[str, Any] = Field(default_factory=dict)
    """reasoning-gym: the family's own settings, e.g. {n_people: 2}."""
    path: str | None = None
    """file: a JSONL, JSON or Parquet file; the name of a set in the folder R3_DATA (deepscaler, math, gsm8k); or a
    data set of the Hugging Face hub, as hf:owner/name or hf:owner/name@split (needs r3-rl[datasets])."""
    heldout_path: str | None = None
    """file: the evaluation data, likewise; without it the last `heldout` rows of `path` are kept apart."""
    rows: tuple[int, int] | None = None
    """file: only the rows of `path` from the first number (from 0) up to the second, e.g. to warm-start on some and
    reinforce on others."""
    retries_from: str | None = None
    """r3 sft: the directory of an r3 train on the same problems. Where it answered wrongly, learn the reflection prompt
    that shows the answer too, so that the model can do something with a failure in its context."""
    pass_rates_from: str | None = None
    """The directory of an r3 train on the same problems ({seed} is filled in); one step with large groups is enough.
    Only problems with a pass rate there from min_pass_rate to max_pass_rate are trained on."""
    min_pass_rate: float = Field(0.0, ge=0, le=1)
    """With pass_rates_from: leave out problems that were solved more seldom than this; above 0, those never solved."""
    max_pass_rate: float = Field(1.0, ge=0, le=1)
    """With pass_rates_from: leave out problems that were solved more often than this."""
    heldout: int = Field(512, ge=0)
    """How many problems are kept apart for evaluation."""
    id_column: str = "id"
    """file: column of the stable query id; where it is missing the id is a hash of the question."""
    question_column: str = "problem"
    """file: column of the question."""
    answer_column: str = "answer"
    """file: column of the reference answer."""
    instruction: str = "Let's think step by step and output the final answer within \\boxed{}."
    """Appended to every question (not for arithmetic)."""
    min_difficulty: float | None = None
    """file: leave out problems whose column `difficulty` is below this (deepscaler: 0 to 100)."""
    max_difficulty: float | None = None
    """file: leave out problems whose column `difficulty` is above this."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """file: leave out training problems whose prompt is longer than this."""
    verifier: str = "math"
    """file: 'math' judges the last \\boxed{} symbolically, 'boxed' as text; or the dotted path of your own function
    f(completion, **columns) → float or bool (right above 0.5)."""
    caged: bool = False
    """file: run your own function in killable worker processes with a time and a memory limit."""
    chat: bool = True
    """Put the question through the tokenizer's chat template (not for arithmetic)."""

    @model_validator(mode="after")
    def _pass_rates_have_a_source(self) -> TaskSettings:
        if self.pass_rates_from is None and (self.min_pass_rate, self.max_pass_rate) != (0.0, 1.0):
            raise ValueError("min_pass_rate and max_pass_rate need pass_rates_from, the run that measured them")
        if self.min_pass_rate > self.max_pass_rate:
            raise ValueError(f"min_pass_rate={self.min_pass_rate:g} is above max_pass_rate={self.max_pass_rate:g}")
        return self


class RolloutSettings(Settings):
    """Sampling the groups."""

    engine: Literal["auto", "native", "transformers", "vllm"] = "auto"
    """Which engine draws the samples; auto takes native on a CUDA card where it knows the model, else transformers."""
    group_size: int = Field(8, ge=2)
    """G: samples per prompt. A group of one has nothing to compare with."""
    max_tokens: int = Field(1024, ge=1)
    """Longest response; longer ones are cut (truncated)."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the update uses the same."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling. Below 1 the drawn distribution is not the policy's own: ratios are then off."""
    top_k: int = Field(0, ge=0)
    """Sample from the k likeliest tokens; 0 for all. The same warning applies."""
    max_rows: int = Field(256, ge=1)
    """Most responses generated side by side."""
    memory: float = Field(0.85, gt=0, lt=1)
    """Share of the card's free memory that the engine's key-value cache may take while it runs."""


class TrainSettings(Settings):
    """The loop and the optimiser."""

    queries_per_step: int = Field(16, ge=1)
    """D_b: queries per step."""
    epochs: int = Field(3, ge=1)
    """Passes over the task."""
    steps: int | None = Field(None, ge=1)
    """Stop after so many steps, whatever epochs says."""
    tokens: int | None = Field(None, ge=1)
    """Stop at the end of the step in which so many tokens have been generated (reflection and resampling included)."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimiser updates per batch of rollouts."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    warmup_updates: int = Field(0, ge=0)
    """Updates of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls over the run."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's momentum terms."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm."""
    tokens_per_microbatch: int = Field(16384, ge=1)
    """Token budget of one packed forward and backward; a longer sequence goes alone."""
    shard: bool = False
    """With several processes: split float32 masters, gradients and AdamW's moments over them (FSDP2)."""
    max_bad_updates: int = Field(5, ge=1)
    """Stop after so many updates in a row with NaN or infinite gradients (each is skipped)."""


class BufferSettings(Settings):
    """The sample buffer S."""

    per_query: int | None = Field(64, ge=1)
    """Most living samples of one query; None for no limit."""
    total: int | None = Field(1_000_000, ge=1)
    """Most living samples in all; None for no limit."""


class EvaluateSettings(Settings):
    """Held-out accuracy under the plain prompt, during and after training."""

    every: int = Field(0, ge=0)
    """Evaluate every so many steps; 0 only before and after."""
    every_tokens: int = Field(0, ge=0)
    """Evaluate whenever so many more tokens have been generated in training; 0 to count steps alone."""
    samples: int = Field(1, ge=1)
    """Answers to each held-out problem; with several, pass@1 is their mean and pass@k is reported for k = samples."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature of the evaluation; 0 is greedy."""


class RunSettings(Settings):
    """The run directory and what is kept in it."""

    dir: str = "runs/{method}-{task}-{seed}"
    """Where the run is written; {method}, {task} and {seed} are filled in."""
    seed: int = Field(0, ge=0)
    """Seeds everything: data order, sampling, initialisation."""
    checkpoint_every: int = Field(20, ge=1)
    """Write a checkpoint every so many steps (and at the end, and when stopped)."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many checkpoints are kept."""
    rollouts_every: int = Field(1, ge=0)
    """Save the rollouts of every so many steps; 0 for none."""
    rollouts_groups: int = Field(8, ge=1)
    """How many groups of such a step are saved with their texts and numbers by token; the others in short."""
    threads: int | None = Field(None, ge=1)
    """CPU threads for torch; None leaves torch's own choice."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases (needs r3-rl[wandb])."""
    trackio: bool = False
    """Log to trackio (needs r3-rl[trackio])."""


class Config(Settings):
    """All of `r3 train`."""

    model: ModelSettings = Field(default_factory=ModelSettings)
    task: TaskSettings = Field(default_factory=TaskSettings)
    method: MethodSettings = Field(default_factory=MethodSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    reward: RewardSettings = Field(default_factory=RewardSettings)
    train: TrainSettings = Field(default_factory=TrainSettings)
    buffer: BufferSettings = Field(default_factory=BufferSettings)
    evaluate: EvaluateSettings = Field(default_factory=EvaluateSettings)
    run: RunSettings = Field(default_factory=RunSettings)

    @model_validator(mode="after")
    def _task_is_named_in_full(self) -> Config:
        if self.task.name == "file" and self.task.path is None:
            raise ValueError("task.name=file needs task.path: a JSONL, JSON or Parquet file, or the name of a set")
        if self.task.name == "reasoning-gym" and self.task.family is None:
            raise ValueError("task.name=reasoning-gym needs task.family, e.g. letter_counting or knights_knaves")
        return self

    @model_validator(mode="after")
    def _adapters_are_small(self) -> Config:
        if self.train.shard and self.model.lora.enabled:
            raise ValueError(
                "train.shard splits what training adds to every parameter, and with model.lora.enabled that is little: "
                "set one of them to false"
            )
        return self

    @model_validator(mode="after")
    def _decay_needs_an_end(self) -> Config:
        if self.train.tokens is not None and self.train.decay != "constant":
            raise ValueError(
                f"train.decay={self.train.decay} falls over a known number of steps, and train.tokens leaves it open: "
                "set train.decay=constant, or train.steps instead of train.tokens"
            )
        return self


def load_config(recipe: Path | None, overrides: Sequence[str] = ()) -> Config:
    """The config of a recipe file with `key=value` overrides on top.

    Without a recipe it is the embedded default; but settings that name another model or task start from the general
    defaults, since what suits the small bundled model (its learning rate, its length limit) suits no other.
    """
    if recipe is not None:
        given = read_recipe(recipe)
    else:
        own = {override.partition("=")[0].strip() for override in overrides} & {"model.path", "task.name"}
        given = {} if own else embedded_recipe()
    for override in overrides:
        apply_override(given, override)
    return validate(given)


def embedded_recipe() -> dict[str, Any]:
    """The recipe that runs with nothing but this package."""
    return read_recipe(Path(__file__).parent / "embedded" / "recipe.yaml")


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe file as a plain mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read recipe {path}: {error.strerror}; recipes live in recipes/") from error
    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ConfigError(
            f"{path} must hold a mapping of sections (model, task, method, …), not a {type(given).__name__}"
        )
    return given


def validate(given: Mapping[str, Any]) -> Config:
    """The config tree of a plain mapping, or a ConfigError with one line for every problem."""
    return validate_as(Config, given)


def validate_as(tree: type[Tree], given: Mapping[str, Any], under: str = "") -> Tree:
    """The same for another tree of settings; `under` is the key that it lies under in someone else's config."""
    try:
        return tree.model_validate(dict(given))
    except ValidationError as error:
        prefix = f"{under}." if under else ""
        raise ConfigError("\n".join(prefix + explain(dict(problem), tree) for problem in error.errors())) from error


def apply_override(given: dict[str, Any], override: str) -> None:
    """Set one dotted key in a plain mapping; `method=grpo` picks a preset and keeps the section's other settings."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"an override is written key=value, e.g. method.replay=off, not {override!r}")
    try:
        value = yaml.safe_load(text) if text else None
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: {text!r} is not a valid value: {' '.join(str(error).split())}") from error
    if isinstance(value, str):
        value = _number(value)
    *sections, last = key.strip().split(".")
    place = given
    for section in sections:
        below = place.get(section)
        if not isinstance(below, dict):  # absent, or a short form (replay: off, method: grpo) that is now spelt out
            below = {} if below is None else {"enabled": below} if isinstance(below, bool) else {"name": below}
            place[section] = below
        place = below
    if isinstance(place.get(last), dict) and not isinstance(value, dict):
        place[last]["enabled" if isinstance(value, bool) else "name"] = value
    else:
        place[last] = value


def _number(text: str) -> str | float:
    """1e-5 is a number to people, though not to YAML 1.1 (which wants 1.0e-5)."""
    try:
        return float(text) if "e" in text.lower() and any(c.isdigit() for c in text) else text
    except ValueError:
        return text


def dump(config: Config) -> str:
    """The resolved config as plain YAML, as a run directory keeps it."""
    return str(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
