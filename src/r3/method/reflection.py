"""ISR, in-context self-reflection: a second prompt for hard queries, which shows one past failure.

    hard    ⟺  epoch ≥ 2 and the query's mean past outcome < τ
    prompt  =  query ⊕ one past wrong response, drawn at random ⊕ guidance

The reflection prompt is sampled beside the plain one, as a group of its own with its own baseline.

Departures from the paper, and choices it leaves open:
- The mean past outcome is that of the plain prompt: how the query does with help says nothing about the query.
- A query that was never tried is not hard: nothing is known of it, and there is no failure to show.
- The failure shown is drawn from the query's newest ones (`candidates`), the errors that the policy still makes.
- The wording of the guidance and the layout are settings; the paper's are not known to us.
- The failure shown is a plain one: what the policy does wrong with an attempt before its eyes is another problem.
- The paper counts every plain answer ever given (`window` counts the newest), reflects on every hard query (`when` can
  leave out those that have a success to replay), gives it a whole group more (`budget` can split its own) and lets what
  it finds wait in the buffer (`at_once` lets it join the plain group of the same step). A cap on the share of answers
  (`max_share`) and a pause while the model has no use for its own failures (`min_lift`) are ours.
- A query may be given up after reflection answers in vain (`give_up_after`, beyond the paper): a reflection group costs
  what a plain one costs, and a model that cannot use its own mistakes would go on paying.
- An attempt that the length limit cut is called cut, not wrong (`cut_guidance`); a reasoning model's thought can be
  left out (`show`), the question's format instruction is asked for again behind the attempt, and special tokens that a
  model wrote out as text are broken up, since they would end the turn.
- The prompt fits a token budget. The shown attempt is shortened in its middle, since its start holds the approach and
  its end the error's outcome; the question is never cut. Where even an empty attempt does not fit, there is no
  reflection prompt, and the reason is counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from r3.method.settings import ReflectionSettings
from r3.samples import Context, IntArray, Message, PromptText, Query, Sample

END_OF_THOUGHT = "</think>"
"""What closes the thought of a reasoning model."""

WhyNot = Literal[
    "off", "early", "never_tried", "not_hard", "solved", "given_up", "paused", "no_share", "no_failure", "too_long"
]
"""Why a query gets no reflection prompt."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts are built with."""

    def encode(self, text: str, /, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], /, **options: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class ReflectionPrompt:
    """A hard query asked again, with one of its past failures shown."""

    tokens: IntArray
    text: PromptText
    """The same before it was tokenized, for trainers that tokenize themselves."""
    context: Context
    """What the samples drawn under it carry."""


def why_not_hard(past_outcome: float | None, epoch: int, settings: ReflectionSettings) -> WhyNot | None:
    """Why a query with this mean past outcome (None: never tried) is not asked to reflect; None if it is hard."""
    if not settings.enabled:
        return "off"
    if epoch < settings.from_epoch:
        return "early"
    if past_outcome is None or np.isnan(past_outcome):
        return "never_tried"
    return None if past_outcome < settings.tau else "not_hard"


def is_hard(past_outcome: float | None, epoch: int, settings: ReflectionSettings) -> bool:
    """The paper's hard-query test: from epoch 2, mean past outcome < τ."""
    return why_not_hard(past_outcome, epoch, settings) is None


def most_reflections(queries: int, settings: ReflectionSettings) -> int:
    """How many of a batch's queries may be reflected on for reflection to stay within its share of the step's answers.

    >>> most_reflections(16, ReflectionSettings(max_share=0.25))  # 5 of 21 groups
    5
    >>> most_reflections(16, ReflectionSettings(max_share=0.25, budget="shared"))  # 8 halves of 16 groups
    8
    """
    share = settings.max_share
    if settings.budget == "shared":
        return min(queries, int(2 * share * queries + 1e-9))
    return queries if share == 1.0 else min(queries, int(share * queries / (1 - share) + 1e-9))


