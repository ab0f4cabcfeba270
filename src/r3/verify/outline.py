r"""The outline of an answer: a value, a list, a set, a tuple or interval, a matrix, or a chain of equalities.

This is no LaTeX parser. It splits canonical text at top-level separators only; what stands between them stays text and
is compared as numbers (`equality`) or handed to math-verify (`symbolic`).

>>> shape(r"(1,\frac{2}{3}]")
Items(text='(1,\\frac{2}{3}]', brackets='(]', items=(Leaf(text='1'), Leaf(text='\\frac{2}{3}')))
>>> shape("x=5")
Chain(text='x=5', subject='x', parts=(Leaf(text='5'),), remarks=())
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from r3.verify.quantities import split_unit


@dataclass(frozen=True, slots=True)
class Leaf:
    """A single value: text without its unit and percent sign."""

    text: str
    unit: str = ""
    percent: bool = False

    def __repr__(self) -> str:
        extra = f", unit={self.unit!r}" if self.unit else ""
        return f"Leaf(text={self.text!r}{extra}{', percent=True' if self.percent else ''})"


@dataclass(frozen=True, slots=True)
class Items:
    r"""Several values. Brackets: "" for a bare list, "{}" a set, "∪" a union, else the pair that was written.

    `names` are those of k=45,n=2: then the items are told apart by name.
    """

    text: str
    brackets: str
    items: tuple[Leaf | Items | Chain | Matrix, ...]
    names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        names = f", names={self.names!r}" if self.names else ""
        return f"Items(text={self.text!r}, brackets={self.brackets!r}, items={self.items!r}{names})"


@dataclass(frozen=True, slots=True)
class Chain:
    """a = b = c ≈ d: what it is about (x, f(x), |AB|; "" for none), its equal parts, its approximate remarks."""

    text: str
    subject: str
    parts: tuple[Leaf | Items | Chain | Matrix, ...]
    remarks: tuple[Leaf | Items | Chain | Matrix, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of entries, whatever the brackets around them."""

    text: str
    rows: tuple[tuple[Leaf | Items | Chain | Matrix, ...], ...]


_OPEN, _CLOSE = "([{", ")]}"
_TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|.", re.DOTALL)
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?![\d,])(?:%|\\text\{[^{}]*\}|\\degree)*", re.ASCII)
_MATRIX = re.compile(
    r"\(?\[?\\begin\{(?:[pbB]?matrix|array)\}(?:\{[lcr|]*\})?(?P<body>(?:(?!\\begin|\\end).)*)\\end\{[A-Za-z]+\}\]?\)?",
    re.DOTALL,
)
# Text that only names something: letters, indices, primes, calls and ratios of them; no digits outside indices.
# Atomic and possessive, so that no text makes the matcher try again and again.
_GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|sigma|tau|phi|omega|rho|Delta|Omega|Gamma|Phi"
_MARK = rf"\\(?:{_GREEK}|angle|triangle|overline|vec|hat|text|ell)(?![A-Za-z])"
_ATOM = rf"(?>{_MARK}|[A-Za-z]'?\([^()]*\)|[A-Za-z]|_\{{[^{{}}]*\}}|_[0-9A-Za-z]|'|\s)"
_NAME = re.compile(rf"(?>{_ATOM}|\\frac\{{{_ATOM}+\}}\{{{_ATOM}+\}}|[|(),:/{{}}])++")
_ABOUT = re.compile(rf"(?>{_ATOM}|\\frac\{{{_ATOM}+\}}\{{{_ATOM}+\}}|[|(),:/{{}}+*-]|\^\d|\^\{{\d+\}})++")
_NOT_NAMES = re.compile(r"(?:e|i|\\pi|[^A-Za-z]*)")
_LONGEST_NAME = 80
_MOST_SIGNS = 4  # \pm in one value: sixteen values


