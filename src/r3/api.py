"""Training from Python, in a script or a notebook: `r3.train` and the `Run` that it returns (docs/python.md)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r3.errors import ConfigError, RunError, TaskError
from r3.run import Checkpoint, RunFiles, read_metrics
from r3.run.directory import DATASETS, make_folder
from r3.run.disk import write_atomically

if TYPE_CHECKING:
    from r3.buffer import SampleBuffer
    from r3.config import Config
    from r3.policy.model import Policy
    from r3.tasks import AnyReward, GivenRewards, Task
    from r3.train import AnyCallback
    from r3.view.server import Viewer

Rows = Iterable[Mapping[str, Any]]
"""A list of dicts, or a `datasets.Dataset`; a DataFrame of pandas or polars will do as well."""


def train(
    recipe: str | Path | Mapping[str, Any] | None = None,
    *,
    dataset: Rows | Any = None,
    heldout: Rows | Any = None,
    rewards: Sequence[AnyReward] | AnyReward | None = None,
    callbacks: Sequence[AnyCallback] = (),
    resume: str | Path | Run | None = None,
    allow_changed_data: bool = False,
    **settings: Any,
) -> Run:
    """Train, as `r3 train` does, and return the run.

    `recipe` is a recipe's path or its content; `settings` lie over it, a keyword for each section: `method="grpo"`,
    `train={"steps": 20}`, `model={"path": "…", "lora": {"enabled": True}}`. `dataset` are rows to train on in place of
    a file (`task.path`), `heldout` rows to evaluate on; both are kept in the run's directory, so that it can be resumed
    anywhere. `rewards` are functions in place of `task.rewards`: each alone, with its weight, or as a mapping with a
    recipe's keys; of several, `task={"outcome": NAME}` names the one that says right or wrong. `callbacks` are told of
    every step and checkpoint, and may end the run. `resume` goes on with a run.
    Bad input raises `ConfigError` or `TaskError`, both ValueErrors, before anything is written.
    """
    overrides = list(_flat(settings))
    given = _given(rewards, overrides)
    if resume is not None:
        return _resumed(resume, recipe, dataset, heldout, overrides, given, callbacks, allow_changed_data)
    if allow_changed_data:
        raise ConfigError("allow_changed_data is for resume: a new run takes the data as it is")
    from r3.config import load_config, tell_without_effect

    source = Path(recipe) if isinstance(recipe, str) else recipe
    if dataset is None:
        if heldout is not None:
            raise ConfigError("heldout=… goes with dataset=…; for data in files set task.path and task.heldout_path")
        config = _finding(given, load_config(source, overrides))
        tell_without_effect(config, overrides)
        return _trained(config, None, given, callbacks)
    with _kept(source, overrides, dataset, heldout) as config:
        tell_without_effect(config, overrides)
        return _trained(_finding(given, config), None, given, callbacks)


class Run:
    """A run in its directory, finished or not: what `r3.train` returns, or `r3.Run("runs/…")` opens."""

    def __init__(
        self,
        directory: str | Path,
        *,
        rewards: Sequence[AnyReward] | AnyReward = (),
        stopped_by: str | None = None,
    ) -> None:
        """`rewards` as for `r3.train`: needed to evaluate a run whose rewards were objects that no module holds."""
        from r3.tasks import given_rewards

        self.directory = Path(directory)
        self._given = given_rewards(rewards)
        self.stopped_by = stopped_by
        """The signal that ended `r3.train` early, 'callback' if one did, else None."""
        self._files = RunFiles(self.directory)
        self._files.read_info()

    @property
    def config(self) -> Config:
        """All settings of the run."""
        from r3.train.resume import resumed_config

        return resumed_config(self.directory)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A mapping for each step, from 0 (the evaluation before training): `pandas.DataFrame(run.metrics)`."""
        return [dict(line) for line in read_metrics(self._files.metrics_path)]

    @property
    def step(self) -> int:
        """The last step."""
        lines = self.metrics
        return int(lines[-1]["step"]) if lines else 0

    @property
    def checkpoint(self) -> Checkpoint:
        """The newest: its step and its path, where `policy` loads with from_pretrained."""
        newest = self._files.checkpoints.latest()
        if newest is None:
            raise RunError(
                f"{self.directory}: no checkpoint is there yet; one is written every run.checkpoint_every steps"
            )
        return newest

    @cached_property
    def policy(self) -> Policy:
        """The trained policy of the newest checkpoint: `.model` and `.tokenizer` are those of transformers."""
        from r3.policy.model import Policy

        saved = {"path": str(self.checkpoint.path / "policy"), "revision": None}
        return Policy.load(self.config.model.model_copy(update=saved))

    @cached_property
    def buffer(self) -> SampleBuffer:
        """Every answer ever given, by query; to read."""
        from r3.buffer import SampleBuffer

        return SampleBuffer.open_reader(self._files.buffer_path)

    def evaluate(
        self, dataset: Rows | Any = None, *, samples: int | None = None, temperature: float | None = None
    ) -> dict[str, Any]:
        """Accuracy of the policy with its interval, on the run's held-out problems or on other rows.

        Asked and judged as in the run; `samples` answers to each problem, by default `evaluate.samples`.
        """
        from r3.evaluate.run import evaluate
        from r3.method.reflection import plain_prompt
        from r3.rollout import Sampling
        from r3.train.build import make_engine

        config, policy = self.config, self.policy
        sampling = Sampling(
            max_tokens=config.evaluation_limit,
            stop_tokens=policy.stop_tokens,
            temperature=config.evaluate.temperature if temperature is None else temperature,
        )
        task = _task(config, dataset, self._given.functions)
        with contextlib.closing(task.judge):
            queries = task.heldout if dataset is None else task.train
            if not queries:
                raise TaskError(f"{self.directory}: the run kept no problems apart (task.heldout=0); give it rows")
            heldout = evaluate(
                make_engine(config, policy),
                task,
                [(query, plain_prompt(query, policy.tokenizer)) for query in queries],
                policy.tokenizer,
                sampling,
                samples=config.evaluate.samples if samples is None else samples,
                seed=config.run.seed,
            )
        return {key.removeprefix("heldout/"): value for key, value in heldout.metrics().items()}

    def view(self, *others: Run | str | Path, port: int | None = None) -> Viewer:
        """Serve the run's pages from this process, also while it goes on elsewhere; open the `url`, `close()` it."""
        from r3.view.runs import open_runs
        from r3.view.server import Viewer

        folders = [other.directory if isinstance(other, Run) else Path(other) for other in (self, *others)]
        return Viewer(open_runs(folders), port=port)

    def __repr__(self) -> str:
        stopped = f", stopped_by={self.stopped_by!r}" if self.stopped_by else ""
        return f"Run({str(self.directory)!r}{stopped})"


