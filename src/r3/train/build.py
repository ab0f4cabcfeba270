"""From a config to the parts of a run, with every bad input refused before anything is written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch

from r3.buffer import SampleBuffer
from r3.config import Config
from r3.errors import ConfigError, TaskError
from r3.method.reflection import plain_prompt
from r3.policy.model import Policy, compiles, load_tokenizer, resolve
from r3.rollout.protocol import Engine, Sampling
from r3.samples import IntArray, Query
from r3.tasks import Task
from r3.tasks.pass_rates import load_problems
from r3.tasks.settings import FileSettings
from r3.train.earlier import digest_of_vocabulary, open_earlier
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
    heldout: Sequence[tuple[Query, IntArray]]
    earlier: SampleBuffer | None = None
    """Of the run whose successes are replayed (`buffer.successes_from`)."""


def build(
    config: Config, *, adapters_from: Any = None, functions: Mapping[str, Callable[..., Any]] = MappingProxyType({})
) -> Parts:
    """Load and check everything that a run needs; `functions` are rewards that were given as objects."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    torch.manual_seed(config.run.seed)
    check_extras(config)
    task = load_problems(config.task, config.run.seed, prompt_length(config), functions)
    check_task(task)
    check_batch(config, task)
    policy = Policy.load(config.model, adapters_from=adapters_from)
    check_prompts(config, task, policy.tokenizer, policy.max_context)
    check_reference(config, policy.continues)
    check_stop_tokens(config, policy.stop_tokens)
    sampling = Sampling(
        max_tokens=config.rollout.max_tokens,
        stop_tokens=policy.stop_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
    )
    heldout = [(query, plain_prompt(query, policy.tokenizer)) for query in task.heldout]
    earlier = None
    if config.buffer.successes_from is not None:
        vocabulary = digest_of_vocabulary(policy.tokenizer)
        earlier = open_earlier(config.buffer.successes_from, config.run.seed, task.train, vocabulary)
    return Parts(config, task, policy, make_engine(config, policy), sampling, heldout, earlier)


def check_extras(config: Config) -> None:
    """What the settings need beyond the package itself is installed."""
    for name in ("tensorboard", "wandb", "trackio"):
        if getattr(config.run, name) and find_spec(name) is None:
            fix = "pip install tensorboard" if name == "tensorboard" else f"pip install 'r3-rl[{name}]'"
            raise ConfigError(f"run.{name}=true: logging there needs the package {name}: {fix}")


def check_reference(config: Config, continues: bool) -> None:
    """A KL penalty is to the policy that the run starts from."""
    if continues and config.method.objective.kl > 0:
        raise ConfigError(
            f"method.objective.kl={config.method.objective.kl:g} is to the model under the adapters of model.path="
            f"{config.model.path}, not the policy that this run goes on from; merge them first: r3 models merge"
        )


def check_stop_tokens(config: Config, stop_tokens: Sequence[int]) -> None:
    """Answers can end."""
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
        if wanted in ("native", "auto"):
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
    """A batch of more queries than there are holds some of them twice, each time as a group of its own."""
    if config.train.queries_per_step > len(task.train):
        log.warning(
            "train.queries_per_step=%d, and there are %d training queries: every batch holds some of them again, as "
            "groups of their own; lower it to at most that",
            config.train.queries_per_step,
            len(task.train),
        )


def check_template(config: Config, chats: bool, tokenizer: Any) -> None:
    """A chat needs a template to become a prompt."""
    if chats and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"model.path={config.model.path}: its tokenizer has no chat template, and the task's queries are chats; "
            "set task.chat=false for plain-text prompts, or use a chat model"
        )


def check_prompts(config: Config, task: Task, tokenizer: Any, max_context: int | None) -> int:
    """Every prompt can be built and fits the model's context with the response; returns the longest prompt's tokens."""
    queries = [*task.train, *task.heldout]
    check_template(config, any(not isinstance(query.prompt, str) for query in queries), tokenizer)
    lengths = [len(plain_prompt(query, tokenizer)) for query in queries]
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
    reflection = config.method.reflection
    if reflection.enabled and max_context is not None and reflection.max_prompt_tokens + room > max_context:
        raise ConfigError(
            f"method.reflection.max_prompt_tokens={reflection.max_prompt_tokens} and rollout.max_tokens={room} exceed "
            f"the model's context of {max_context}; lower one (reflection prompts are shortened to fit)"
        )
    distill = config.method.distill
    if distill.enabled and max_context is not None and distill.max_prompt_tokens + room > max_context:
        raise ConfigError(
            f"method.distill.max_prompt_tokens={distill.max_prompt_tokens} and rollout.max_tokens={room} exceed the "
            f"model's context of {max_context}; lower one (the teacher's prompts are shortened to fit)"
        )
    return longest


def _check_evaluation_limit(config: Config, task: Task, lengths: Sequence[int], max_context: int | None) -> None:
    """A held-out prompt and an answer as long as an evaluation allows fit the model's context."""
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
