"""What is compared: variants × seeds of one recipe, each cell an ordinary `r3 train` with the same token budget.

A variant may differ from the others in the method and its buffer, and in a learning rate that was tuned for it.
Everything else (model, task, lengths, evaluation) comes from the one recipe, or the comparison would not be of methods.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3.compare.records import parse, planned, read_records
from r3.config import Config, load_config
from r3.errors import ConfigError
from r3.method.presets import METHODS
from r3.run.disk import write_atomically

FORMAT = 1
OWN = ("method", "buffer")
"""Sections of the config in which variants may differ."""
RATE = "train.learning_rate"
"""The only setting outside these sections in which a variant may differ, tuned for it."""
MACHINE = ("run.", "model.device", "rollout.engine", "rollout.max_rows")
"""Settings that say where and how fast a cell runs, not what it measures."""
DERIVED = ("train.tokens", "evaluate.every_tokens")
"""Settings that the plan determines."""
PLANNED = {
    **dict.fromkeys(("train.steps", "train.epochs", "train.tokens"), "--tokens"),
    "evaluate.every_tokens": "--evaluations",
    "run.seed": "--seeds",
    "run.dir": "--out",
}
"""Settings that the plan makes for every cell, whatever a recipe says, and the options that it makes them from."""
ENDLESS = ("train.steps=null", "train.epochs=1000000")
"""The token budget alone ends a cell."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A method by the name it has in the report, as overrides of the recipe."""

    name: str
    overrides: tuple[str, ...]

    @property
    def method(self) -> Variant:
        """The same without its own learning rate."""
        return Variant(self.name, tuple(text for text in self.overrides if not text.startswith(f"{RATE}=")))


