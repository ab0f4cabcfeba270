"""From a config to the parts of a run, with every bad input refused before anything is written.

`open_earlier` opens the buffer of an earlier run whose successes are replayed (`buffer.successes_from`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch

from r3.buffer import SampleBuffer
from r3.config import Config
from r3.errors import ConfigError, RunError, TaskError
from r3.method.reflection import PlainPrompts, plain_prompt
from r3.policy.machine import set_threads
from r3.policy.model import Policy, compiles, load_tokenizer, pick_device, resolve
from r3.rollout import Engine, Sampling
from r3.run import RunFiles
from r3.samples import Query
from r3.tasks import Task, load_problems
from r3.tasks.settings import FileSettings
from r3.train.checks import check_demonstrations, check_help, check_room
from r3.train.sampler import Sampler

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of, before it has a directory."""

    config: Config
    task: Task
    policy: Policy
    engine: Engine
    sampling: Sampling
    prompts: PlainPrompts
    earlier: SampleBuffer | None = None
    """The buffer of the run whose successes are replayed (`buffer.successes_from`)."""


def build(
    config: Config, *, adapters_from: Any = None, functions: Mapping[str, Callable[..., Any]] = MappingProxyType({})
) -> Parts:
    """Load and check everything that a run needs; `functions` are rewards that were given as objects."""
    set_threads(config.run.threads)
    torch.manual_seed(config.run.seed)
    check_extras(config)
    task = load_problems(config.task, config.run.seed, prompt_length(config), functions)
    check_task(task)
    check_batch(config, task)
    check_help(config, task)
    check_passes(config, task)
    policy = Policy.load(config.model, adapters_from=adapters_from)
    prompts = PlainPrompts(policy.tokenizer)
    check_prompts(config, task, prompts, policy.max_context)
    check_reference(config, policy.continues)
    check_stop_tokens(config, policy.stop_tokens)
    sampling = Sampling(
        max_tokens=config.rollout.max_tokens,
        stop_tokens=policy.stop_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
    )
    earlier = None
    if config.buffer.successes_from is not None:
        vocabulary = digest_of_vocabulary(policy.tokenizer)
        earlier = open_earlier(config.buffer.successes_from, config.run.seed, task.train, vocabulary)
    engine = make_engine(config, policy)
    return Parts(config, task, policy, engine, sampling, prompts, earlier)


def check_ahead(config: Config, processes: int) -> None:
    """The engine can draw a step's answers while the policy is updated on another's."""
    engine = config.rollout.engine
    on_card = pick_device(config.model).type == "cuda"
    if not config.rollout.ahead:
        return
    if engine == "vllm":
        reason = "rollout.engine=vllm shares this process's memory with the update, and sleeps while that runs"
    elif engine == "native" or (on_card and engine != "vllm-server"):
        reason = f"rollout.engine={engine} generates where the update runs, from weights that it reads in place"
    elif processes > 1:
        reason = f"the {processes} processes of a job generate and train in turns"
    else:
        return
    raise ConfigError(f"rollout.ahead=1: {reason}; set rollout.engine=vllm-server with one process, or rollout.ahead=0")


def check_extras(config: Config) -> None:
    """Check that packages which the settings need are installed."""
    for name in ("tensorboard", "wandb", "trackio"):
        if getattr(config.run, name) and find_spec(name) is None:
            fix = "pip install tensorboard" if name == "tensorboard" else f"pip install 'r3-rl[{name}]'"
            raise ConfigError(f"run.{name}=true: logging there needs the package {name}: {fix}")


def check_reference(config: Config, continues: bool) -> None:
    """Check that a KL penalty would be to the policy that the run starts from."""
    if continues and config.method.objective.kl > 0:
        raise ConfigError(
            f"method.objective.kl={config.method.objective.kl:g} is to the model under the adapters of model.path="
            f"{config.model.path}, not the policy that this run goes on from; merge them first: r3 models merge"
        )


def check_stop_tokens(config: Config, stop_tokens: Sequence[int]) -> None:
    """Check that there is a token that ends an answer."""
    if not stop_tokens:
        raise ConfigError(
            f"model.path={config.model.path}: neither its tokenizer nor its generation config names an end-of-text "
            "token, so no answer could ever end; set eos_token in tokenizer_config.json"
        )


def prompt_length(config: Config) -> Callable[[Query], int] | None:
    """Counts the tokens of a query's prompt, where a filter asks for it; the tokenizer alone is loaded for that."""
    if not isinstance(config.task, FileSettings) or config.task.max_prompt_tokens is None:
        return None
    tokenizer = load_tokenizer(resolve(config.model.path), config.model)
    check_template(config, config.task.chat, tokenizer)
    return lambda query: len(plain_prompt(query, tokenizer))