def shape(text: str) -> Leaf | Items | Chain | Matrix:
    """The outline of a canonical text."""
    text = _without_outer_brackets(text)
    if _THOUSANDS.fullmatch(text):
        return _value(text)
    groups = split(text, ";")
    if len(groups) > 1:
        return _listed(text, [shape(group) for group in groups])
    parts = split(text, ",")
    if len(parts) > 1:
        return _listed(text, [shape(part) for part in parts])
    return _single(text)


def split(text: str, *separators: str) -> list[str]:
    """The pieces between separators that stand outside all brackets and environments."""
    pieces, depth, start, position = [], 0, 0, 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in _OPEN or token in (r"\{", r"\begin"):
            depth += 1
        elif token in _CLOSE or token in (r"\}", r"\end"):
            depth -= 1
        elif depth == 0 and token in separators and not _part_of_relation(text, match):
            pieces.append(text[start : match.start()])
            start = match.end()
        position = match.end()
    pieces.append(text[start:position])
    return [piece.strip() for piece in pieces if piece.strip() or len(pieces) == 1]


def _part_of_relation(text: str, match: re.Match[str]) -> bool:
    """== is one sign, and = after <, >, ! or : belongs to that sign."""
    return match[0] == "=" and text[max(0, match.start() - 1) : match.start()] in ("<", ">", "!", ":")


def _single(text: str) -> Leaf | Items | Chain | Matrix:
    if len(members := split(text, r"\in")) == 2 and is_name(members[0]):
        return shape(members[1])
    if matrix := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in re.split(r"\\\\", matrix["body"]) if row.strip()]
        return Matrix(text, tuple(tuple(shape(entry.strip()) for entry in row) for row in rows))
    if (chain := _chain(text)) is not None:
        return chain
    if len(parts := split(text, r"\cup")) > 1:
        return Items(text, "∪", tuple(shape(part) for part in parts))
    if (bracketed := _bracketed(text)) is not None:
        return bracketed
    if r"\pm" in text or r"\mp" in text:
        return _both_signs(text)
    return _value(text)


def _both_signs(text: str) -> Items | Leaf:
    r"""The values that \pm stands for: each of its own sign, but where \mp ties them together."""
    signs = re.findall(r"\\pm|\\mp", text)
    if r"\mp" in signs:
        choices = [["+" if s == r"\pm" else "-" for s in signs], ["-" if s == r"\pm" else "+" for s in signs]]
    elif len(signs) <= _MOST_SIGNS:
        choices = [list(choice) for choice in product("+-", repeat=len(signs))]
    else:
        return Leaf(text)
    pieces = re.split(r"\\pm|\\mp", text)
    values = ("".join(p + s for p, s in zip(pieces, [*choice, ""], strict=True)) for choice in choices)
    return Items(text, "", tuple(_value(value.replace("++", "+").removeprefix("+")) for value in values))


def _value(text: str) -> Leaf:
    value, unit = split_unit(text)
    percent = value.endswith("%")
    value = value.rstrip("% ") if percent else value
    return Leaf(_without_outer_brackets(value), unit, percent)


def _chain(text: str) -> Chain | None:
    exact_side, *remarks = split(text, r"\approx") or [""]
    parts = split(exact_side, "=")
    if not parts or (len(parts) == 1 and not remarks):
        return None
    subject = ""
    if len(parts) == 2 and is_name(parts[1]) and not is_about(parts[0]):
        parts.reverse()  # 5 = x
    if is_about(parts[0]) and (len(parts) > 1 or remarks):
        subject, parts = parts[0], parts[1:]
        if not parts:  # x ≈ 11: the approximation is all there is
            parts, remarks = remarks[:1], remarks[1:]
    return Chain(text, subject, tuple(shape(p) for p in parts), tuple(shape(r) for r in remarks))


def is_name(text: str) -> bool:
    r"""Whether a text only names something: x, f(x), |AB|, \angle A, (p,q), \frac{NO}{BO}; e, i and π are numbers."""
    return len(text) <= _LONGEST_NAME and bool(_NAME.fullmatch(text)) and not _NOT_NAMES.fullmatch(text)


