"""An evaluation: n answers to every problem of some benchmarks, judged as they come, kept, and summed up.

    out/about.json        what made the answers; another evaluation cannot be continued here by mistake
    out/responses.jsonl   every answer with its verdict
    out/results.json      all numbers
    out/results.md        the same as tables
    out/lock              held while a process works here

Started again, it goes on with the answers that are missing. Every answer has a seed of its own, made of the
evaluation's seed, the task, the problem and the answer's number: it does not matter when, in which batch or after how
many interruptions it is drawn. That takes a prompt's prefill for each answer instead of for each problem, which is
small beside the thousands of tokens of an answer.

`evaluate` is the short one that training makes every so often: accuracy on held-out problems under the plain prompt,
nothing of it kept but the numbers.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3.errors import TaskError
from r3.evaluate.passk import estimate, pass_at_k, wilson
from r3.evaluate.responses import ANSWER_LIMIT, Finished, Judged, Key, ResponseLog
from r3.evaluate.results import Results, by_problem, summarise, write_results
from r3.judging import Answer, drawn, judge_all
from r3.rollout import Engine, Request, Response, Sampling
from r3.run.directory import lock_run
from r3.run.disk import write_atomically, write_failed
from r3.samples import IntArray, Query, seed_of
from r3.tasks.task import Task
from r3.verify.judge import Judge, Verdict
from r3.verify.maths import boxed_answer

Progress = Callable[[int, int | None], None]
"""Told how many answers are in, and how many there will be (None: not known)."""

BACKLOG = 256
"""Most answers that wait for one, before no more are drawn."""
BATCH, SECONDS = 64, 5.0
"""Verdicts are written when this many are in, or after this many seconds."""
RESAMPLES = 1_000
"""Draws for the interval of held-out accuracy; few, since an evaluation during training is one of many."""


def boxed_vote(text: str) -> str | None:
    r"""What a maths answer votes for: the box that the verifier reads, white space and dollar signs aside."""
    return "".join(boxed_answer(text).answer.split()).strip("$") or None


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Problems and who judges their answers."""

    name: str
    title: str
    queries: Sequence[Query]
    judge: Judge
    extract: Callable[[str], str | None] = boxed_vote
    """What an answer votes for in majority@n; None for nothing."""


