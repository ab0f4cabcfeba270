"""Resuming a run: which settings may change, and whether everything that it needs is there, before a byte is changed.

A checkpoint alone is not enough for an exact resume: metrics, buffer, data and tokenizer must be those of the same run.
The checkpoint says what the buffer must hold (`buffer.json`), run.json says what data and tokenizer were, and which
checkpoint was the newest, so that an unmounted folder does not look like a run that has none yet.

A checkpoint holds the policy in Hugging Face format and everything else that an exact resume needs (`save`, `restore`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from r3.buffer import Contents, SampleBuffer
from r3.config import Config, locate, set_value, split_override, validate
from r3.errors import ConfigError, RunError
from r3.method.reflection import PlainPrompts
from r3.policy.model import Policy
from r3.policy.optimiser import Optimiser
from r3.run import Checkpoint, RunDirectory, RunFiles
from r3.run.directory import RESTORE
from r3.samples import Query
from r3.tasks import Task
from r3.tasks.settings import of_its_family
from r3.train.build import digest_of_vocabulary
from r3.train.loop import Trainer
from r3.verify.functions import digest_of_source

log = logging.getLogger(__name__)

# How long the run goes on, what it keeps and shows, and where. Any other change would make another experiment.
MAY_CHANGE = (
    "train.steps",
    "train.epochs",
    "train.tokens",
    "train.shard",
    "run.",
    "evaluate.every",
    "rollout.max_rows",
    "task.functions_in",
    "rollout.server",
)
MAY_NOT_CHANGE = ("run.seed",)
MAY_FALL = ("train.learning_rate", "train.max_grad_norm")
"""May be lowered, for a run that diverged; run.json notes it, and later resumes keep it."""

CONTENTS = "buffer.json"
"""The file in a checkpoint that has the buffer's totals."""
_TOKENISED = 64
"""Prompts whose token ids go into the tokenizer's digest."""


# -------------------------------------------------------------------- settings


def resumed_config(
    path: Path, *, given: Config | None = None, overrides: Iterable[str | tuple[str, Any]] = ()
) -> Config:
    """The run's own config with overrides, or `given` (of a recipe) where it differs only in what may change."""
    files = RunFiles(path)
    info = files.read_info()
    saved = saved_settings(files, info)
    before = validate(saved)
    if given is None:
        for override in overrides:
            set_value(saved, *(split_override(override) if isinstance(override, str) else override))
        given = validate(saved)
    given = validate(locate(given.model_dump(mode="json"), Path.cwd()))  # as the run's own paths
    changed, old = changed_settings(before, given), flat(before)
    refused = [
        key
        for key, value in changed.items()
        if key in MAY_NOT_CHANGE or not (key.startswith(MAY_CHANGE) or (key in MAY_FALL and value < old[key]))
    ]
    if refused:
        raise ConfigError(
            f"{path} was made with other settings ({', '.join(sorted(refused))}); resume it without them, or start a "
            "new run in another run.dir"
        )
    return given


def saved_settings(files: RunFiles, info: Mapping[str, Any]) -> dict[str, Any]:
    """The run's settings as they stand: its config.yaml, with a learning rate that an earlier resume lowered."""
    try:
        saved = yaml.safe_load(files.read_config())
    except yaml.YAMLError as error:
        raise RunError(f"{files.config_path}: damaged ({' '.join(str(error).split())}); {RESTORE}") from error
    if not isinstance(saved, dict):
        raise RunError(f"{files.config_path}: damaged (it holds no settings); {RESTORE}")
    if isinstance(saved.get("task"), Mapping):  # earlier versions listed the settings of every family
        saved["task"] = of_its_family(saved["task"])
    for resume in info.get("resumes", []):
        for key in MAY_FALL:
            if key in resume.get("settings", {}):
                set_value(saved, key, resume["settings"][key])
    return locate(locate(saved, files.path.absolute()), Path.cwd())


def changed_settings(before: Config, after: Config) -> dict[str, Any]:
    """The settings in which two configs differ, with the later value."""
    old = flat(before)
    return {key: value for key, value in flat(after).items() if value != old.get(key)}


def flat(config: Config) -> dict[str, Any]:
    """Every setting under its dotted name."""
    return _flat(config.model_dump(mode="json"))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return flat


# ----------------------------------------------------------------------- files


def save_contents(buffer: SampleBuffer, folder: Path) -> None:
    """Write into a checkpoint what the buffer holds now."""
    (folder / CONTENTS).write_text(json.dumps(buffer.contents()._asdict(), indent=1) + "\n")


