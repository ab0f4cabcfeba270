"""Bad input, made at random, each through the real entry point.

Settings, recipes, data rows and data files go through the command line. Answers that would rather not be judged get
their verdict, and requests that no browser makes their reply.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import random
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from pydantic import BaseModel

from r3.cli import main
from r3.config import Config
from r3.verify import MathVerifier
from r3.view.api import Api
from r3.view.runs import open_runs
from r3.view.server import ViewServer
from tests.train.tiny import overrides

SECONDS = 60
"""After which a command line counts as hanging; the slowest takes one or two."""


class Hangs(BaseException):
    """Not an Exception, and above all no OSError: nobody may take it for an error of theirs."""


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    def ended(*_: Any) -> None:
        raise Hangs(f"no answer within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fault_of(arguments: list[str], codes: tuple[int, ...] = (0, 2)) -> str | None:
    """What is wrong with how `r3` takes these arguments; None if it is as promised: a code, and lines that say why."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with time_limit(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    except SystemExit as ended:  # argparse's own refusal
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:  # noqa: BLE001
        return f"raised {type(error).__name__}: {error}"
    text = err.getvalue()
    if "r3: unexpected" in text or "Traceback" in text:
        return text.strip()[-500:]
    if code not in codes:
        return f"exit code {code}: {text.strip()[-300:]}"
    if code == 2 and not text.strip():
        return "exit code 2 without a word"
    return None


# ---------------------------------------------------------------- settings


def leaves(section: type[BaseModel] = Config, prefix: str = "") -> list[tuple[str, Any]]:
    """Every setting by its dotted name, with its type; sections too, since someone will set one to a number."""
    found: list[tuple[str, Any]] = []
    for name, field in section.model_fields.items():
        found.append((prefix + name, field.annotation))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += leaves(field.annotation, f"{prefix}{name}.")
    return found


ODD = [
    "", "~", "true", "off", "0", "-1", "1", "2", "3.5", "-0.0", ".nan", ".inf", "-.inf", "1e308", "1e-308", "1e400",
    "99999999999999999999", "1e12", "[]", "{}", "[1, 2, 3]", "{a: b}", "[.nan, .nan]", "'\\0'", '"\\0"', '"\\ud800"',
    "!!binary abc", "!!python/object:os.system x", "2020-13-45", "1:99:99", "&a [*a]", "*a", "<<: 1", "0x" + "f" * 5000,
    "9" * 5000, "[" * 500, "{{{{", "%s%s%n", "../../etc/passwd", "/dev/null/x", "x" * 5000, "🦆", "null", "embedded",
    "{seed}", "{seed:99999999999}", "{method!r}", "{0}", "grpo", "file", "math", "all-linear", "arithmetic", "cpu",
]  # fmt: skip
SLOW = ("model.path", "task.pass_rates_from", "model.revision", "run.wandb", "run.trackio")
"""Not fuzzed with names: they ask a network, or are paths of the reader's own machine."""


def one_override() -> st.SearchStrategy[str]:
    """`key=value` with a key of the tree, or nearly, and a value that may be of any kind."""
    keys = [name for name, _ in leaves() if not name.startswith(SLOW)]
    values = st.one_of(
        st.sampled_from(ODD),
        st.integers(-(2**70), 2**70).map(str),
        st.floats(width=64).map(repr),
        st.text(max_size=20),
        st.lists(st.integers(-5, 10**9), max_size=4).map(str),
    )
    key = st.one_of(st.sampled_from(keys), st.sampled_from(keys).map(lambda k: k + ".x"), st.text(max_size=12))
    return st.builds(lambda k, v: f"{k.replace('=', '')}={v}".lstrip("-"), key, values)


def settings_fault(given: list[str]) -> str | None:
    """How `r3 train --print-config` takes overrides on the bundled recipe."""
    return fault_of(["train", "--print-config", "train.steps=1", *given])


def dry_fault(given: list[str]) -> str | None:
    """The same for a dry run, which also makes the task and the prompts; the task stays small."""
    return fault_of(["train", "--dry-run", *given, "task.size=8", "task.heldout=4"])


def recipes() -> st.SearchStrategy[bytes]:
    """Files that may be anything: bytes, mappings of nonsense, or nearly a recipe."""
    scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10))
    trees = st.recursive(
        scalars,
        lambda below: st.one_of(
            st.lists(below, max_size=3),
            st.dictionaries(
                st.sampled_from([n.split(".")[-1] for n, _ in leaves()] + ["x", "1", ""]), below, max_size=3
            ),
        ),
        max_leaves=8,
    )
    return st.one_of(st.binary(max_size=60), trees.map(lambda tree: json.dumps(tree).encode()), st.text().map(_encoded))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def recipe_fault(folder: Path, content: bytes) -> str | None:
    path = folder / "recipe.yaml"
    path.write_bytes(content)
    return fault_of(["train", str(path), "--print-config"])


# ---------------------------------------------------------------- data


def data_rows() -> st.SearchStrategy[list[Any]]:
    """Rows of which some are as they should be, and others anything that JSON can say."""
    value = st.one_of(
        st.sampled_from(["", " ", "2", "What is 1 + 1?", "\ud800", "a\0b", "\u2028", "x" * 400, None, True, [], {}, 0]),
        st.text(max_size=10),
        st.integers(),
        st.floats(),
        st.lists(st.integers(), max_size=2),
        st.dictionaries(st.text(max_size=3), st.none(), max_size=1),
    )
    good = st.builds(lambda i: {"id": f"q{i}", "problem": f"What is {i}?", "answer": "1"}, st.integers(0, 30))
    odd = st.fixed_dictionaries({}, optional={"id": value, "problem": value, "answer": value, "difficulty": value})
    return st.lists(st.one_of(good, odd, value), max_size=8)


