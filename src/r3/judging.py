"""From requests to judged answers: each is judged on another thread as soon as it is finished, while others are drawn.

Training, evaluation during training, `r3 eval` and `r3 probe` all draw and judge through this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from r3.rollout import Engine, Request, Response, Sampling
from r3.samples import Query
from r3.verify.judge import Judge, Verdict

Source = TypeVar("Source")

JUDGES = 8
"""Threads that wait for verdicts."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[Source]):
    """A finished answer that is still to be judged."""

    query: Query
    judge: Judge
    text: str
    truncated: bool
    source: Source
    """What the answer was made from: an engine's response, or a row of a file."""


def drawn(
    engine: Engine,
    requests: Sequence[Request],
    sampling: Sampling,
    tokenizer: Any,
    asked: Sequence[tuple[Query, Judge]],
) -> Iterator[Answer[Response]]:
    """The engine's responses as they are finished; `asked` has every request's query and who judges it."""
    for response in engine.generate(requests, sampling) if requests else ():
        query, judge = asked[response.request]
        text = tokenizer.decode(response.tokens.tolist(), skip_special_tokens=True)
        yield Answer(query, judge, text, response.finish == "length", response)


def judge_all(
    answers: Iterable[Answer[Source]], keep: Callable[[Answer[Source], Verdict], None], *, backlog: int | None = None
) -> None:
    """Judge the answers while more are drawn, and hand them over in the order in which they came.

    At most `backlog` answers wait for their verdict before no more are drawn. Whatever was judged is handed over also
    when the engine fails, a judge does, or the user stops it.
    """
    waiting: deque[tuple[Answer[Source], Future[Verdict]]] = deque()
    with ThreadPoolExecutor(JUDGES, thread_name_prefix="r3-judge") as pool:
        try:
            for answer in answers:
                waiting.append((answer, pool.submit(_judged, answer)))
                while waiting and (waiting[0][1].done() or (backlog is not None and len(waiting) > backlog)):
                    _hand_over(waiting, keep)
            while waiting:
                _hand_over(waiting, keep)
        finally:
            for answer, verdict in waiting:
                if verdict.exception() is None:
                    keep(answer, verdict.result())


def _hand_over(
    waiting: deque[tuple[Answer[Source], Future[Verdict]]], keep: Callable[[Answer[Source], Verdict], None]
) -> None:
    answer, verdict = waiting.popleft()
    keep(answer, verdict.result())


def _judged(answer: Answer[Any]) -> Verdict:
    return answer.judge.judge(answer.query, answer.text, truncated=answer.truncated)
