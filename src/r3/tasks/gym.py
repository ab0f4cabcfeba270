r"""Puzzles of reasoning-gym (an optional extra): any of its families, judged by the family's own scorer.

Answers are read from the last \boxed{} and are right if the scorer gives them full marks: part marks for nearly right
answers are not for us, whose method knows right and wrong alone. Problems are split by a hash of their text into
`warm`, `train` and `heldout`, so the three never share one, whatever the seeds.

Some families have written-out procedures (`SOLUTIONS`), which a supervised warm start learns from. Each takes an entry
of the family and returns the working without the boxed answer. They are ours, and plain: one step per line, each liable
to slip, so that a rare success carries a procedure.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from r3.errors import TaskError
from r3.samples import Query
from r3.tasks.arithmetic import HELDOUT_SEED, Split, split_of
from r3.tasks.settings import ReasoningGymSettings
from r3.tasks.task import helped
from r3.verify.judge import Judge, PlainJudge, Verdict
from r3.verify.maths import boxed_answer

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


FULL_MARKS = 0.999
REFUSAL = (ValueError, TypeError, AssertionError, IndexError)
"""What a family raises over options that it cannot serve."""
BAD_ANSWER = (ValueError, TypeError, SyntaxError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a scorer may raise over a text that its author did not think of; such an answer is wrong."""


class ReasoningGymTask:
    """Puzzles of one family for training, and others for evaluation."""

    def __init__(self, settings: ReasoningGymSettings, seed: int) -> None:
        self._settings = settings
        self.name = f"reasoning-gym-{settings.family}"
        self._entries: dict[str, Mapping[str, Any]] = {}
        self._scorer = _dataset(settings, seed=0)
        self.train: Sequence[Query] = self._problems(settings.size, settings.split, seed)
        self.heldout: Sequence[Query] = self._problems(settings.heldout, "heldout", HELDOUT_SEED)
        self.judge: Judge = PlainJudge(self._verdict)

    def _verdict(self, query: Query, completion: str) -> Verdict:
        boxed = boxed_answer(completion)
        if boxed.reason:
            return Verdict(False, boxed.reason)
        try:
            marks = float(self._scorer.score_answer(boxed.answer, self._entries[query.id]))
        except BAD_ANSWER:
            return Verdict(False, "error")
        return Verdict(True, "match") if marks >= FULL_MARKS else Verdict(False, "different")

    def _problems(self, count: int, split: Split, seed: int) -> list[Query]:
        """`count` distinct problems of a split, the same for the same arguments."""
        prompting = self._settings.prompting
        write = SOLUTIONS.get(str(self._settings.family))
        found: dict[str, Query] = {}
        for entry in self._drawn(50 * count, f"{split}-{seed}"):
            if len(found) == count:
                break
            question = str(entry["question"]).strip()
            if split_of(question) != split or question in found or entry["answer"] == "":  # no box can hold nothing
                continue
            columns: dict[str, Any] = {"problem": question}
            if write is not None:
                columns["solution"] = write(entry)
            found[question] = helped(prompting.query(question, question, str(entry["answer"]), columns))
            self._entries[question] = entry
        if len(found) < count:
            raise TaskError(
                f"task.family={self._settings.family}: only {len(found)} different problems for {split} were found, "
                f"not {count}; ask for fewer (task.size, task.heldout) or make them larger with task.options"
            )
        return list(found.values())

    def _drawn(self, most: int, name: str) -> Iterator[Mapping[str, Any]]:
        dataset = _dataset(self._settings, seed=random.Random(name).getrandbits(31), size=most)
        for place in range(most):
            try:
                entry = dataset[place]
            except REFUSAL as error:  # some families see only when they draw that their options leave them nothing
                raise _refused(self._settings, error) from error
            yield entry


def _dataset(settings: ReasoningGymSettings, *, seed: int, size: int = 1) -> Any:
    try:
        gym = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise TaskError(
            f"task.name=reasoning-gym needs reasoning-gym, whole: pip install 'r3-rl[reasoning-gym]' ({error})"
        ) from error
    try:
        return gym.create_dataset(settings.family, **settings.options, seed=seed, size=size)
    except REFUSAL as error:
        raise _refused(settings, error) from error


def _refused(settings: ReasoningGymSettings, error: Exception) -> TaskError:
    return TaskError(
        f"task.family={settings.family}, task.options={settings.options}: reasoning-gym refuses them ({error})"
    )