def rows_of(data: Rows | Any) -> list[dict[str, Any]]:
    """Rows of any of the kinds that `Rows` names as plain mappings that JSON can hold."""
    if hasattr(data, "to_dicts"):  # polars
        data = data.to_dicts()
    elif hasattr(data, "to_dict") and hasattr(data, "iloc"):  # pandas
        data = data.to_dict("records")
    if isinstance(data, str | bytes | Path) or not isinstance(data, Iterable):
        raise TaskError(
            f"dataset={data!r}: give rows (dicts, a datasets.Dataset, a DataFrame); a file goes into task.path"
        )
    if isinstance(data, Mapping):  # datasets.DatasetDict too
        raise TaskError(f"dataset is a mapping with the keys {', '.join(map(str, data))}; give the rows of one of them")
    rows = []
    for number, row in enumerate(data, 1):
        if not isinstance(row, Mapping):
            raise TaskError(f"dataset, row {number}: a {type(row).__name__}, not a mapping with named columns")
        rows.append({str(column): _plain(value, f"row {number}, column {column!r}") for column, value in row.items()})
    return rows


def _plain(value: Any, where: str) -> Any:
    """What JSON can hold; numbers and arrays of numpy and missing values of pandas are made so."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(below, where) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(below, where) for below in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), where)
    raise TaskError(f"dataset, {where}: a {type(value).__name__}, which a row cannot keep; make it a text or a number")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by sections as dotted keys; a name comes first, as it resets what it governs."""
    for key, value in sorted(settings.items(), key=lambda item: item[0] != "name"):
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, str(value) if isinstance(value, os.PathLike) else value


def _given(rewards: Any, overrides: list[tuple[str, Any]]) -> GivenRewards:
    """The rewards that were given as objects; what settings can say of them joins the overrides."""
    from r3.tasks import given_rewards

    if rewards is None:
        return given_rewards(())
    if "task.rewards" in dict(overrides):
        raise ConfigError("rewards=… and task.rewards both say what an answer is worth; give one of them")
    given = given_rewards(rewards)
    overrides.append(("task.rewards", given.settings))
    return given