def rows_fault(folder: Path, rows: list[Any]) -> str | None:
    """How a dry run takes a data file of these rows; the tiny model's folder is made once."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return fault_of(["train", "--dry-run", *overrides(folder, task__path=path, task__heldout=2)])


def damaged_file_fault(folder: Path, random_: random.Random) -> str | None:
    """How a dry run takes a whole data file with some of its bytes changed, removed or added."""
    rows = [{"id": f"q{i}", "problem": f"What is {i} + {i}?", "answer": str(i)} for i in range(20)]
    kind = random_.choice(["jsonl", "json", "jsonl.gz", "parquet"])
    path = folder / f"data.{kind}"
    if kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        data = path.read_bytes()
    elif kind == "json":
        data = json.dumps(rows).encode()
    else:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        data = gzip.compress(data) if kind == "jsonl.gz" else data
    path.write_bytes(damaged(data, random_))
    return fault_of(["train", "--dry-run", *overrides(folder, task__path=path)])


def damaged(data: bytes, random_: random.Random) -> bytes:
    """Cut, flipped, zeroed, doubled or replaced somewhere."""
    place, length = random_.randrange(len(data) or 1), random_.randint(1, 64)
    kind = random_.choice(["cut", "flip", "zero", "insert", "noise", "empty"])
    if kind == "cut":
        return data[:place]
    if kind == "empty":
        return b""
    if kind == "noise":
        return random_.randbytes(len(data))
    if kind == "insert":
        return data[:place] + random_.randbytes(length) + data[place:]
    piece = bytes(length) if kind == "zero" else bytes(byte ^ 0x55 for byte in data[place : place + length])
    return data[:place] + piece + data[place + length :]


# Answers for the verifier, and requests to `r3 view`.

GOLD = "271828"
_BOMBS = [
    "9^{9^{9^{9}}}", "10^{10^{10}}!", "(((10!)!)!)!", "\\frac{1}{0}", "\\sum_{n=1}^{10^{12}} \\frac{1}{n}", "\\infty",
    "\\int_0^{10^9} e^{x^{x^x}} dx", "\\binom{10^9}{5\\cdot10^8}", "\\sqrt[10^9]{2^{10^9}}", "x" * 5000, "1" * 20_000,
    "\\begin{matrix}" + "1 & " * 3000 + "1\\end{matrix}", "__import__('os').system('true')", "\\input{/etc/passwd}",
    "\0", "\u202e", "½⅓", "{1,2,3}^{1000}", "(a+b+c+d)^{500}", "\\lim_{n\\to\\infty}(1+\\frac{1}{n})^{n^n}", "=", "",
]  # fmt: skip
_AROUND = ["{}", "\\text{{{}}}", "\\frac{{{}}}{{{}}}", "\\left({}\\right)", "{} = {}", "\\sqrt{{{}}}", "-{}", "{}, {}"]


def answer_fault(verifier: MathVerifier, chance: random.Random) -> str | None:
    """A verdict comes, and it is not 'right': nothing that is made here is the reference answer."""
    answer = chance.choice(_BOMBS)
    for _ in range(chance.choice([0, 0, 1, 2, 60])):
        around = chance.choice(_AROUND)
        answer = around.replace("{}", answer[:4000]).replace("{{", "{").replace("}}", "}")
        if len(answer) > 20_000:
            break
    text = "\\boxed{" * chance.choice([1, 1, 2, 500]) + answer + "}" * chance.choice([0, 1, 1, 3])
    try:
        with time_limit():
            verdict = verifier.verify(text, GOLD)
    except (Exception, Hangs) as error:  # noqa: BLE001
        return f"{text[:200]!r}: {type(error).__name__}: {error}"
    return f"{text[:200]!r} was judged right" if verdict.right else None


class Viewer:
    """A server over a run, in this process."""

    def __init__(self, run: Path) -> None:
        self.server = ViewServer(Api(open_runs([run])), "127.0.0.1", 0)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fault(self, chance: random.Random) -> str | None:
        """Any bytes: a refusal or a closed connection, and the next visitor is served."""
        port = self.server.server_address[1]
        paths = ["/", "/api/runs", "/api/step?step=-1", "/static/../../etc/passwd", "/" + "x" * 70_000, "//", "/%ff%00"]
        methods = ["GET", "POST", "GE\0T", "HEAD", ""]
        start = f"{chance.choice(methods)} {chance.choice(paths)} HTTP/{chance.random() * 3:.1f}"
        headers = [f"Host: {chance.choice(['127.0.0.1', 'evil.example', '', '[::1', 'a' * 70_000])}"]
        headers += [f"X-{number}: y" for number in range(chance.choice([0, 3, 200]))]
        request = "\r\n".join([start, *headers, "", ""]).encode()
        if chance.random() < 0.3:
            request = chance.randbytes(chance.randint(1, 300)) + b"\r\n\r\n"
        for sent, wanted in ((request, None), (f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode(), b"200")):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                try:
                    connection.sendall(sent)
                    connection.shutdown(socket.SHUT_WR)
                    reply = connection.recv(64)
                except TimeoutError:
                    return f"{sent[:200]!r} was never answered"
                except OSError:  # closed, as it may be
                    reply = b""
            if b"Traceback" in reply or b" 500 " in reply or (wanted is not None and wanted not in reply):
                return f"{sent[:200]!r} was answered {reply!r}"
        return None
