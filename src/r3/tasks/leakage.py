"""Evaluation problems that are also in the training data.

Three kinds, the strongest first:
- `exact`: the same text up to white space.
- `normalised`: the same letters, digits and operators; LaTeX layout (dollar signs, braces, spacing) aside.
- `near`: reworded. The sets of 6-word shingles overlap (Jaccard ≥ 0.6, or ≥ 0.45 while ≥ 0.8 of the shorter text is
  in the other), the numbers are the same and so is the answer. The last two keep apart the problems that share a
  template: same words, other numbers is another problem.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from r3.errors import MissingData, TaskError
from r3.samples import Query
from r3.tasks.data_files import read_rows
from r3.tasks.datasets import CODE, EVALUATION, SETS, Columns, find_file, load_set

Kind = Literal["exact", "normalised", "near"]
SHINGLE = 6
JACCARD, JACCARD_CONTAINED, CONTAINMENT = 0.6, 0.45, 0.8

_LAYOUT = re.compile(
    r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|text|mathrm|textbf|quad|qquad)(?![A-Za-z])|\\[,;:! ]"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))")
_KEPT = re.compile(r"[^\W_]|[-+*/=<>^!|%]")
_WORD = re.compile(r"[^\W_]+")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Problem:
    """What is compared: a problem's text and its answer."""

    id: str
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Leak:
    """An evaluation problem that a training problem gives away."""

    train: str
    evaluation: str
    kind: Kind
    similarity: float
    """Jaccard index of the shingles."""


def problems_of(queries: Iterable[Query]) -> list[Problem]:
    """The problems without the instruction that their prompts carry."""
    return [Problem(query.id, _text(query), query.answer) for query in queries]


def find_leaks(train: Iterable[Problem], evaluation: Sequence[Problem]) -> list[Leak]:
    """Every pair of a training and an evaluation problem that are the same, in the order of the training problems.

    Only the evaluation side is indexed, so the training problems may be a stream and the time grows with their number.
    """
    index = _Index(evaluation)
    return [leak for problem in train for leak in index.leaks(problem)]