def evaluate_model(
    engine: Engine,
    tokenizer: Any,
    benchmarks: Sequence[Benchmark],
    sampling: Sampling,
    samples: int,
    out: Path,
    *,
    encode: Callable[[Query], IntArray],
    model: str,
    about: Mapping[str, Any],
    notes: Mapping[str, Any] | None = None,
    ks: Sequence[int] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> Results:
    """Draw, judge and sum up `samples` answers to each problem; `encode` makes a query's prompt.

    `about` is what the answers depend on beside the sampling and the seed (the model, the grader, …): an evaluation can
    only be continued with the same. `notes` are what the results should say besides (which problems were chosen, …).
    """
    drawn_with = {
        **about,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "seed": seed,
    }
    wanted = [(mark, query, i) for mark in benchmarks for query in mark.queries for i in range(samples)]
    with evaluation(out, drawn_with) as log:
        missing = [(mark, query, i) for mark, query, i in wanted if (mark.name, query.id, i) not in log.judged]
        prompts = {(mark.name, query.id): encode(query) for mark in benchmarks for query in mark.queries}
        requests = [
            Request(prompts[mark.name, query.id], 1, seed_of(f"{seed}/{mark.name}/{query.id}/{i}"))
            for mark, query, i in missing
        ]

        def answers() -> Iterator[Answer[_Place]]:
            asked = [(query, mark.judge) for mark, query, _ in missing]
            for one in drawn(engine, requests, sampling, tokenizer, asked):
                mark, _, i = missing[one.source.request]
                yield Answer(
                    one.query, one.judge, one.text, one.truncated, _Place(mark.name, i, len(one.source.tokens))
                )

        _judge_and_keep(answers(), log, benchmarks, _counted(progress, log, len(wanted) - len(missing), len(wanted)))
        return _summed_up(
            log, benchmarks, samples, out, model=model, about={**drawn_with, **(notes or {})}, ks=ks, seed=seed
        )


def score_responses(
    responses: Iterable[Finished],
    benchmarks: Sequence[Benchmark],
    out: Path,
    *,
    model: str,
    about: Mapping[str, Any],
    notes: Mapping[str, Any] | None = None,
    ks: Sequence[int] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> Results:
    """Judge and sum up responses that exist already; those judged before are not judged again."""
    with evaluation(out, about) as log:
        done: set[Key] = set(log.judged)
        judges = {mark.name: mark.judge for mark in benchmarks}
        missing = (
            Answer(one.query, judges[one.task], one.text, one.truncated, _Place(one.task, one.sample, one.tokens))
            for one in responses
            if (one.task, one.query.id, one.sample) not in done
        )
        _judge_and_keep(missing, log, benchmarks, _counted(progress, log, len(done)))
        return _summed_up(log, benchmarks, None, out, model=model, about={**about, **(notes or {})}, ks=ks, seed=seed)


@contextmanager
def evaluation(out: Path, about: Mapping[str, Any]) -> Iterator[ResponseLog]:
    """The log of an evaluation that is new, or was made in the same way; no other process can write to it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_failed(out, error, "a directory") from error
    lock = lock_run(out / "lock")
    try:
        _check_about(out / "about.json", about)
        with closing(ResponseLog(out / "responses.jsonl")) as log:
            yield log
    finally:
        lock.release()


def _check_about(path: Path, about: Mapping[str, Any]) -> None:
    given = json.loads(json.dumps(dict(about)))
    if not path.exists():
        write_atomically(path, (json.dumps(given, indent=2) + "\n").encode())
        return
    try:
        before = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise TaskError(f"{path}: cannot be read ({error}); choose another --out") from error
    names = dict.fromkeys([*before, *given])
    changed = [f"{n} {before.get(n)!r} → {given.get(n)!r}" for n in names if before.get(n) != given.get(n)]
    if changed:
        raise TaskError(
            f"{path.parent} holds an evaluation made otherwise ({', '.join(changed)}); choose another --out, or the "
            "same settings to continue it"
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """Which answer of an evaluation it is, and how long."""

    task: str
    sample: int
    tokens: int | None


def _judge_and_keep(
    answers: Iterable[Answer[_Place]], log: ResponseLog, benchmarks: Sequence[Benchmark], tell: Callable[[], None]
) -> None:
    """Judge the answers while more are drawn, and write them down a batch at a time, in the order they came in."""
    extract = {mark.name: mark.extract for mark in benchmarks}
    ready: list[tuple[Judged, str]] = []
    written = time.monotonic()

    def write() -> None:
        nonlocal written
        log.append(ready)
        ready.clear()
        tell()
        written = time.monotonic()

    def keep(answer: Answer[_Place], verdict: Verdict) -> None:
        ready.append((_judged(answer, verdict, extract[answer.source.task]), answer.text))
        if len(ready) >= BATCH or time.monotonic() - written > SECONDS:
            write()

    tell()
    try:
        judge_all(answers, keep, backlog=BACKLOG)
    finally:
        write()


def _judged(answer: Answer[_Place], verdict: Verdict, extract: Callable[[str], str | None]) -> Judged:
    vote = None if answer.truncated else extract(answer.text)
    return Judged(
        task=answer.source.task,
        id=answer.query.id,
        sample=answer.source.sample,
        right=verdict.right and not answer.truncated,  # whatever the judge says: a cut answer is not an answer
        reason=verdict.reason,
        answer=vote[:ANSWER_LIMIT] if vote is not None else None,
        tokens=answer.source.tokens,
        truncated=answer.truncated,
        scores=verdict.scores,
    )


def _counted(progress: Progress | None, log: ResponseLog, before: int, total: int | None = None) -> Callable[[], None]:
    """Tells the progress over this evaluation's answers; the log may hold others (more samples, more tasks)."""
    others = len(log.judged) - before

    def tell() -> None:
        if progress is not None:
            progress(len(log.judged) - others, total)

    return tell


def _summed_up(
    log: ResponseLog, benchmarks: Sequence[Benchmark], samples: int | None, out: Path, **options: Any
) -> Results:
    ids = {mark.name: [query.id for query in mark.queries] for mark in benchmarks}
    results = summarise(
        answers=by_problem(log.judged.values(), ids, samples),
        sizes={name: len(of_task) for name, of_task in ids.items()},
        titles={mark.name: mark.title for mark in benchmarks},
        **options,
    )
    write_results(results, out)
    return results


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What an evaluation during training found."""

    right: Sequence[int]
    """Right answers to each problem."""
    samples: int
    """Answers to each problem."""
    truncated: float
    mean_tokens: float
    rewards: Mapping[str, float]
    """What each of several reward functions gave, weighted: the mean over all answers, by name."""

    @property
    def total(self) -> int:
        return len(self.right) * self.samples

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of pass@1; with several answers to a problem, which are alike, problems are drawn again."""
        if self.samples == 1:
            return wilson(sum(self.right), self.total)
        mean = estimate([right / self.samples for right in self.right], seed=0, resamples=RESAMPLES)
        return mean.low, mean.high

    def metrics(self) -> dict[str, Any]:
        low, high = self.interval
        metrics: dict[str, Any] = {
            "heldout/accuracy": sum(self.right) / self.total,
            "heldout/right": sum(self.right),
            "heldout/right_each": list(self.right),
            "heldout/total": self.total,
            "heldout/low": low,
            "heldout/high": high,
            "heldout/truncated": self.truncated,
            "heldout/tokens": self.mean_tokens,
            **{f"heldout/reward/{name}": mean for name, mean in sorted(self.rewards.items())},
        }
        if self.samples > 1:
            k = self.samples
            passed = sum(pass_at_k(k, right, k) for right in self.right) / len(self.right)
            metrics |= {"heldout/samples": k, f"heldout/pass@{k}": passed}
        return metrics


def evaluate(
    engine: Engine,
    task: Task,
    prompts: Sequence[tuple[Query, IntArray]],
    tokenizer: Any,
    sampling: Sampling,
    *,
    samples: int = 1,
    seed: int,
) -> HeldOut:
    """Answer every prompt `samples` times and count the right answers. The same seed asks in the same way."""
    requests = [Request(tokens, samples, seed + place) for place, (_, tokens) in enumerate(prompts)]
    asked = [(query, task.judge) for query, _ in prompts]
    right = [0] * len(prompts)
    truncated = tokens = 0
    rewards: Counter[str] = Counter()

    def keep(answer: Answer[Response], verdict: Verdict) -> None:
        nonlocal truncated, tokens
        tokens += len(answer.source.tokens)
        truncated += answer.truncated
        rewards.update(verdict.scores or {})
        right[answer.source.request] += verdict.right and not answer.truncated

    judge_all(drawn(engine, requests, sampling, tokenizer, asked), keep)
    answers = max(1, len(prompts) * samples)
    means = {name: total / answers for name, total in rewards.items()}
    return HeldOut(right, samples, truncated / answers, tokens / answers, means)
