"""One validated config tree: defaults, then a YAML recipe, then `key=value` overrides.

Unknown keys are refused with the nearest valid one, bad values with the reason; all at once, each on its own line.
`config_text.describe` prints the resolved tree with every setting's help text; what it prints reads back as a recipe.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from r3.config_text import describe, explain, load_yaml
from r3.errors import ConfigError
from r3.evaluate import EvaluateSettings
from r3.method.presets import reset, reset_objective
from r3.method.settings import MethodSettings, ObjectiveSettings, RewardSettings
from r3.policy import ModelSettings, OptimiserSettings
from r3.rollout import RolloutSettings
from r3.run import RunSettings
from r3.settings import Settings
from r3.tasks.datasets import SETS
from r3.tasks.settings import AnyTaskSettings, ArithmeticSettings, of_its_family


class TrainSettings(OptimiserSettings):
    """The loop and the optimiser."""

    queries_per_step: int = Field(16, ge=1, le=1_000_000)
    """D_b: queries per step."""
    epochs: int = Field(3, ge=1, le=1_000_000)
    """Passes over the task, where train.steps does not say how long the run is."""
    steps: int | None = Field(None, ge=1)
    """Number of steps, in as many passes over the task as that takes; epochs is then ignored, like max_steps in TRL."""
    tokens: int | None = Field(None, ge=1)
    """Stop at the end of the step in which this many tokens are reached (reflection and resampling included)."""


log = logging.getLogger(__name__)
Tree = TypeVar("Tree", bound=BaseModel)


class BufferSettings(Settings):  # here, since r3.buffer is made to be imported without pydantic
    """The sample buffer S."""

    per_query: int | None = Field(64, ge=1)
    """Most living samples of one query; None for no limit."""
    total: int | None = Field(1_000_000, ge=1)
    """Most living samples in all; None for no limit."""
    successes_from: str | None = None
    """Directory of an earlier run of r3 train on the same problems with the same tokenizer: its right answers are
    replayed where this run has too few of its own. It is only read; {seed} in it is this run's seed."""