class _Index:
    """The evaluation problems by their texts and by their shingles."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._problems = problems
        self._exact = [_exact(problem.text) for problem in problems]
        self._sizes: list[int] = []
        self._by_text: defaultdict[str, list[int]] = defaultdict(list)
        self._by_shingle: defaultdict[str, list[int]] = defaultdict(list)
        for place, problem in enumerate(problems):
            if text := _normalised(problem.text):  # a text without a letter or digit is like no other
                self._by_text[text].append(place)
            shingles = _shingles(problem.text)
            self._sizes.append(len(shingles))
            for shingle in shingles:
                self._by_shingle[shingle].append(place)

    def leaks(self, problem: Problem) -> Iterator[Leak]:
        shingles = _shingles(problem.text)
        same = self._by_text.get(_normalised(problem.text), [])
        shared = Counter(place for shingle in shingles for place in self._by_shingle.get(shingle, ()))
        for place in sorted({*same, *shared}):
            overlap = shared[place] / max(1, len(shingles) + self._sizes[place] - shared[place])
            contained = shared[place] / max(1, min(len(shingles), self._sizes[place]))
            kind = self._kind(problem, place, place in same, overlap, contained)
            if kind is not None:
                yield Leak(problem.id, self._problems[place].id, kind, overlap)

    def _kind(self, problem: Problem, place: int, same: bool, overlap: float, contained: float) -> Kind | None:
        if same:
            return "exact" if _exact(problem.text) == self._exact[place] else "normalised"
        if overlap < JACCARD and not (overlap >= JACCARD_CONTAINED and contained >= CONTAINMENT):
            return None
        other = self._problems[place]
        answers = {_answer(problem.answer), _answer(other.answer)} - {""}  # one that is not known contradicts nothing
        alike = len(answers) < 2 and _numbers(problem.text) == _numbers(other.text)
        return "near" if alike else None


def check(
    file: str,
    against: Sequence[str] = (),
    *,
    folder: str | Path | None = None,
    columns: Columns | None = None,
    show: int = 20,
) -> int:
    """Print what a training file, or a named set, shares with the evaluation sets; 1 if it shares anything, else 0.

    Without `against` it is compared with every named evaluation set that is there, of code if it is a set of code, and
    told with which it is not. Those of `against` may also be files.
    """
    train = _load(file, folder, columns or Columns())
    names, missing = list(against) or [name for name in (CODE if file in CODE else EVALUATION) if name != file], []
    if not against:
        missing = [name for name in names if not _is_there(name, folder)]
        names = [name for name in names if name not in missing] or names  # of no set at all: loading says what to do
    print(f"{file}: {len(train):,} problems\n")
    print(f"{'evaluation set':<16} {'problems':>8} {'exact':>6} {'normalised':>10} {'near':>5}")
    sets = {name: _load(name, folder, Columns()) for name in names}
    # All at once: reading the training texts apart into shingles is what takes the time.
    everything = [replace(problem, id=f"{name}\t{problem.id}") for name in names for problem in sets[name]]
    leaks = find_leaks(train, everything)
    kinds = Counter((leak.evaluation.partition("\t")[0], leak.kind) for leak in leaks)
    for name in names:
        counts = f"{kinds[name, 'exact']:>6} {kinds[name, 'normalised']:>10} {kinds[name, 'near']:>5}"
        print(f"{name:<16} {len(sets[name]):>8,} {counts}")
    for leak in leaks[:show]:
        where = leak.evaluation.replace("\t", " ")
        print(f"{leak.kind}: {leak.train} is {where} (overlap {leak.similarity:.2f})")
    if len(leaks) > show:
        print(f"… and {len(leaks) - show} more")
    if leaks:
        rows = len({leak.train for leak in leaks})
        print(f"\n{rows} training rows give away an evaluation problem: remove them before training")
    else:
        print("\nno leaks found")
    if missing:
        print(f"not compared with {', '.join(missing)}: their files are not in that folder (docs/evaluation.md)")
    return 1 if leaks else 0


def _is_there(name: str, folder: str | Path | None) -> bool:
    try:
        find_file(SETS[name], folder)
    except MissingData:
        return False
    return True


def _load(name: str, folder: str | Path | None, columns: Columns) -> list[Problem]:
    """A named set, or a file, which may lack ids and answers here: what is compared are the texts."""
    if name in SETS:
        return problems_of(load_set(name, folder=folder))
    problems: list[Problem] = []
    for number, row in enumerate(read_rows(Path(name)), 1):
        if not row.get(columns.question):
            raise TaskError(f"{name}, row {number}: nothing in column {columns.question!r}; name the question's column")
        answer = row.get(columns.answer)
        own_id = str(row.get(columns.id) or f"row {number}")
        problems.append(Problem(own_id, str(row[columns.question]), "" if answer is None else str(answer)))
    return problems


def _text(query: Query) -> str:
    problem = query.columns.get("problem")
    if problem is not None:
        return str(problem)
    return query.prompt if isinstance(query.prompt, str) else query.prompt[-1].content


def _exact(text: str) -> str:
    return " ".join(text.split())


def _normalised(text: str) -> str:
    return "".join(_KEPT.findall(_plain(text)))


def _plain(text: str) -> str:
    r"""Lower case without LaTeX's layout commands; a fraction that holds no other (\frac{1}{6}, \frac16) is 1/6."""
    return _LAYOUT.sub(" ", _FRACTION.sub(r" \1\2/\3\4 ", text)).casefold()


def _shingles(text: str) -> set[str]:
    """Every run of six words; of a shorter text the whole, of a text without words nothing."""
    words = _WORD.findall(_plain(text))
    return {" ".join(words[i : i + SHINGLE]) for i in range(max(1, len(words) - SHINGLE + 1))} if words else set()


def _numbers(text: str) -> list[str]:
    return sorted(_NUMBER.findall(_plain(text)))


def _answer(answer: str) -> str:
    return "".join(_plain(answer).replace("$", "").split())
