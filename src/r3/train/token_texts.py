"""Which characters of a response each of its tokens wrote, for readers without a tokenizer."""

from __future__ import annotations

from typing import Any

from r3.samples import IntArray

_UNFINISHED = "\ufffd"
"""What a tokenizer makes of bytes that are not yet a character."""


class TokenTexts:
    """A tokenizer's texts of single tokens, each asked for once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._texts: dict[int, str] = {}
        # Some decoders drop a leading space: a token's own text is what it adds behind another one.
        self._before: list[int] = list(tokenizer.encode("a", add_special_tokens=False))[-1:]
        self._before_text: str = tokenizer.decode(self._before)

    def decode(self, tokens: IntArray) -> str:
        """The response's text."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def widths(self, tokens: IntArray, text: str) -> list[int] | None:
        """How many characters of `text` each token wrote: 0 for special tokens and for the first bytes of a character.

        None where the text is not what the tokens say one by one (a tokenizer that cleans up after itself).
        """
        widths: list[int] = []
        waiting: list[int] = []
        at = 0
        for token in tokens.tolist():
            written = "" if token in self._special else self._text(token)
            if waiting or _UNFINISHED in written:
                waiting.append(token)
                written = self._tokenizer.decode(waiting)
                if _UNFINISHED in written and len(waiting) < 4:  # no character has more bytes
                    widths.append(0)
                    continue
                waiting = []
            if not text.startswith(written, at):
                return None
            widths.append(len(written))
            at += len(written)
        return widths if at == len(text) or text[at:] == _UNFINISHED * (len(text) - at) else None

    def _text(self, token: int) -> str:
        known = self._texts.get(token)
        if known is None:
            after = str(self._tokenizer.decode([*self._before, token]))
            follows = after.startswith(self._before_text)
            known = after[len(self._before_text) :] if follows else str(self._tokenizer.decode([token]))
            self._texts[token] = known
        return known