def make_sampler(parts: Parts) -> Sampler:
    """What draws, judges and rewards the groups of a run or of a probe."""
    config, tokenizer = parts.config, parts.policy.tokenizer
    reward = config.settled().reward
    return Sampler(parts.engine, parts.task, tokenizer, parts.sampling, reward, config.rollout.group_size)


def make_engine(config: Config, policy: Policy) -> Engine:
    """The rollout engine that the config names; auto takes native where it runs, else transformers, and says so."""
    rollout, wanted = config.rollout, config.rollout.engine
    try:
        if wanted == "vllm":
            from r3.rollout.vllm.engine import VllmEngine

            path = str(policy.base.name_or_path)
            return VllmEngine(policy.base, path, max_rows=rollout.max_rows, memory=rollout.memory)
        if wanted == "vllm-server":
            from r3.rollout.vllm.servers import VllmServerEngine

            return VllmServerEngine(
                policy.base, rollout.servers, max_rows=rollout.max_rows, patience=rollout.server_patience
            )
        beside = rollout.ahead and policy.device.type == "cpu"  # which native cannot do: `check_ahead`
        if wanted == "native" or (wanted == "auto" and not beside):
            engine = _native(config, policy)
            if engine is not None:
                return engine
        from r3.rollout.transformers import TransformersEngine

        return TransformersEngine(policy.base, max_rows=rollout.max_rows)
    except ValueError as error:
        raise ConfigError(f"rollout.engine={wanted}: {error}") from error


def _native(config: Config, policy: Policy) -> Engine | None:
    """The native engine, or None where auto may fall back from it."""
    from r3.rollout.native import NativeEngine

    try:
        return NativeEngine(
            policy.base,
            max_rows=config.rollout.max_rows,
            memory=config.rollout.memory,
            compile=compiles(config.model, policy.device),
        )
    except (ValueError, ImportError) as error:
        if config.rollout.engine == "native":
            raise ConfigError(f"rollout.engine=native: {error}; set rollout.engine=transformers") from error
        log.warning("rollout.engine=auto: %s; the transformers engine runs it, more slowly", error)
        return None


def check_task(task: Task) -> None:
    """Something to train on, and nothing of it held out."""
    if not task.train:
        raise TaskError(f"task {task.name!r} has no training queries; check task.path and its filters")
    shared = {query.id for query in task.train} & {query.id for query in task.heldout}
    if shared:
        raise TaskError(
            f"task {task.name!r}: {len(shared)} held-out problems are also in the training data "
            f"(e.g. {min(shared)!r}); evaluation would measure memory: remove them from one side"
        )

    texts = {query.prompt for query in task.train}
    if (again := len(task.train) - len(texts)) > 0:
        log.warning(
            "task %r: %d training queries repeat the text of another under an id of their own: each has a history to "
            "itself, and the text weighs as often as it comes",
            task.name,
            again,
        )
    if known := sum(query.prompt in texts for query in task.heldout):
        log.warning(
            "task %r: %d held-out problems have the very text of a training query, under another id: their accuracy "
            "measures memory",
            task.name,
            known,
        )


def check_batch(config: Config, task: Task) -> None:
    """Warn of a batch with more queries than there are, which has some of them twice, each as a group of its own."""
    if config.train.queries_per_step > len(task.train):
        log.warning(
            "train.queries_per_step=%d, and there are %d training queries: every batch holds some of them again, as "
            "groups of their own; lower it to at most that",
            config.train.queries_per_step,
            len(task.train),
        )
    train, heldout = len(task.train), len(task.heldout)
    if heldout > train and isinstance(config.task, FileSettings) and config.task.heldout_path is None:
        log.warning(
            "task.heldout=%d keeps more problems apart than are left: the run trains on %d of %d; lower it if that was "
            "not meant",
            config.task.heldout,
            train,
            train + heldout,
        )