class Config(Settings):
    """All settings of `r3 train`."""

    model: ModelSettings = Field(default_factory=ModelSettings)
    task: AnyTaskSettings = Field(default_factory=ArithmeticSettings)
    method: MethodSettings = Field(default_factory=MethodSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    reward: RewardSettings = Field(default_factory=RewardSettings)
    train: TrainSettings = Field(default_factory=TrainSettings)
    buffer: BufferSettings = Field(default_factory=BufferSettings)
    evaluate: EvaluateSettings = Field(default_factory=EvaluateSettings)
    run: RunSettings = Field(default_factory=RunSettings)

    @model_validator(mode="after")
    def _adapters_are_small(self) -> Config:
        if self.train.shard and self.model.lora.enabled:
            raise ValueError(
                "train.shard splits what training adds to every parameter, and with model.lora.enabled that is little: "
                "set one of them to false"
            )
        return self

    @model_validator(mode="after")
    def _the_reward_fits_the_method(self) -> Config:
        if self.method.advantage.scale == "mean" and self.reward.of(self.method.name).overlong.enabled:
            raise ValueError(
                "method.advantage.scale=mean divides by the mean reward, which reward.overlong can make 0 or negative: "
                "set reward.overlong=off, or another scale"
            )
        return self

    @model_validator(mode="after")
    def _what_was_drawn_is_the_policys_own(self) -> Config:
        homogeneous, rollout = self.method.advantage.homogeneous, self.rollout
        narrowed = rollout.top_p < 1 or rollout.top_k > 0
        if homogeneous in ("zvp", "lens") and (narrowed or (homogeneous == "lens" and rollout.temperature != 1)):
            raise ValueError(
                f"method.advantage.homogeneous={homogeneous} weighs answers by how sure the policy was, and "
                "log-probs and entropies are those of the distribution drawn from: set rollout.top_p=1 and "
                "rollout.top_k=0" + (", and rollout.temperature=1" if homogeneous == "lens" else "")
            )
        return self

    @model_validator(mode="after")
    def _a_mean_has_no_penalties(self) -> Config:
        penalties = [reward.called for reward in self.task.rewards if reward.weight < 0]
        if self.method.advantage.scale == "mean" and penalties:
            raise ValueError(
                f"method.advantage.scale=mean divides by the mean reward, and task.rewards takes from it "
                f"({', '.join(penalties)}): give weights of 0 or more, or set another scale"
            )
        return self

    @model_validator(mode="after")
    def _what_is_trusted_needs_no_scores(self) -> Config:
        demonstration = self.method.demonstration
        if demonstration.enabled and demonstration.trusted and self.task.rewards:
            raise ValueError(
                "method.demonstration.trusted takes demonstrations for right unseen, and task.rewards has to see an "
                "answer to score it: set method.demonstration.trusted=false"
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

    @property
    def evaluation_limit(self) -> int:
        """How many tokens a held-out answer may have."""
        return self.evaluate.max_tokens or self.rollout.max_tokens

    def settled(self) -> Config:
        """The config with everything filled in that one section leaves to another: what a run computes with.

        What the run writes down is the config as it is, so that another method can be named over it later.
        """
        objective = self.method.objective
        if objective.constant_length is None:
            objective = objective.model_copy(update={"constant_length": self.rollout.max_tokens})
        ranking = self.method.ranking
        if ranking.limit is None:
            ranking = ranking.model_copy(update={"limit": self.rollout.max_tokens})
        demonstration = self.method.demonstration
        if demonstration.max_tokens is None:
            demonstration = demonstration.model_copy(update={"max_tokens": self.rollout.max_tokens})
        method = self.method.model_copy(
            update={"objective": objective, "ranking": ranking, "demonstration": demonstration}
        )
        reward = self.reward
        if self.task.rewards and reward.length_bonus == "auto":  # the bonus is a part of the paper's own reward
            reward = reward.model_copy(update={"length_bonus": False})
        return self.model_copy(update={"method": method, "reward": reward.of(method.name)})


PATHS = ("model.path", "task.path", "task.heldout_path", "task.pass_rates_from", "task.retries_from")
"""Settings that may name a file or folder to read."""


def load_config(recipe: Path | Mapping[str, Any] | None, overrides: Iterable[str | tuple[str, Any]] = ()) -> Config:
    """The config of a recipe (a file, or its content) with overrides on top: `key=value`, or a key and its value.

    Without a recipe it is the embedded default; but settings that name another model or task start from the general
    defaults, since what suits the small bundled model (its learning rate, its length limit) suits no other.
    """
    settings = [split_override(given) if isinstance(given, str) else given for given in overrides]
    if isinstance(recipe, Path):
        given = locate(read_recipe(recipe), recipe.parent)
    elif recipe is not None:
        given = copy.deepcopy(dict(recipe))
    else:
        given = {} if {key for key, _ in settings} & {"model.path", "task.name", "task"} else embedded_recipe()
    for key, value in settings:
        set_value(given, key, value)
    return _with_folders(validate(given), recipe if isinstance(recipe, Path) else None)


def tell_without_effect(config: Config, overrides: Iterable[str | tuple[str, Any]]) -> None:
    """A warning for every setting that was asked for in a section that is off, such as replay.k under method=grpo."""
    if os.environ.get("RANK", "0") != "0":  # torchrun starts several of us: the first one says it
        return
    for given in overrides:
        key, _ = split_override(given) if isinstance(given, str) else given
        *above, last = key.split(".")
        section: Any = config
        for depth, name in enumerate(above, 1):
            section = getattr(section, name, None)
            if getattr(section, "enabled", True) is False and last != "enabled":
                switch = ".".join(above[:depth])
                log.warning(
                    "%s has no effect: %s is off (method=%s); set %s=on, or leave it out",
                    key,
                    switch,
                    config.method.name,
                    switch,
                )


def _with_folders(config: Config, recipe: Path | None) -> Config:
    """The config with the folders in which the task's functions are looked for, so that a resume finds them."""
    task = config.task
    if not task.own_functions or task.functions_in:
        return config
    folders = [*([] if recipe is None else [recipe.resolve().parent]), Path.cwd()]
    names = list(dict.fromkeys(str(folder) for folder in folders))
    return config.model_copy(update={"task": task.model_copy(update={"functions_in": names})})


def locate(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Put the folder before relative paths where it holds what they name.

    What is not there may be a name (of a set, of a model on the hub), or lie in another folder: it stays as it is.
    """
    for key in PATHS:
        section, _, name = key.partition(".")
        below = given.get(section)
        value = below.get(name) if isinstance(below, dict) else None
        named = value in SETS or value == "embedded"
        if isinstance(below, dict) and isinstance(value, str) and not named and _is_at(folder, value):
            below[name] = os.path.normpath(folder / value)  # the same path, however it was reached
    return given


def _is_at(folder: Path, name: str) -> bool:
    """Whether the folder holds it; a name may end in {seed}, which is filled in later."""
    path = folder / name.partition("{")[0]
    try:
        return bool(name) and (path.exists() if "{" not in name else path.parent.exists() and "/" in name)
    except (OSError, ValueError):  # too long for a name, or a zero byte in it
        return False


def embedded_recipe() -> dict[str, Any]:
    """The recipe that runs with nothing but this package."""
    return read_recipe(Path(__file__).parent / "embedded" / "recipe.yaml")


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe file as a plain mapping."""
    if path.exists() and not path.is_file():  # opening a pipe would wait for ever
        raise ConfigError(f"cannot read recipe {path}: not a file; recipes live in recipes/")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError, as is a zero byte in a path
        reason = getattr(error, "strerror", None) or f"not UTF-8 text ({error})"
        raise ConfigError(f"cannot read recipe {path}: {reason}; recipes live in recipes/") from error
    given = load_yaml(text, str(path))
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


def split_override(override: str) -> tuple[str, Any]:
    """The key and the value of `key=value`."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"an override is written key=value, e.g. method.replay=off, not {override!r}")
    value = load_yaml(text, f"{key}={text[:200]}") if text else None
    return key.strip(), _number(value) if isinstance(value, str) else value


def set_value(given: dict[str, Any], key: str, value: Any) -> None:
    """Set one dotted key in a plain mapping.

    `method=grpo` picks a preset: what it governs (`presets.governed`) starts from it anew, whatever stood there before;
    the section's other settings stay, and later overrides lie over it. So does `method.objective=gspo`.
    """
    *sections, last = key.split(".")
    branch = given
    for section in sections:
        below = branch.get(section)
        if not isinstance(below, dict):  # absent, or a short form (replay: off, method: grpo) that is now spelt out
            below = {} if below is None else {"enabled": below} if isinstance(below, bool) else {"name": below}
            branch[section] = below
        branch = below
    if isinstance(value, str) and _names_a_preset(given, [*sections, last], value):
        return
    if key == "task" and isinstance(value, str):
        branch.setdefault("task", {})  # a family by its name, whatever stood there before
    if isinstance(branch.get(last), dict) and not isinstance(value, dict):
        branch[last]["enabled" if isinstance(value, bool) else "name"] = value
    else:
        branch[last] = value
    if key in ("task", "task.name") and isinstance(given["task"], dict):
        given["task"] = of_its_family(given["task"])


def _names_a_preset(given: dict[str, Any], path: list[str], name: str) -> bool:
    """Name the preset at `method` or `method.objective` (or its `.name`), if `path` is that; whether it is."""
    section = path[:-1] if path[-1] == "name" else path
    if section not in (["method"], ["method", "objective"]):
        return False
    branch = given
    for part in section:
        below = branch.get(part)
        branch[part] = below if isinstance(below, dict) else {}  # a short form names what is replaced
        branch = branch[part]
    (reset if section == ["method"] else reset_objective)(branch, name)
    return True


def _number(text: str) -> str | float:
    """1e-5 is a number to people, though not to YAML 1.1 (which wants 1.0e-5)."""
    try:
        return float(text) if "e" in text.lower() and any(c.isdigit() for c in text) else text
    except ValueError:
        return text


def changes(config: Config) -> str:
    """`describe`, but only what differs from the defaults and from the presets that are named."""
    return describe(config, beside=defaults_of(config))


def defaults_of(config: Config) -> Config:
    """The defaults, with what the presets set that the config names."""
    method = config.method
    preset = MethodSettings(name=method.name)
    objective = preset.objective
    if method.objective.name != objective.name:  # another is named: only its name and what differs from it
        objective = ObjectiveSettings(name=method.objective.name).model_copy(update={"name": objective.name})
    beside = preset.model_copy(update={"name": MethodSettings().name, "objective": objective})
    return Config().model_copy(update={"method": beside})


def dump(config: Config, folder: Path | None = None) -> str:
    """The resolved config as plain YAML. A run directory keeps it with paths that hold from wherever it is resumed."""
    tree = config.model_dump(mode="json")
    if folder is not None:
        locate(tree, Path.cwd())
        _inside(tree, folder.absolute())
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def _inside(tree: dict[str, Any], folder: Path) -> None:
    """Write paths inside the folder relative to it, so that it can be moved."""
    for key in PATHS:
        section, _, name = key.partition(".")
        value = tree[section].get(name)
        if value and Path(value).is_relative_to(folder):
            tree[section][name] = str(Path(value).relative_to(folder))
