"""Model text made safe to show: characters that control a terminal or reverse a line are made visible."""

from __future__ import annotations

import re

# C0 and C1 controls except tab and newline; marks that change the direction of text; invisible line separators.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_PICTURES = 0x2400
"""Unicode has a picture of every C0 control, in order."""


def visible(text: str) -> str:
    r"""The same text with controls shown as characters.

    >>> visible("a\x1b[2Jb\u202ec")
    'a␛[2Jb⟨U+202E⟩c'
    """
    return _STEERING.sub(_picture, text)


def one_line(text: str, most: int) -> str:
    r"""The text on one line of at most `most` characters, the middle left out where it is longer.

    >>> one_line("first\nsecond", 40), one_line("abcdefghij", 7)
    ('first⏎second', 'abc…hij')
    """
    flat = visible(text[: 2 * most] if len(text) <= 2 * most else text[:most] + text[-most:]).replace("\n", "⏎")
    flat = flat.replace("\t", " ")
    if len(text) <= most and len(flat) <= most:
        return flat
    head = most // 2
    return f"{flat[:head]}…{flat[len(flat) - (most - head - 1) :]}"


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(_PICTURES + code) if code < 0x20 else f"⟨U+{code:04X}⟩"