def has_lift(after: tuple[int, int], plain: tuple[int, int], settings: ReflectionSettings) -> bool:
    """Whether answers after a shown failure are right often enough, against plain ones: (tried, solved) of each.

    Plain answers get one success and one attempt more than were seen, so that one lucky answer is no lift.

    >>> settings = ReflectionSettings(min_lift=2.0, lift_window=64)
    >>> has_lift((63, 0), (63, 0), settings), has_lift((64, 0), (64, 0), settings), has_lift((64, 3), (64, 0), settings)
    (True, False, True)
    """
    (tried, solved), (plain_tried, plain_solved) = after, plain
    if tried < settings.lift_window:
        return True
    return solved * (plain_tried + 1) >= settings.min_lift * (plain_solved + 1) * tried


def in_vain(tried: int, solved: int, settings: ReflectionSettings) -> bool:
    """Whether a query with these counts of reflection answers and right ones is to be left alone.

    >>> settings = ReflectionSettings(give_up_after=16)
    >>> in_vain(15, 0, settings), in_vain(16, 0, settings), in_vain(64, 1, settings)
    (False, True, False)
    """
    return settings.give_up_after is not None and solved == 0 and tried >= settings.give_up_after


def reflect(
    query: Query,
    failures: Sequence[Sample],
    tokenizer: Tokenizer,
    settings: ReflectionSettings,
    *,
    rng: np.random.Generator,
) -> ReflectionPrompt | WhyNot:
    """The reflection prompt of a hard query, showing one of its past wrong answers drawn at random; or why not."""
    wrong = [sample for sample in failures if sample.outcome is False]
    for sample in wrong:
        if sample.query_id != query.id:
            raise ValueError(f"past failures of query {query.id!r} hold a sample of query {sample.query_id!r}")
    if not wrong:
        return "no_failure"
    shown = wrong[int(rng.integers(len(wrong)))]
    attempt = Attempt(shown.tokens.tolist(), shown.feedback or shown.reason, shown.truncated)
    prompt = fitted(query, attempt, tokenizer, settings)
    if prompt is None:
        return "too_long"
    text, tokens = prompt
    return ReflectionPrompt(np.asarray(tokens, dtype=np.int32), text, Context("reflection", shown.id))


def plain_prompt(query: Query, tokenizer: Tokenizer) -> IntArray:
    """Token ids of the query itself: through the chat template if it is a chat, as plain text if it is a string."""
    return np.asarray(tokenized(query.prompt, query, tokenizer), dtype=np.int32)


class PlainPrompts:
    """The plain prompts of queries, each tokenized once however often it is asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._tokens: dict[tuple[PromptText, str], IntArray] = {}

    def __call__(self, query: Query) -> IntArray:
        text = query.prompt, repr(query.chat_options)
        if text not in self._tokens:
            self._tokens[text] = plain_prompt(query, self.tokenizer)
        return self._tokens[text]


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a reflection prompt shows of a past answer."""

    tokens: list[int]
    feedback: str = ""
    cut: bool = False


def reflection_prompt(
    query: Query, attempt: list[int], tokenizer: Tokenizer, settings: ReflectionSettings
) -> IntArray | None:
    """Token ids of query ⊕ attempt ⊕ guidance within `max_prompt_tokens`; None if the question alone does not fit."""
    prompt = fitted(query, Attempt(attempt), tokenizer, settings)
    return None if prompt is None else np.asarray(prompt[1], dtype=np.int32)


def fitted(
    query: Query, shown: Attempt, tokenizer: Tokenizer, settings: ReflectionSettings
) -> tuple[PromptText, list[int]] | None:
    """The filled template and its token ids, with as much of the attempt as fits."""
    attempt = _behind_the_thought(shown.tokens, tokenizer) if settings.show == "answer" else shown.tokens
    special = _special_texts(tokenizer)

    def build(kept: int) -> tuple[PromptText, list[int]]:
        text = harmless(shortened(attempt, kept, tokenizer, settings.cut_marker), special)
        prompt = _filled(query, text, shown, settings)
        return prompt, tokenized(prompt, query, tokenizer)

    whole = build(len(attempt))
    if len(whole[1]) <= settings.max_prompt_tokens:
        return whole
    # Cutting n tokens of the attempt cuts about n of the prompt (tokens merge at the seams), so bisect on what is kept.
    fits, too_many, best = -1, len(attempt), None
    while too_many - fits > 1:
        kept = (fits + too_many) // 2
        built = build(kept)
        if len(built[1]) <= settings.max_prompt_tokens:
            fits, best = kept, built
        else:
            too_many = kept
    return best