@dataclass(frozen=True, slots=True)
class Plan:
    """A comparison, as the command line asks for it."""

    recipe: str | None
    """Path of the recipe; None for the embedded default."""
    overrides: tuple[str, ...]
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    tokens: int
    """Generated tokens that every cell may spend."""
    evaluations: int
    """Points on the curve after the start, on the same grid of tokens for all."""
    baseline: str
    """The variant that the others are measured against."""
    level: float | None = None
    """A held-out pass@1 for which the report gives the tokens needed; no cell depends on it."""
    looked_at: tuple[int, ...] = ()
    """Seeds on which some setting was chosen: the report makes no claim from them."""
    claims: tuple[str, ...] = ()
    """The user's claims, for the report to judge."""

    @property
    def every(self) -> int:
        """Tokens between two evaluations."""
        return max(1, -(-self.tokens // self.evaluations))

    @property
    def cells(self) -> list[tuple[Variant, int]]:
        """Seed by seed, so that a comparison stopped half-way has whole seeds to compare."""
        return [(variant, seed) for seed in self.seeds for variant in self.variants]

    def settings(self, variant: Variant, seed: int, directory: Path | str) -> list[str]:
        """The `key=value` settings of a cell, over the recipe's."""
        preset, *changes = variant.overrides
        return [
            preset,  # first: what is set for all lies over what the preset says
            *self.overrides,
            *changes,
            *ENDLESS,
            f"train.tokens={self.tokens}",
            f"evaluate.every_tokens={self.every}",
            f"run.seed={seed}",
            f"run.dir={directory}",
        ]

    def command(self, variant: Variant, seed: int) -> str:
        """The cell as a command to type: what its number comes from."""
        recipe = [] if self.recipe is None else [self.recipe]
        settings = self.settings(variant, seed, f"runs/{variant.name}-{seed}")
        return shlex.join(["r3", "train", *recipe, *settings])

    def config(self, variant: Variant) -> Config:
        """The resolved config of a variant (with the first seed)."""
        recipe = None if self.recipe is None else Path(self.recipe)
        return load_config(recipe, self.settings(variant, self.seeds[0], "cells"))

    def as_dict(self) -> dict[str, Any]:
        """The plan with everything that its numbers depend on, for the raw files."""
        configs = {variant.name: self.config(variant).model_dump(mode="json") for variant in self.variants}
        common = self.config(self.variants[0].method).model_dump(mode="json")
        return {
            "format": FORMAT,
            "recipe": self.recipe,
            "overrides": list(self.overrides),
            "tokens": self.tokens,
            "evaluations": self.evaluations,
            "baseline": self.baseline,
            "level": self.level,
            "seeds": list(self.seeds),
            "looked_at": list(self.looked_at),
            "common": {name: section for name, section in common.items() if name not in OWN},
            "variants": {
                variant.name: {
                    "overrides": list(variant.overrides),
                    **{name: configs[variant.name][name] for name in OWN},
                    **({RATE: configs[variant.name]["train"]["learning_rate"]} if variant.method != variant else {}),
                }
                for variant in self.variants
            },
        }


def make_plan(
    recipe: str | None,
    overrides: Sequence[str],
    *,
    methods: Sequence[str],
    variants: Sequence[str],
    seeds: Sequence[int],
    tokens: int,
    evaluations: int,
    baseline: str | None,
    level: float | None = None,
    looked_at: Sequence[int] = (),
    claims: Sequence[str] = (),
) -> Plan:
    """The plan of a command line, every part of it checked before anything runs."""
    chosen = [_preset(name) for name in methods] + [parse_variant(text) for text in variants]
    names = [variant.name for variant in chosen]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"two variants are called {twice[0]!r}; give each --variant a name of its own")
    if not chosen:
        raise ConfigError("nothing to compare: name some --methods, or a --variant name=preset,key=value")
    for override in overrides:
        if override.partition("=")[0].strip() in ("method", "method.name"):
            raise ConfigError(f"{override} would make every variant the same: name methods with --methods or --variant")
        if (option := PLANNED.get(override.partition("=")[0].strip())) is not None:
            raise ConfigError(f"{override} would not act: {option} says that for every cell of a comparison")
    first = baseline or ("grpo" if "grpo" in names else names[0])
    if first not in names:
        raise ConfigError(f"--baseline {first} is none of the variants: {', '.join(names)}")
    if evaluations > tokens:
        raise ConfigError(f"--evaluations {evaluations} are more than the --tokens {tokens}")
    if level is not None and not 0 < level < 1:
        raise ConfigError(f"--level {level:g} is a pass@1 to reach: a share between 0 and 1")
    looked = tuple(sorted(set(looked_at)))
    said = tuple(claims)
    plan = Plan(recipe, tuple(overrides), tuple(chosen), tuple(seeds), tokens, evaluations, first, level, looked, said)
    configs = [(variant.name, _check_equal(plan, variant)) for variant in chosen]
    _check_different(configs)
    for claim in claims:
        parse(claim, names, configs[0][1].evaluate.samples)
    return plan


def _preset(name: str) -> Variant:
    if name not in METHODS:
        raise ConfigError(f"--methods: no method {name!r}; there are {', '.join(METHODS)}")
    return Variant(name, (f"method={name}",))


def parse_variant(text: str) -> Variant:
    """A variant from `name=preset,key=value,…`; commas inside a value's brackets do not end it.

    >>> parse_variant("young=r3,method.replay.max_age=8").overrides
    ('method=r3', 'method.replay.max_age=8')
    """
    name, equals, rest = text.partition("=")
    preset, *overrides = re.split(r",(?=[\w.]+=)", rest)
    if not equals or not re.fullmatch(r"[\w.+-]+", name) or "=" in preset:
        raise ConfigError(
            f"--variant is written name=preset,key=value,… (e.g. young=r3,method.replay.max_age=8), not {text!r}"
        )
    for override in overrides:
        key = override.partition("=")[0]
        if key != RATE and key.split(".")[0] not in OWN:
            raise ConfigError(
                f"--variant {name}: {key} is not part of the method; variants may differ in "
                f"{', '.join(f'{part}.*' for part in OWN)} and {RATE} alone, all else is set once for every method"
            )
    return Variant(name, (*_preset(preset).overrides, *overrides))


def _check_equal(plan: Plan, variant: Variant) -> Config:
    config = plan.config(variant)
    if config.task.heldout == 0 and getattr(config.task, "heldout_path", None) is None:
        raise ConfigError("task.heldout=0: a comparison is of held-out accuracy; keep some problems apart")
    return config


def _check_different(configs: Sequence[tuple[str, Config]]) -> None:
    """Refuse two names for the same settings, which a reader would take for two methods."""
    seen: list[tuple[str, dict[str, Any]]] = []
    for name, config in configs:
        settings = config.model_dump(include=set(OWN))
        settings["method"].pop("name")  # what a method is called is not what it does
        settings[RATE] = config.train.learning_rate
        for other, before in seen:
            if before == settings:
                raise ConfigError(
                    f"{other} and {name} resolve to the same settings: one method under two names; leave one out, or "
                    "see what the recipe sets under method.*, which a preset does not undo"
                )
        seen.append((name, settings))


def save_plan(plan: Plan, out: Path) -> dict[str, Any]:
    """Write the plan, or add new variants and seeds to an existing one; refuse any other change to it."""
    path = _path(out)
    fresh, known = plan.as_dict(), []
    if path.exists():
        old = json.loads(path.read_bytes())
        fresh, known = _merged(old, fresh, out), old.get("claims", [])
    path.parent.mkdir(parents=True, exist_ok=True)
    return _written({**fresh, "claims": planned(plan.claims, known, before=not _has_results(out))}, out)


def add_claims(claims: Sequence[str], out: Path) -> None:
    """Add claims to the existing comparison in `out`."""
    plan, records = read_records(out)
    for claim in claims:
        parse(claim, list(plan["variants"]), records[0].k)
    _written({**plan, "claims": planned(claims, plan.get("claims", []), before=not _has_results(out))}, out)


def _path(out: Path) -> Path:
    return out / "raw" / "plan.json"


def _has_results(out: Path) -> bool:
    return any((out / "raw").glob("*-seed*.json"))


def _written(plan: dict[str, Any], out: Path) -> dict[str, Any]:
    write_atomically(_path(out), (json.dumps(plan, indent=1, ensure_ascii=False) + "\n").encode())
    return plan


def _merged(old: dict[str, Any], new: dict[str, Any], out: Path) -> dict[str, Any]:
    keys = ("tokens", "evaluations", "common")
    defaults = Config().model_dump(mode="json")
    before, after = ({key: plan[key] for key in keys} for plan in (old, new))
    changed = differing(before, known_then(before, after, {"common": defaults}))
    for name in old["variants"].keys() & new["variants"].keys():
        was, now = ({key: plan["variants"][name].get(key) for key in (*OWN, RATE)} for plan in (old, new))
        changed += [f"{name}: {key}" for key in differing(was, known_then(was, now, defaults))]
    changed = [key for key in changed if not key.removeprefix("common.").startswith((*MACHINE, *DERIVED))]
    if changed:
        raise ConfigError(
            f"{out} holds a comparison made otherwise ({', '.join(changed)}); choose another --out, or give the same "
            "settings to continue it"
        )
    seeds, looked_at = (sorted({*old.get(key, ()), *new[key]}) for key in ("seeds", "looked_at"))
    variants = {**old["variants"], **new["variants"]}
    return {**new, "common": old["common"], "seeds": seeds, "looked_at": looked_at, "variants": variants}


def undeclared(plan: Plan, out: Path) -> list[str]:
    """A line for each other comparison that has results for these seeds on this task, unless the plan declares it."""
    fresh = plan.as_dict()
    lines = []
    for path in sorted({_path(out), *out.parent.glob("*/raw/plan.json")}):
        if not path.exists():
            continue
        old = json.loads(path.read_bytes())
        same_folder = path.parent.parent == out
        tasks = [(made["common"]["model"]["path"], made["common"]["task"]) for made in (old, fresh)]
        if tasks[0] != tasks[1] or (same_folder and fresh["variants"].keys() <= old["variants"].keys()):
            continue  # another model or task; or the same command goes on with its cells
        seen = {int(raw.stem.rpartition("-seed")[2]) for raw in path.parent.glob("*-seed*.json")}
        declared = {*plan.looked_at, *(old.get("looked_at", ()) if same_folder else ())}
        shared = sorted(seen & set(plan.seeds) - declared)
        if shared:
            lines.append(
                f"note: {path.parent.parent} has results for {seed_list(shared)} of this task already; if a setting "
                "was chosen after seeing them, name them in --looked-at and add fresh seeds"
            )
    return lines


def seed_list(seeds: Sequence[int]) -> str:
    """The seeds, with consecutive ones as ranges.

    >>> seed_list([0, 1, 2, 5]), seed_list([4])
    ('seeds 0 to 2, 5', 'seed 4')
    """
    runs: list[list[int]] = []
    for seed in sorted(seeds):
        if runs and seed == runs[-1][-1] + 1:
            runs[-1].append(seed)
        else:
            runs.append([seed])
    ranges = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {ranges}"


def known_then(was: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`now` without the settings that an older version did not have and that change nothing: off, or at a default.

    >>> known_then({"a": 1}, {"a": 2, "b": 3, "c": 4, "d": {"enabled": False, "e": 5}}, {"b": 3, "c": 3})
    {'a': 2, 'c': 4}
    """
    kept: dict[str, Any] = {}
    for key, value in now.items():
        before, default = was.get(key), defaults.get(key)
        if key in was and isinstance(value, Mapping) and isinstance(before, Mapping):
            value = known_then(before, value, default if isinstance(default, Mapping) else {})
        elif key not in was and (value == default or (isinstance(value, Mapping) and value.get("enabled") is False)):
            continue
        kept[key] = value
    return kept


def differing(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ, with both values.

    >>> differing({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})
    ['a.c 2 → 3']
    """
    lines: list[str] = []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += differing(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key} {old} → {new}")
    return lines