def check_files(directory: RunDirectory) -> Checkpoint | None:
    """The checkpoint to go on from (None: from the start), once metrics and buffer are known to belong to it.

    Reads only. `RunError` names the part that is missing or older.
    """
    checkpoint = directory.checkpoints.latest()
    written = _newest_written(directory)
    if checkpoint is None:
        if written is not None:
            raise RunError(
                f"{directory.checkpoints.folder}: no checkpoint is there, but the run wrote one of step {written}; "
                f"{RESTORE}"
            )
        _check_start(directory)
        return None
    last = directory.metrics.last_step
    if last is None or last < checkpoint.step:
        raise RunError(
            f"{directory.metrics_path}: ends at step {last}, before the checkpoint of step {checkpoint.step}: lines "
            f"are missing; restore the file from a backup, or remove the checkpoints after step {last} to go back there"
        )
    _check_buffer(directory, checkpoint)
    if written is not None and written > checkpoint.step:
        log.warning(
            "%s: the newest intact checkpoint is of step %d, though one of step %d was written; going back there",
            directory.checkpoints.folder,
            checkpoint.step,
            written,
        )
    return checkpoint


def _newest_written(directory: RunDirectory) -> int | None:
    """The newest checkpoint that the run recorded, whether or not it still exists."""
    said = [directory.info.get("checkpoint"), *(resume.get("step") for resume in directory.info.get("resumes", []))]
    if directory.buffer_path.exists():  # which settles a step when its checkpoint is written, also in earlier versions
        with SampleBuffer.open_reader(directory.buffer_path) as buffer:
            said.append(buffer.settled())
    return max((step for step in said if isinstance(step, int) and step > 0), default=None)


def _check_start(directory: RunDirectory) -> None:
    """Refuse to start a run without a checkpoint over if its buffer is lost: it would not be the same run."""
    last = directory.metrics.last_step or 0
    if last == 0:
        return
    newest = -1
    if directory.buffer_path.exists():
        with SampleBuffer.open_reader(directory.buffer_path) as buffer:
            newest = buffer.contents().step
    if newest < last:
        what = f"ends at step {newest}" if newest >= 0 else "empty or not there"
        raise RunError(
            f"{directory.buffer_path}: {what}, but the run reached step {last} and has no checkpoint; {RESTORE}"
        )


def _check_buffer(directory: RunDirectory, checkpoint: Checkpoint) -> None:
    path, step = directory.buffer_path, checkpoint.step
    if not path.exists():
        raise RunError(f"{path}: missing, and the checkpoint of step {step} needs its samples; {RESTORE}")
    with SampleBuffer.open_reader(path) as buffer:
        held, settled, missing = buffer.contents(until=step), buffer.settled(), buffer.missing_rows(until=step)
    if settled > step:
        raise RunError(
            f"{checkpoint.path}: older than what {path} can go back to (step {settled}); restore the checkpoints that "
            f"belong to it, or a buffer as old as the checkpoint; nothing was changed"
        )
    expected = _saved_contents(checkpoint)
    if expected is None:
        log.warning(
            "%s: written by an earlier version, which did not note what the buffer held: only its newest step was "
            "checked",
            checkpoint.path,
        )
    wanted = step if expected is None else expected.step
    if held.step < wanted:
        what = "empty" if held.step < 0 else f"ends at step {held.step}"
        raise RunError(
            f"{path}: {what}, older than the checkpoint of step {step}, which needs step {wanted}; {RESTORE}"
        )
    if missing:
        raise RunError(f"{path}: {missing} of the samples that it lists are missing; {RESTORE}")
    if expected is not None and held != expected:
        names = [name for name in Contents._fields if getattr(held, name) != getattr(expected, name)]
        raise RunError(
            f"{path}: not what it was at the checkpoint of step {step} ({', '.join(names)} differ): it is of another "
            f"run or was edited; {RESTORE}"
        )


def _saved_contents(checkpoint: Checkpoint) -> Contents | None:
    path = checkpoint.path / CONTENTS
    return Contents(**json.loads(path.read_text())) if path.exists() else None


# ---------------------------------------------------------- data and tokenizer


def inputs_of(
    task: Task, prompts: PlainPrompts, earlier: SampleBuffer | None = None, functions: Iterable[str] = ()
) -> dict[str, Any]:
    """Digests of the problems, in order, of the tokenizer and of the files of the user's functions, and what an earlier
    run's buffer holds, for run.json."""
    problems = {
        name: {"problems": len(queries), "digest": _digest_of_queries(queries)}
        for name, queries in (("train", task.train), ("heldout", task.heldout))
    }
    digests = {
        "tokenizer": _digest_of_tokenizer(prompts, task.train[:_TOKENISED]),
        "vocabulary": digest_of_vocabulary(prompts.tokenizer),
        "help": _digest_of_help(task.train),
        "functions": {name: digest_of_source(name) for name in functions},
    }
    before = {} if earlier is None else {"earlier": earlier.contents()._asdict()}
    return {**problems, **digests, **before}