def shortened(attempt: list[int], kept: int, tokenizer: Tokenizer, marker: str) -> str:
    """The attempt's text with `kept` of its tokens: its beginning and its end, the marker between."""
    if kept >= len(attempt):
        return tokenizer.decode(attempt, skip_special_tokens=True).strip()
    head, tail = (kept + 1) // 2, kept // 2
    # A cut may fall inside a multi-byte character, which then decodes to replacement marks: drop those at the seam.
    before = tokenizer.decode(attempt[:head], skip_special_tokens=True).rstrip("\ufffd")
    after = tokenizer.decode(attempt[len(attempt) - tail :], skip_special_tokens=True).lstrip("\ufffd")
    return (before + marker + after).strip()


def _behind_the_thought(attempt: list[int], tokenizer: Tokenizer) -> list[int]:
    """The tokens behind the last </think>; all of them where none closes a thought."""
    _, closed, said = tokenizer.decode(attempt, skip_special_tokens=True).rpartition(END_OF_THOUGHT)
    return list(tokenizer.encode(said.strip(), add_special_tokens=False)) if closed else attempt


def _special_texts(tokenizer: Tokenizer) -> list[str]:
    """Texts that the tokenizer makes a token of its own of, such as <|im_end|>, the longest first."""
    added = getattr(tokenizer, "get_added_vocab", None)
    texts = {*(added() if added is not None else ()), *getattr(tokenizer, "all_special_tokens", ())}
    return sorted((text for text in texts if len(text.strip()) > 1), key=len, reverse=True)


def harmless(text: str, special: Sequence[str]) -> str:
    """The text with a space in every special text, so that nothing in it can end a turn or open a thought.

    >>> harmless("so 4<|im_end|>", ["<|im_end|>"])
    'so 4< |im_end|>'
    """
    for mark in special:
        text = text.replace(mark, f"{mark[0]} {mark[1:]}")
    return text


def _filled(query: Query, attempt: str, shown: Attempt, settings: ReflectionSettings) -> PromptText:
    """The query's prompt with its question (a chat's last user turn) replaced by the filled template."""
    parts = {
        "attempt": attempt,
        "feedback": shown.feedback,
        "guidance": settings.cut_guidance if shown.cut else settings.guidance,
    }
    return asked_again(query, settings.template, **parts)


def asked_again(query: Query, template: str, **parts: str) -> PromptText:
    """The query's prompt with its question (a chat's last user turn) replaced by the template with these parts."""
    parts["instruction"] = query.instruction
    if not query.instruction:  # nor the blank lines before it
        template = re.sub(r"\s*\{instruction\}", "", template)
    if isinstance(query.prompt, str):
        return _fill(template, question=query.prompt, **parts)
    last = max((i for i, turn in enumerate(query.prompt) if turn.role == "user"), default=None)
    if last is None:
        raise ValueError(f"query {query.id!r} is a chat without a user turn; there is no question to ask again")
    retry = _fill(template, question=query.prompt[last].content, **parts)
    return (*query.prompt[:last], Message("user", retry), *query.prompt[last + 1 :])


def _fill(template: str, **parts: str) -> str:
    # One pass, not str.format: questions are full of LaTeX braces, and an attempt may itself say "{question}".
    return re.sub(r"\{(\w+)\}", lambda slot: parts.get(slot.group(1), slot.group(0)), template)


def tokenized(prompt: PromptText, query: Query, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt of the query: a chat through its template, plain text as it is."""
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt, add_special_tokens=True))
    turns = [turn.as_dict() for turn in prompt]
    # The template writes its own special tokens; encoding its text keeps this to what every tokenizer offers.
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **query.chat_options)
    return list(tokenizer.encode(text, add_special_tokens=False))