def check_passes(config: Config, task: Task) -> None:
    """What goes by a query's past needs queries that come again, or the method runs under its name without it."""
    method, train, queries = config.method, config.train, len(task.train)
    asked = train.epochs * queries if train.steps is None else train.steps * train.queries_per_step
    past = {"replay": method.replay.enabled and config.buffer.successes_from is None}
    past["reflection"] = method.reflection.enabled
    idle = [name for name, on in past.items() if on]
    if idle and asked <= queries and not method.revisit.enabled:
        log.warning(
            "method=%s: this run asks %d of %d queries, each once, and %s by what a query was answered before: without "
            "a second pass nothing of that acts; more train.steps or train.epochs, or fewer queries",
            method.name,
            asked,
            queries,
            f"{idle[0]} goes" if len(idle) == 1 else "replay and reflection go",
        )
    elif method.reflection.enabled and asked <= queries * (method.reflection.from_epoch - 1):
        log.warning(
            "method.reflection.from_epoch=%d: this run ends before that pass over its %d queries, and never reflects",
            method.reflection.from_epoch,
            queries,
        )


def check_template(config: Config, chats: bool, tokenizer: Any) -> None:
    """Check that chats have a template, without which they cannot become prompts."""
    if chats and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"model.path={config.model.path}: its tokenizer has no chat template, and the task's queries are chats; "
            "set task.chat=false for plain-text prompts, or use a chat model"
        )


def check_prompts(config: Config, task: Task, prompts: PlainPrompts, max_context: int | None) -> int:
    """Check that all prompts can be built and fit the model's context with the response; return the longest length."""
    queries = [*task.train, *task.heldout]
    check_template(config, any(not isinstance(query.prompt, str) for query in queries), prompts.tokenizer)
    lengths = [len(prompts(query)) for query in queries]
    if not min(lengths):
        empty = queries[lengths.index(0)].id
        raise TaskError(
            f"the prompt of query {empty!r} has no tokens: give the problem a text that the tokenizer knows"
        )
    longest, query_id = max((length, query.id) for length, query in zip(lengths, queries, strict=True))
    room = config.rollout.max_tokens
    if max_context is not None and longest + room > max_context:
        raise ConfigError(
            f"the prompt of query {query_id!r} has {longest} tokens and rollout.max_tokens={room} asks for as many "
            f"more, but the model's context is {max_context}; lower rollout.max_tokens to at most "
            f"{max(0, max_context - longest)} or drop the long problems"
        )
    _check_evaluation_limit(config, task, lengths[len(task.train) :], max_context)
    check_room(config, max_context)
    check_demonstrations(config, task, prompts.tokenizer, longest, max_context)
    return longest


def _check_evaluation_limit(config: Config, task: Task, lengths: Sequence[int], max_context: int | None) -> None:
    """Check that every held-out prompt fits the model's context with the longest answer of an evaluation."""
    if max_context is None or config.evaluate.max_tokens is None or not lengths:
        return
    longest, query_id = max((length, query.id) for length, query in zip(lengths, task.heldout, strict=True))
    room = config.evaluate.max_tokens
    if longest + room > max_context:
        raise ConfigError(
            f"the prompt of held-out query {query_id!r} has {longest} tokens and evaluate.max_tokens={room} asks for "
            f"as many more, but the model's context is {max_context}; lower evaluate.max_tokens to at most "
            f"{max(0, max_context - longest)}"
        )


def open_earlier(path: str, seed: int, queries: Sequence[Query], vocabulary: str) -> SampleBuffer:
    """The earlier run's buffer, read-only, once it is known to have the same problems and vocabulary."""
    run = RunFiles(path.replace("{seed}", str(seed)))
    setting = f"buffer.successes_from={run.path}"
    try:
        theirs = run.read_info().get("inputs", {}).get("vocabulary")
    except RunError as error:
        raise ConfigError(f"buffer.successes_from: {error}") from error
    if theirs is None:
        raise ConfigError(f"{setting}: written by an earlier version, which did not note its vocabulary; run it again")
    if theirs != vocabulary:
        raise ConfigError(
            f"{setting}: its tokenizer has another vocabulary, so its answers would read as other texts: name a run of "
            "a model with this tokenizer"
        )
    buffer = SampleBuffer.open_reader(run.buffer_path)
    tried = buffer.success_rate([query.id for query in queries], context="plain")
    solved = sum(rate > 0 for rate in tried.values())
    if not solved:
        buffer.close()
        raise ConfigError(
            f"{setting}: it solved none of this run's {len(queries)} training problems ({len(tried)} were tried): "
            "name a run on the same task (name, split, size, seed)"
        )
    log.warning("%s: successes of %d of the %d training problems are there to replay", setting, solved, len(queries))
    return buffer


def digest_of_vocabulary(tokenizer: Any) -> str:
    """A digest of what token ids stand for; the chat template does not count."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    digest.update(json.dumps([tokenizer.eos_token_id, sorted(tokenizer.all_special_ids)]).encode())
    return digest.hexdigest()