def check_inputs(directory: RunDirectory, inputs: Mapping[str, Any], *, allowed: bool) -> dict[str, Any]:
    """What changed in data and tokenizer since the run began, for run.json; refused unless `allowed`."""
    then = directory.info.get("inputs")
    if then is None:
        log.warning(
            "%s: written by an earlier version, which kept no digests of data and tokenizer: not checked",
            directory.info_path,
        )
        return {}
    changed = [
        f"{said} ({then[name]['problems']:,} problems then, {inputs[name]['problems']:,} now)"
        for name, said in (("train", "the training data"), ("heldout", "the held-out data"))
        if inputs[name] != then[name]
    ]
    # Runs of earlier versions had no demonstrations and hints to go by.
    changed += ["the demonstrations, hints or feedback"] if inputs["help"] != then.get("help", inputs["help"]) else []
    functions = {name for name, digest in then.get("functions", {}).items() if inputs["functions"].get(name) != digest}
    changed += [f"the source of {name}" for name in sorted(functions)]
    changed += ["the tokenizer"] if inputs["tokenizer"] != then["tokenizer"] else []
    changed += ["the buffer of buffer.successes_from"] if inputs.get("earlier") != then.get("earlier") else []
    if not changed:
        return {}
    if not allowed:
        raise RunError(
            f"{directory.path}: {' and '.join(changed)} changed since the run began: it would go on as another one; "
            "restore what it was, or accept it with --allow-changed-data (run.json notes it); nothing was changed"
        )
    log.warning("%s: %s changed since the run began; going on all the same", directory.path, " and ".join(changed))
    return {"changed_inputs": {name: inputs[name] for name in inputs if inputs[name] != then.get(name)}}


def _digest_of_queries(queries: Sequence[Query]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for query in queries:
        prompt = query.prompt if isinstance(query.prompt, str) else [(turn.role, turn.content) for turn in query.prompt]
        row = [query.id, prompt, query.answer, dict(query.columns)]
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def _digest_of_help(queries: Sequence[Query]) -> str:
    """A digest of what methods show or train on besides the problems."""
    digest = hashlib.blake2b(digest_size=16)
    for query in queries:
        digest.update(json.dumps([query.demonstration, query.hints, query.feedback]).encode() + b"\n")
    return digest.hexdigest()


def _digest_of_tokenizer(prompts: PlainPrompts, queries: Sequence[Query]) -> str:
    """A digest of what it does, not of its files: vocabulary, template, special tokens, ids of some prompts."""
    tokenizer: Any = prompts.tokenizer
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    special = [tokenizer.eos_token_id, tokenizer.bos_token_id, sorted(tokenizer.all_special_ids)]
    digest.update(json.dumps([special, getattr(tokenizer, "chat_template", None)]).encode())
    for query in queries:
        digest.update(prompts(query).tobytes())
    return digest.hexdigest()


# -------------------------------------------------- the content of a checkpoint


def save(trainer: Trainer, folder: Path) -> None:
    """Write a checkpoint. All ranks have the same weights and optimiser: any number of processes can go on with it."""
    trainer.updater.policy.save(folder / "policy")
    state = {
        "step": trainer.step,
        "version": trainer.version,
        "position": trainer.position,
        "ahead": trainer.ahead.state(),
        "revisits": trainer.revisits.state(),
        "bad_in_a_row": trainer.updater.bad_in_a_row,
        "optimiser": trainer.updater.optimiser_state(),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    torch.save(state, folder / "trainer.pt")


def restore(trainer: Trainer, checkpoint: Path) -> None:
    """Put a trainer into the state of a checkpoint."""
    state = load_state(trainer.updater.policy, trainer.updater.optimiser, checkpoint)
    trainer.step, trainer.version = state["step"], state["version"]
    trainer.position = trainer.stream.position = state["position"]
    trainer.ahead.load(state.get("ahead"))  # earlier versions had none
    if "revisits" in state:  # earlier versions had none
        trainer.revisits.load(state["revisits"])
    trainer.updater.bad_in_a_row = state["bad_in_a_row"]
    torch.set_rng_state(state["rng"])
    if state["cuda_rng"] and torch.cuda.is_available():
        for device, saved in enumerate(state["cuda_rng"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, device)


def load_state(policy: Policy, optimiser: Optimiser, checkpoint: Path) -> dict[str, Any]:
    """Take over a checkpoint's weights and optimiser; the rest of what it holds."""
    path = checkpoint / "trainer.pt"
    if not path.exists():
        raise RunError(f"{path}: not there; every process of a job must see the run directory at the same path")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if not policy.settings.lora.enabled:  # adapters were loaded with the policy
        policy.load_weights(checkpoint / "policy")
    optimiser.load(state["optimiser"])
    return state
