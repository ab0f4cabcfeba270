"""Written-out procedures for some families of reasoning-gym: what a supervised warm start learns from.

Each takes an entry of the family and returns the working without the boxed answer. They are ours, and plain: a step a
line, each liable to slip, so that a rare success carries a procedure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

Entry = Mapping[str, Any]


def letter_counting(entry: Entry) -> str:
    """Word by word, with the running count."""
    letter, count, lines = entry["metadata"]["target_letter"], 0, []
    for word in entry["metadata"]["span"]:
        here = word.lower().count(letter.lower())
        count += here
        lines.append(f"{word}: {here}, so far {count}")
    return "\n".join(lines)


def spell_backward(entry: Entry) -> str:
    """The letters in order, then from the last."""
    word = entry["metadata"]["word"]
    return f"Forward: {' '.join(word)}\nBackward: {' '.join(reversed(word))}"


def number_sorting(entry: Entry) -> str:
    """Take the next number out of what is left, again and again."""
    left = list(entry["metadata"]["original_numbers"])
    name = "largest" if entry["metadata"]["direction"] == "descending" else "smallest"
    lines = []
    for number in entry["metadata"]["sorted_numbers"]:
        left.remove(number)
        lines.append(f"{name} {number}, left: {', '.join(left) or 'none'}")
    return "\n".join(lines)


def number_filtering(entry: Entry) -> str:
    """Number by number, whether it stays."""
    numbers, kept = entry["metadata"]["original_numbers"], set(entry["metadata"]["result"])
    return "\n".join(f"{number}: {'keep' if number in kept else 'drop'}" for number in numbers)


def word_sequence_reversal(entry: Entry) -> str:
    """The words with their places, then from the last place to the first."""
    placed = [f"{place} {word}" for place, word in enumerate(entry["metadata"]["words"], start=1)]
    return "\n".join([*placed, "From the last: " + ", ".join(reversed(placed))])


def ab(entry: Entry) -> str:
    """Rewrite the first pair whose marks face each other, until there is none."""
    program = entry["question"].rstrip().rsplit("program:\n\n", 1)[1].split("\n\n")[0].split()
    return "\n".join(" ".join(state) or "nothing" for state in _rewritten(program))


def _rewritten(program: Sequence[str]) -> Iterator[list[str]]:
    state = list(program)
    yield state
    while True:
        facing = [i for i in range(len(state) - 1) if state[i].endswith("#") and state[i + 1].startswith("#")]
        if not facing:
            return
        i = facing[0]
        left, right = state[i : i + 2]
        state = state[:i] + ([] if left[0] == right[1] else [right, left]) + state[i + 2 :]
        yield state


def knights_knaves(entry: Entry) -> str:
    """Try every case, and see who would have said what they said."""
    about = entry["metadata"]
    names, terms = [str(name) for name in about["names"]], about["knight_knave_terms"]
    lines = []
    for case in product((True, False), repeat=len(names)):
        kinds = [terms["a_knight" if truthful else "a_knave"] for truthful in case]
        supposed = [f"{name} is {kind}" for name, kind in zip(names, kinds, strict=True)]
        values = [_holds(statement, case) for statement in about["statements"]]
        said = [f"{name} says {'true' if value else 'false'}" for name, value in zip(names, values, strict=True)]
        fits = all(value == truthful for value, truthful in zip(values, case, strict=True))
        lines.append(f"If {', '.join(supposed)}: {', '.join(said)}: {'fits' if fits else 'no'}")
        if fits:
            break
    return "\n".join(lines)


def _holds(statement: Sequence[Any], case: Sequence[bool]) -> bool:
    """Whether a statement is true where `case` says who is truthful."""
    kind, *parts = statement
    if kind == "telling-truth":
        return bool(case[parts[0]])
    if kind == "lying":
        return not case[parts[0]]
    values = [_holds(part, case) for part in parts]
    if kind == "not":
        return not values[0]
    if kind == "and":
        return all(values)
    if kind == "or":
        return any(values)
    if kind == "->":
        return not values[0] or values[1]
    if kind == "<=>":
        return values[0] == values[1]
    raise ValueError(f"knights_knaves: no meaning is known for {kind!r}")


SOLUTIONS: Mapping[str, Callable[[Entry], str]] = {
    "ab": ab,
    "knights_knaves": knights_knaves,
    "letter_counting": letter_counting,
    "number_filtering": number_filtering,
    "number_sorting": number_sorting,
    "spell_backward": spell_backward,
    "word_sequence_reversal": word_sequence_reversal,
}
