"""Which steps met a query: an index over the tables of all steps, extended as files appear.

It is kept in memory, never in the run directory. A million groups take about 20 MB, as columns of numbers.
"""

from __future__ import annotations

import threading
from array import array
from typing import Any

from r3.errors import NotThere, RunError
from r3.view.steps import StepTables, origin_of

REFLECTION, REPLAYED, RANKED, TRUNCATED, HINT, CRITIQUE = 1, 2, 4, 8, 16, 32
CONTEXTS = {"reflection": REFLECTION, "hint": HINT, "critique": CRITIQUE}
ASIDE = REFLECTION | HINT | CRITIQUE
"""Asked under another prompt than the plain one."""
_QUESTION = 120
"""Characters of a question kept for lists."""


class QueryIndex:
    """Groups by query, in order of steps. Only one thread may call `refresh`; the other methods are thread-safe."""

    def __init__(self, tables: StepTables) -> None:
        self._tables = tables
        self._turn = threading.RLock()
        self.problems: dict[int, str] = {}
        self._clear()

    def _clear(self) -> None:
        self._stamps: dict[int, tuple[int, int]] = {}
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._questions: list[str] = []
        self._of_query: list[array[int]] = []
        self._steps, self._groups = array("I"), array("I")
        self._tried, self._solved, self._flags = array("H"), array("H"), array("B")
        self._totals: list[list[int]] = []
        self.problems.clear()

    @property
    def indexed(self) -> int:
        """How many steps are indexed."""
        return len(self._stamps)

    def refresh(self, most: int | None = None) -> bool:
        """Index new steps, at most `most`; True if more are waiting."""
        steps = self._tables.steps()
        if not set(self._stamps) <= set(steps) or self._changed():
            with self._turn:
                self._clear()  # the run went back: what came after is out of date
        waiting = [step for step in steps if step not in self._stamps]
        for step in waiting[:most]:
            self._take(step)
        return most is not None and len(waiting) > most

    def _changed(self) -> bool:
        """Whether the newest step was written again, as by a run that goes back."""
        if not self._stamps:
            return False
        newest = max(self._stamps)
        try:
            return self._tables.stamp(newest) != self._stamps[newest]
        except NotThere:
            return True

    def _take(self, step: int) -> None:
        try:
            stamp = self._tables.stamp(step)
        except NotThere:  # gone since it was listed
            return
        try:
            summaries = self._tables.read(step).summaries
        except RunError as error:
            summaries = []
            self.problems[step] = str(error)
        with self._turn:
            for group, about in enumerate(summaries):
                self._enter(step, group, about)
            self._stamps[step] = stamp

    def _enter(self, step: int, group: int, about: dict[str, Any]) -> None:
        name = str(about.get("query", "?"))
        number = self._numbers.setdefault(name, len(self._names))
        if number == len(self._names):
            self._names.append(name)
            self._questions.append(str(about.get("question", ""))[:_QUESTION])
            self._of_query.append(array("I"))
            self._totals.append([0, 0, 0, 0, 0])
        fresh = int(about.get("fresh", 0))
        outcomes = [outcome for outcome in about.get("outcomes", [])[:fresh] if outcome is not None]
        flags = CONTEXTS.get(str(about.get("context")), 0)
        joined = range(fresh, len(about.get("outcomes", [])))
        flags |= REPLAYED if any(origin_of({**about, "fresh": fresh}, i) == "replayed" for i in joined) else 0
        flags |= RANKED if any(paid is not None for paid in about.get("ranking", [])) else 0
        flags |= TRUNCATED if any(about.get("truncated", [])[:fresh]) else 0
        self._of_query[number].append(len(self._steps))
        for column, value in (
            (self._steps, step),
            (self._groups, group),
            (self._tried, len(outcomes)),
            (self._solved, sum(outcomes)),
            (self._flags, flags),
        ):
            column.append(value)
        totals = self._totals[number]
        if not flags & ASIDE:
            totals[0] += len(outcomes)
            totals[1] += sum(outcomes)
        totals[2] += bool(flags & REFLECTION)
        totals[3] += bool(flags & REPLAYED)
        totals[4] = step

    def visits(self, query: str) -> list[dict[str, Any]]:
        """Every group of a query, oldest first."""
        with self._turn:
            number = self._numbers.get(query)
            if number is None:
                raise NotThere(f"no saved step has a group of query {query!r} ({self.indexed} steps were looked at)")
            return [
                {
                    "step": self._steps[at],
                    "group": self._groups[at],
                    "tried": self._tried[at],
                    "solved": self._solved[at],
                    "context": next((name for name, flag in CONTEXTS.items() if self._flags[at] & flag), "plain"),
                    "replayed": bool(self._flags[at] & REPLAYED),
                    "ranked": bool(self._flags[at] & RANKED),
                    "truncated": bool(self._flags[at] & TRUNCATED),
                }
                for at in self._of_query[number]
            ]

    def question(self, query: str) -> str:
        """The beginning of what it asks."""
        with self._turn:
            number = self._numbers.get(query)
            return "" if number is None else self._questions[number]

    def listing(self, *, search: str = "", order: str = "hardest", most: int = 200) -> dict[str, Any]:
        """Queries whose id or question contains `search`, with their counts, in the order asked for."""
        wanted = search.casefold()
        with self._turn:
            chosen = [
                number
                for number, name in enumerate(self._names)
                if not wanted or wanted in name.casefold() or wanted in self._questions[number].casefold()
            ]
            chosen.sort(key=self._order(order))
            queries = [self._listed(number) for number in chosen[:most]]
            return {"queries": queries, "matching": len(chosen), "known": len(self._names), "steps": self.indexed}

    def _order(self, order: str) -> Any:
        totals = self._totals
        if order == "newest":
            return lambda number: (-totals[number][4], number)
        if order == "replayed":
            return lambda number: (-totals[number][3], number)
        if order == "easiest":
            return lambda number: (-_rate(totals[number]), number)
        return lambda number: (_rate(totals[number]), -totals[number][0], number)

    def _listed(self, number: int) -> dict[str, Any]:
        tried, solved, reflections, replays, last = self._totals[number]
        return {
            "query": self._names[number],
            "question": self._questions[number],
            "tried": tried,
            "solved": solved,
            "reflections": reflections,
            "replays": replays,
            "last": last,
        }


def _rate(totals: list[int]) -> float:
    return totals[1] / totals[0] if totals[0] else 0.0