def _finding(given: GivenRewards, config: Config) -> Config:
    """The config, with the folders that the given functions' modules lie in, so that a resume finds them."""
    folders = list(dict.fromkeys([*config.task.functions_in, *given.folders]))
    return config.model_copy(update={"task": config.task.model_copy(update={"functions_in": folders})})


@contextlib.contextmanager
def _kept(recipe: Any, overrides: list[tuple[str, Any]], dataset: Any, heldout: Any) -> Iterator[Config]:
    """A config whose task reads the rows, written into the run's directory; taken back if the run does not begin."""
    from r3.config import load_config
    from r3.train.session import run_path

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("dataset=… is for one process; in several, write the rows to a file and set task.path")
    if named := {key for key, _ in overrides} & {"task.path", "task.heldout_path", "task.name"}:
        raise ConfigError(f"{', '.join(sorted(named))} and dataset=… both say what to train on; give one of them")
    given = {name: rows for name, rows in zip(DATASETS, (dataset, heldout), strict=True) if rows is not None}
    texts = {name: _json_lines(rows_of(rows)) for name, rows in given.items()}
    keys = dict(zip(DATASETS, ("task.path", "task.heldout_path"), strict=True))
    first = [("task.name", "file"), *((keys[name], name) for name in texts)]
    folder = run_path(load_config(recipe, [*first, *overrides]))
    make_folder(folder)
    try:
        for name, text in texts.items():
            write_atomically(folder / name, text)
        yield load_config(recipe, [*first, *((keys[name], str(folder / name)) for name in texts), *overrides])
    finally:
        if not RunFiles(folder).info_path.exists():
            _remove_unbegun(folder)


def _remove_unbegun(folder: Path) -> None:
    """Take back what was written for a run that was refused."""
    for name in DATASETS:
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something else is in it
        folder.rmdir()


def _json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode(errors="surrogatepass")


def _resumed(
    resume: str | Path | Run,
    recipe: Any,
    dataset: Any,
    heldout: Any,
    overrides: list[tuple[str, Any]],
    given: GivenRewards,
    callbacks: Sequence[AnyCallback],
    allow_changed_data: bool,
) -> Run:
    from r3.train.resume import resumed_config

    if recipe is not None or dataset is not None or heldout is not None:
        raise ConfigError("resume goes on with a run's own recipe and data: give resume=… and the settings to change")
    path = resume.directory if isinstance(resume, Run) else Path(resume)
    if isinstance(resume, Run) and not given.settings:
        given = resume._given
    config = _finding(given, resumed_config(path, overrides=overrides))
    return _trained(config, path, given, callbacks, allow_changed_data=allow_changed_data)


def _trained(
    config: Config,
    resume: Path | None,
    given: GivenRewards,
    callbacks: Sequence[AnyCallback],
    *,
    allow_changed_data: bool = False,
) -> Run:
    from r3.train.session import run_path
    from r3.train.session import train as run_session

    more: dict[str, Any] = {"callbacks": callbacks, "functions": given.functions}
    finished = run_session(config, resume, allow_changed_data=allow_changed_data, **more)
    if finished is None:  # another process leads
        run = Run(resume or run_path(config))
    else:
        run = Run(finished.directory, stopped_by=finished.stopped_by)
    run._given = given
    return run


def _task(config: Config, dataset: Any, functions: Mapping[str, Callable[..., Any]]) -> Task:
    """The run's own task, or the same with other rows to ask."""
    from r3.tasks import load_task
    from r3.tasks.settings import FileSettings

    if dataset is None:
        return load_task(config.task, config.run.seed, functions=functions)
    if not isinstance(config.task, FileSettings):
        raise ConfigError(
            f"evaluate(dataset=…) is for runs on files or rows; this one made its problems ({config.task.name})"
        )
    with tempfile.TemporaryDirectory(prefix="r3-evaluate-") as folder:
        path = Path(folder) / DATASETS[0]
        path.write_bytes(_json_lines(rows_of(dataset)))
        whole = {"path": str(path), "heldout_path": None, "heldout": 0, "rows": None, "max_prompt_tokens": None}
        unfiltered = {"min_difficulty": None, "max_difficulty": None}
        return load_task(config.task.model_copy(update=whole | unfiltered), config.run.seed, functions=functions)
