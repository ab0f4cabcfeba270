"""ISR's part of asking: which queries are reflected on, within the budget, and with which prompts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from r3.algorithm.prompts import Prompt, seed_of
from r3.buffer import SampleBuffer
from r3.method.reflection import Tokenizer, WhyNot, has_lift, in_vain, most_reflections, reflect, why_not_hard
from r3.method.settings import ReflectionSettings

log = logging.getLogger(__name__)


class Reflections:
    """Builds the reflection prompts of a step from what the buffer knows of its queries."""

    def __init__(self, settings: ReflectionSettings, buffer: SampleBuffer, tokenizer: Tokenizer, *, seed: int) -> None:
        self.settings, self.buffer, self.tokenizer, self.seed = settings, buffer, tokenizer, seed
        self._was_paused = False

    def prompts(self, plain: Sequence[Prompt], step: int) -> tuple[list[Prompt], Counter[str]]:
        """The reflection prompts of the hard queries; and how often they could be built, and why not."""
        settings = self.settings
        refused = self._not_to_reflect(plain, step)
        hard = [prompt for prompt, reason in zip(plain, refused, strict=True) if reason is None]
        ids = [prompt.query.id for prompt in hard]
        failures = self.buffer.history(ids, outcome=False, limit=settings.candidates, context="plain") if hard else {}
        counts: Counter[str] = Counter(reason for reason in refused if reason is not None)
        built = []
        for prompt in hard:
            query = prompt.query
            rng = np.random.default_rng(seed_of(f"{self.seed}/{step}/{query.id}/reflect"))
            made = reflect(query, failures[query.id], self.tokenizer, settings, rng=rng)
            if isinstance(made, str):
                counts[made] += 1
                continue
            counts["built"] += 1
            built.append(
                replace(
                    prompt,
                    tokens=made.tokens,
                    text=made.text,
                    context=made.context,
                    plain_tokens=prompt.tokens,
                    halved=settings.budget == "shared",
                )
            )
        return built, counts

    def _not_to_reflect(self, plain: Sequence[Prompt], step: int) -> list[WhyNot | None]:
        """Why each query is not to be reflected on; None for the hard ones that are."""
        settings, ids = self.settings, [prompt.query.id for prompt in plain]
        rates = self.buffer.success_rate(ids, newest=settings.window) if settings.enabled else {}
        reasons = [why_not_hard(rates.get(prompt.query.id), prompt.epoch, settings) for prompt in plain]
        hard = {query_id for query_id, reason in zip(ids, reasons, strict=True) if reason is None}
        refused: dict[str, WhyNot] = {}
        if settings.when == "unsolved":
            ever = self.buffer.attempts(hard, context=None)
            refused |= {query_id: "solved" for query_id, past in ever.items() if past.solved}
        if settings.give_up_after is not None:
            past = self.buffer.attempts(hard - refused.keys(), context="reflection")
            refused |= {q: "given_up" for q, so_far in past.items() if in_vain(so_far.tried, so_far.solved, settings)}
        still = [refused.get(q) if reason is None else reason for q, reason in zip(ids, reasons, strict=True)]
        return self._within_budget(plain, still, step)

    def _within_budget(self, plain: Sequence[Prompt], reasons: list[WhyNot | None], step: int) -> list[WhyNot | None]:
        """The reasons, with those of hard queries that there is no budget for: a seeded choice decides which."""
        settings = self.settings
        reason: WhyNot = "no_share"
        most = most_reflections(len(plain), settings)
        if settings.enabled and self._paused():
            most, reason = min(most, int(step % settings.probe_every == 0)), "paused"
        hard = [i for i, why in enumerate(reasons) if why is None]
        if len(hard) <= most:
            return reasons
        rng = np.random.default_rng(seed_of(f"{self.seed}/{step}/share"))
        left_out = set(rng.permutation(hard)[most:].tolist())
        return [reason if i in left_out else why for i, why in enumerate(reasons)]

    def _paused(self) -> bool:
        """Whether reflection does not pay for the time being; says so when that changes."""
        settings = self.settings
        if settings.min_lift == 0.0:
            return False
        after, plain = self.buffer.reflected(settings.lift_window)
        paused = not has_lift(after, plain, settings)
        if paused != self._was_paused:
            log.info(
                "reflection %s: %d of the last %d answers after a shown failure were right, and %d of %d plain ones to "
                "the same queries",
                "pauses" if paused else "goes on",
                *(after.solved, after.tried, plain.solved, plain.tried),
            )
            self._was_paused = paused
        return paused