def is_about(text: str) -> bool:
    """Whether a text can be what an equation is about: a name, or sums and products of names (a+b)."""
    return (
        len(text) <= _LONGEST_NAME
        and not text.startswith("-")  # -x = 5 says that x is -5
        and bool(_ABOUT.fullmatch(text))
        and not _NOT_NAMES.fullmatch(text)
    )


def _bracketed(text: str) -> Items | None:
    first, last = text[:1], text[-1:]
    if text.startswith(r"\{") and text.endswith(r"\}") and _encloses(text, 2, 2):
        return _elements(text, "{}", text[2:-2])
    if first == "{" and last == "}" and _encloses(text, 1, 1):
        return _elements(text, "{}", text[1:-1])
    if first and first in "([" and last and last in ")]":
        inner = text[1:-1]
        if _balanced(inner) and len(elements := split(inner, ",", ";")) > 1:
            # Square brackets say "closed end" of a pair only; around more values they are a tuple's.
            brackets = first + last if len(elements) == 2 else "()"
            return Items(text, brackets, tuple(shape(element) for element in elements))
    return None


def _elements(text: str, brackets: str, inner: str) -> Items:
    elements = _flat(shape(element) for element in split(inner, ",", ";"))
    return Items(text, brackets, tuple(e for e in elements if not (isinstance(e, Leaf) and not e.text)))


def _flat(parts: Iterable[Leaf | Items | Chain | Matrix]) -> Iterator[Leaf | Items | Chain | Matrix]:
    """The parts, with bare lists among them opened."""
    for part in parts:
        if isinstance(part, Items) and part.brackets == "" and not part.names:
            yield from part.items
        else:
            yield part


def _listed(text: str, parts: list[Leaf | Items | Chain | Matrix]) -> Items:
    """A bare list; x=1,x=2 is a list of values, and p=5,q=2,p=7,q=2 a list of pairs."""
    flat = list(_flat(parts))
    subjects = [item.subject if isinstance(item, Chain) and len(item.parts) == 1 else "" for item in flat]
    if not all(subjects) or len(flat) < 2:
        return Items(text, "", tuple(flat))
    values = [item.parts[0] for item in flat if isinstance(item, Chain)]
    distinct = list(dict.fromkeys(subjects))
    if len({re.sub(r"_(?:\{\d+\}|\d)", "", subject) for subject in subjects}) == 1:
        return Items(text, "", tuple(values))
    if subjects != distinct * (len(subjects) // len(distinct)):
        return Items(text, "", tuple(flat))
    width = len(distinct)
    rows = [Items(text, "()", tuple(values[i : i + width]), tuple(distinct)) for i in range(0, len(values), width)]
    return rows[0] if len(rows) == 1 else Items(text, "", tuple(rows))


def _without_outer_brackets(text: str) -> str:
    """(x) and [x] are x; (1,2) keeps its brackets."""
    while len(text) > 2 and text[0] + text[-1] in ("()", "[]", "{}") and _encloses(text, 1, 1):
        inner = text[1:-1].strip()
        if not inner or len(split(inner, ",", ";")) > 1 or (text[0] == "[" and r"\begin" in inner):
            break
        text = inner
    return text


def _encloses(text: str, head: int, tail: int) -> bool:
    """Whether the first bracket closes at the very end."""
    return _balanced(text[head : len(text) - tail])


def _balanced(inner: str) -> bool:
    depth = 0
    for match in _TOKEN.finditer(inner):
        token = match[0]
        if token in _OPEN or token == r"\{":
            depth += 1
        elif token in _CLOSE or token == r"\}":
            depth -= 1
            if depth < 0:
                return False
    return depth == 0


def renamed(items: Items, names: tuple[str, ...]) -> Items:
    """The items in the order of `names`, which must be the same names."""
    index = {name: i for i, name in enumerate(items.names)}
    return replace(items, items=tuple(items.items[index[name]] for name in names), names=names)
