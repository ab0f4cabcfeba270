"""The questions that the pages ask, by name: plain functions from a URL's parameters to JSON.

The server answers with these, and an export stores their answers, so both show the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from r3 import __version__
from r3.errors import NotThere
from r3.view.pages import BufferPages, ViewedProbe
from r3.view.runs import ViewedRun
from r3.view.steps import group_view, sample_view

Parameters = Mapping[str, str]
CHARTED = (
    "accuracy",
    "heldout/",
    "reward",
    "solve_",
    "truncated",
    "entropy",
    "update/entropy",
    "update/ess/",
    "update/clip_share/",
    "update/grad_norm",
    "update/kl/",
    "update/learning_rate",
    "update/loss",
    "length/",
    "tokens",
    "seconds/",
    "replay/",
    "reflection/",
    "ranking/",
    "lift/",
    "yield/",
    "groups",
    "epoch",
    "verify/",
    "memory/",
)
"""Prefixes of the metrics that the overview draws."""
MOST_VISITS = 60


class Api:
    """Answers questions about a list of runs and a list of probes."""

    def __init__(self, runs: Sequence[ViewedRun], probes: Sequence[ViewedProbe] = ()) -> None:
        self.runs, self.probes = list(runs), list(probes)
        self.asked = 0.0
        """When the last question came, by the monotonic clock."""
        self._buffers = [BufferPages(run) for run in self.runs]
        self.questions: dict[str, Callable[[Parameters], Any]] = {
            "runs": self.about_runs,
            "state": self.state,
            "metrics": self.metrics,
            "steps": self.steps,
            "step": self.step,
            "search": self.search,
            "group": self.group,
            "sample": self.sample,
            "queries": self.queries,
            "query": self.query,
            "buffer": self.buffer,
            "settings": self.settings,
            "probe": self.probe,
        }

    def answer(self, name: str, parameters: Parameters) -> Any:
        """The answer to a question; `NotThere` if what it asks for does not exist."""
        if name != "state":  # which open pages ask every second or so
            self.asked = time.monotonic()
        if name not in self.questions:
            raise NotThere(f"there is no page {name!r}")
        return self.questions[name](parameters)

    def about_runs(self, _: Parameters) -> Any:
        return {
            "version": __version__,
            "runs": [run.about() for run in self.runs],
            "probes": [probe.about() for probe in self.probes],
        }

    def state(self, _: Parameters) -> Any:
        return {"runs": [run.state() for run in self.runs]}

    def metrics(self, parameters: Parameters) -> Any:
        tail = self._run(parameters).metrics
        tail.refresh()
        since = _whole(parameters, "since", 0)
        if _whole(parameters, "generation", tail.generation) != tail.generation:
            since = 0  # the run went back: what the page has is out of date
        return tail.since(since, CHARTED)

    def steps(self, parameters: Parameters) -> Any:
        return {"steps": self._run(parameters).tables.steps()}

    def step(self, parameters: Parameters) -> Any:
        run, step = self._run(parameters), _whole(parameters, "step")
        table = run.tables.table(step)
        return {"step": step, "groups": table.summaries, "kept": [place is not None for place in table.places]}

    def search(self, parameters: Parameters) -> Any:
        text = parameters.get("text", "")
        groups = self._run(parameters).tables.search(_whole(parameters, "step"), text) if text else []
        return {"groups": groups}

    def group(self, parameters: Parameters) -> Any:
        return group_view(self._run(parameters), _whole(parameters, "step"), _whole(parameters, "group"))

    def sample(self, parameters: Parameters) -> Any:
        numbers = [_whole(parameters, name) for name in ("step", "group", "sample")]
        return sample_view(self._run(parameters), *numbers)

    def queries(self, parameters: Parameters) -> Any:
        run = self._run(parameters)
        listing = run.queries.listing(search=parameters.get("search", ""), order=parameters.get("order", "hardest"))
        return {**listing, "saved": len(run.tables.steps())}

    def query(self, parameters: Parameters) -> Any:
        run, name = self._run(parameters), parameters.get("id", "")
        visits = run.queries.visits(name)
        solved = [visit for visit in visits if visit["solved"]]
        for visit in visits[-MOST_VISITS:]:
            visit["summary"] = run.tables.table(visit["step"]).summaries[visit["group"]]
        return {
            "query": name,
            "question": run.queries.question(name),
            "ledger": self._buffers[self.runs.index(run)].ledger(name),
            "visits": visits,
            "first_solved": solved[0] if solved else None,
            "indexed": run.queries.indexed,
            "saved": len(run.tables.steps()),
        }

    def buffer(self, parameters: Parameters) -> Any:
        return self._buffers[self.runs.index(self._run(parameters))].page()

    def settings(self, parameters: Parameters) -> Any:
        from r3.view.pages import settings_view  # pydantic is loaded for this page alone

        return settings_view(self._run(parameters))

    def probe(self, parameters: Parameters) -> Any:
        number = _whole(parameters, "probe", 0)
        if number >= len(self.probes):
            raise NotThere(f"there are {len(self.probes)} probes, numbered from 0; there is no probe {number}")
        return self.probes[number].content()

    def _run(self, parameters: Parameters) -> ViewedRun:
        number = _whole(parameters, "run", 0)
        if not 0 <= number < len(self.runs):
            raise NotThere(f"there are {len(self.runs)} runs, numbered from 0; there is no run {number}")
        return self.runs[number]


def _whole(parameters: Parameters, name: str, default: int | None = None) -> int:
    text = parameters.get(name)
    if text is None:
        if default is None:
            raise NotThere(f"the page needs {name}=NUMBER")
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise NotThere(f"{name} must be a whole number")
    return int(text)
