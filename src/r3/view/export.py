"""One file with everything in it: the page, its scripts and styles, and the answers it would ask a server for.

The scripts are plain modules; they are joined in the order in which they import each other, and their `import` and
`export` words dropped, which is all the building they need. Top-level names are therefore unique across them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from r3.errors import NotThere, RunError, ViewError
from r3.view.api import Api
from r3.view.pages import ViewedProbe
from r3.view.runs import ViewedRun
from r3.view.server import static_files

MOST_BYTES = 32_000_000
"""Size limit for groups and samples in a report; of steps beyond it only the tables are kept."""
_IMPORT = re.compile(r'^import [^;]*? from "\./([a-z]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=const|function|async|class|let)", re.MULTILINE)
_STYLE_LINK = re.compile(r'<link rel="stylesheet" href="/static/([^"]+)">\n')
_OTHER_LINK = re.compile(r"<(?:link|script)[^>]*(?:modulepreload|icon|src=)[^>]*>(?:</script>)?\n")


def export(runs: Sequence[ViewedRun], target: Path, *, steps: int, probes: Sequence[ViewedProbe] = ()) -> str:
    """Write the report. Returns a line that says what is in it."""
    if steps < 0:
        raise ViewError(f"--steps {steps}: give 0 or more")
    if not target.parent.is_dir():
        raise ViewError(f"{target.parent}: no such directory; choose another file for --export")
    for run in runs:
        run.refresh()
        run.queries.refresh()
    answers, complete = _answers(Api(runs, probes), runs, steps)
    page = _page(answers)
    try:
        target.write_bytes(page)
    except OSError as error:
        raise ViewError(f"{target}: cannot be written ({error.strerror}); choose another file") from error
    groups = sum(address.startswith("group?") for address in answers)
    tables = sum(address.startswith("step?") for address in answers)
    left_out = "" if complete else f"; more did not fit into {MOST_BYTES // 10**6} MB: export fewer --steps"
    seen = f"{len(runs)} run(s)" + (f", {len(probes)} probe(s)" if probes else "")
    return f"{target}: {len(page) / 1e6:.1f} MB, {seen}, {tables} steps, {groups} groups in full{left_out}"


class _Answers(dict[str, Any]):
    """Answers by the address under which the page asks for them (see data.js)."""

    def __init__(self, api: Api) -> None:
        super().__init__()
        self._api = api
        self.size = 0

    def keep(self, name: str, **parameters: Any) -> Any:
        """Store and return the answer to a question; one that cannot be answered is left out."""
        texts = {key: str(value) for key, value in parameters.items()}
        address = f"{name}?" + "&".join(f"{key}={quote(texts[key], safe=_UNTOUCHED)}" for key in sorted(texts))
        try:
            self[address] = self._api.answer(name, texts)
        except (NotThere, RunError):
            return None
        self.size += len(json.dumps(self[address]))
        return self[address]


_UNTOUCHED = "!'()*-._~"
"""Characters that encodeURIComponent leaves as they are, besides letters and digits."""


def _answers(api: Api, runs: Sequence[ViewedRun], steps: int) -> tuple[dict[str, Any], bool]:
    answers = _Answers(api)
    answers.keep("runs")
    answers.keep("state")
    for number in range(len(api.probes)):
        answers.keep("probe", probe=number)
    full: list[tuple[int, int, int]] = []
    for number, run in enumerate(runs):
        answers.keep("metrics", run=number)
        answers.keep("buffer", run=number)
        answers.keep("settings", run=number)
        answers.keep("queries", run=number, search="", order="hardest")
        chosen = spread(run.tables.steps(), steps)
        tables = {step: answers.keep("step", run=number, step=step) for step in chosen}
        answers[f"steps?run={number}"] = {"steps": [step for step in chosen if tables[step]]}
        full += [(number, step, group) for step, group in _groups(tables)]
        for query in sorted(
            {table["query"] for contents in tables.values() if contents for table in contents["groups"]}
        ):
            answers.keep("query", run=number, id=query)
    for number, step, group in full:
        if answers.size > MOST_BYTES:
            return answers, False
        shown = answers.keep("group", run=number, step=step, group=group)
        for sample in range(len(shown["samples"]) if shown else 0):
            answers.keep("sample", run=number, step=step, group=group, sample=sample)
    return answers, True


def _groups(tables: dict[int, Any]) -> Iterator[tuple[int, int]]:
    """The first group of every step, then every second group, …: a report cut short still shows all steps."""
    longest = max((len(table["groups"]) for table in tables.values() if table), default=0)
    for group in range(longest):
        for step, table in tables.items():
            if table and group < len(table["groups"]):
                yield step, group


def spread(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of the steps, evenly spread, with the first and the last.

    >>> spread(range(1, 101), 4), spread([3, 4], 9)
    ([1, 34, 67, 100], [3, 4])
    """
    if len(steps) <= most:
        return list(steps)
    if most < 2:
        return list(steps[-1:]) * most
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def joined_scripts(files: dict[str, bytes], entry: str = "app.js") -> str:
    """All modules joined, each after those that it imports."""
    done: list[str] = []

    def add(name: str) -> None:
        if name not in done:
            source = files[name].decode()
            for imported in _IMPORT.findall(source):
                add(imported)
            done.append(name)

    add(entry)
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", files[name].decode())) for name in done)


def _page(answers: dict[str, Any]) -> bytes:
    files = static_files()
    html = files["index.html"].decode()
    styles = "\n".join(files[name].decode() for name in _STYLE_LINK.findall(html))
    scripts = [files["vendor/uPlot.min.js"].decode(), joined_scripts(files)]
    # A "<" in the data would let model text end the element that holds it.
    data = json.dumps(answers, separators=(",", ":")).replace("<", "\\u003c")
    licence = files["vendor/uPlot.LICENSE"].decode().replace("--", "- -")
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src {_digest(styles)}; script-src {' '.join(map(_digest, scripts))}"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<!-- uPlot:\n{licence}-->\n'
        f"<style>{styles}</style>\n"
    )
    tail = (
        f'<script type="application/json" id="r3-answers">{data}</script>\n'
        f'<script>{scripts[0]}</script>\n<script type="module">{scripts[1]}</script>\n'
    )
    html = _OTHER_LINK.sub("", _STYLE_LINK.sub("", html))
    html = html.replace("</head>", f"{head}</head>").replace("</body>", f"{tail}</body>")
    return html.encode()


def _digest(text: str) -> str:
    """The text's hash, by which the content security policy allows it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
