"""Answers that would rather not be judged, and requests that no browser makes: each gets its verdict, or its reply."""

from __future__ import annotations

import random
import socket
import threading
from pathlib import Path

from r3.verify import MathVerifier
from r3.view.api import Api
from r3.view.runs import open_runs
from r3.view.server import ViewServer
from tests.torture.inputs import Hangs, time_limit

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
