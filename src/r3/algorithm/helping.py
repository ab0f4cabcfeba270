"""Asking for help: the prompts that follow a step's first answers, and the demonstrations that join them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from r3.algorithm.prompts import Prompt
from r3.method.help import critique_prompt, demonstration_of, hinted_prompt, to_refine
from r3.method.reflection import Tokenizer
from r3.method.settings import MethodSettings
from r3.samples import Context, Group, Sample


class Helping:
    """Builds what SAGE, Critique-GRPO and LUFFY give to groups; its answers depend on its arguments alone."""

    def __init__(self, settings: MethodSettings, tokenizer: Tokenizer) -> None:
        self.settings, self.tokenizer = settings, tokenizer

    def prompts(self, asked: Sequence[Prompt], groups: Sequence[Group], *, step: int) -> list[Prompt]:
        """The next round of prompts; `asked` are those that were answered so far, `groups` the answers to them."""
        hint, critique = self.settings.hint, self.settings.critique
        if not ((hint.enabled and step >= hint.from_step) or critique.enabled):
            return []
        followed: dict[int, list[Group]] = {}
        for group in groups:
            if group.follows is not None:
                followed.setdefault(group.follows, []).append(group)
        more = []
        for index, (prompt, group) in enumerate(zip(asked, groups, strict=True)):
            if prompt.context.kind != "plain":
                continue
            before = followed.get(index, [])
            more += self._hinted(prompt, index, [group, *before]) if hint.enabled else []
            more += self._refined(prompt, index, group) if critique.enabled and not before else []
        return more

    def _hinted(self, plain: Prompt, index: int, groups: Sequence[Group]) -> list[Prompt]:
        """The query with its next hint, if none of its groups solved any."""
        if not all(group.solve_none for group in groups):
            return []
        made = hinted_prompt(plain.query, len(groups) - 1, self.tokenizer, self.settings.hint)
        if made is None:
            return []
        text, tokens = made
        return [replace(plain, text=text, tokens=tokens, context=Context("hint"), follows=index, halved=False)]

    def _refined(self, plain: Prompt, index: int, group: Group) -> list[Prompt]:
        """A prompt for each failure that is to be refined."""
        settings = self.settings.critique
        prompts = []
        for failure in to_refine(group, settings):
            made = critique_prompt(plain.query, failure, self.tokenizer, settings)
            if made is not None:
                text, tokens = made
                context = Context("critique")
                prompts.append(replace(plain, text=text, tokens=tokens, context=context, follows=index, single=True))
        return prompts

    def demonstrations(self, groups: Sequence[Group], *, version: int) -> dict[int, Sample]:
        """The demonstrations that may join, by their group's index, still to be judged."""
        settings = self.settings.demonstration
        if not settings.enabled:
            return {}
        found: dict[int, Sample] = {}
        for index, group in enumerate(groups):
            if group.context.kind != "plain" or (settings.when == "solve_none" and not group.solve_none):
                continue
            first = group.samples[0]
            sample = demonstration_of(
                group.query, self.tokenizer, self._end, settings, version=version, step=first.step, epoch=first.epoch
            )
            if sample is not None:
                found[index] = sample
        return found

    @property
    def _end(self) -> int:
        tokenizer: Any = self.tokenizer
        end: int | None = getattr(tokenizer, "eos_token_id", None)
        if end is None:
            raise ValueError(
                "demonstrations end with an end-of-text token, and the tokenizer names none: set eos_token"
            )
        return end
