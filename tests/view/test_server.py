"""The server from outside, and what needs none: one file to send (`--export`), and `r3 show`.

Covers r3.view.export, r3.view.show.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from r3.cli import main
from r3.run import RunFiles
from r3.view.export import joined_scripts, spread
from r3.view.server import POLICY, is_loopback, static_files
from tests.train.tiny import run_r3
from tests.view.conftest import Page, Serve, visit


def ask(url: str, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """One request, to the very path given; headers with _ for -."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    reply = connection.getresponse()
    found = reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()
    connection.close()
    return found


def answer(url: str, question: str) -> Any:
    status, _, body = ask(url, f"/api/{question}")
    assert status == 200, body
    return json.loads(body)


def test_it_only_reads_and_only_what_it_lists(finished: Path, serve: Serve) -> None:
    url = serve(finished)
    assert url.startswith("http://127.0.0.1:")
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if "buffer" not in path.name}
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        status, headers, _ = ask(url, "/api/state", method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert ask(url, "/", "HEAD")[2] == b""
    for path in (
        "/../pyproject.toml",
        "/static/../api.py",
        "/static/..%2f..%2fcli.py",
        "//etc/passwd",
        "/static//etc/passwd",
        "/static/vendor/../index.html",
        "/run.json",
        "/static/%2e%2e/server.py",
        "/api/../../run.json",
    ):
        assert ask(url, path)[0] == 404, path
    status, headers, _ = ask(url, "/")
    assert status == 200
    assert headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*") if "buffer" not in path.name}


def test_another_name_for_this_machine_is_refused(finished: Path, serve: Serve) -> None:
    """DNS rebinding: a page of another site that made its own name point here sends that name."""
    url = serve(finished)
    port = urlsplit(url).port
    for host in ("evil.example", f"evil.example:{port}", "", "10.0.0.1", "127.0.0.1.evil.example", "[::1", "a b"):
        assert ask(url, "/api/state", Host=host)[0] == 403, host
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert ask(url, "/api/state", Host=host)[0] == 200, host


def test_beyond_loopback_a_token_is_asked_for(finished: Path, serve: Serve) -> None:
    url = serve(finished, "--host", "0.0.0.0")
    parts = urlsplit(url)
    assert parts.query.startswith("token=")
    assert parts.hostname == socket.gethostname().lower()
    here = f"http://127.0.0.1:{parts.port}"
    for path in ("/", "/api/state", "/static/app.js", "/?token=", "/?token=guess", "/api/state?token=%ff"):
        assert ask(here, path)[0] == 403, path
    assert ask(here, "/api/state", Cookie=f"r3_view_{parts.port}=guess")[0] == 403
    status, headers, _ = ask(here, f"/?{parts.query}")
    assert (status, headers["location"]) == (303, "/")  # the token leaves the address
    cookie = headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict"} <= {part.strip() for part in cookie.split(";")}
    assert ask(here, "/api/state", Cookie=cookie.split(";")[0])[0] == 200
    assert ask(here, "/api/state", Cookie=cookie.split(";")[0], Host="evil.example")[0] == 403


def test_what_is_not_there_is_said(finished: Path, serve: Serve) -> None:
    url = serve(finished)
    for question, says in (
        ("step?run=0&step=99", "no rollouts were saved for step 99; they are kept of 6 steps, 1 to 6"),
        ("step?run=0", "the page needs step=NUMBER"),
        ("step?run=7&step=1", "there are 1 runs"),
        ("step?run=0&step=-1", "must be a whole number"),
        ("group?run=0&step=1&group=99", "there is no group 99"),
        ("sample?run=0&step=1&group=0&sample=99", "there is no 99"),
        ("query?run=0&id=nobody", "no saved step has a group of query 'nobody'"),
        ("nonsense", "there is no page"),
    ):
        status, _, body = ask(url, f"/api/{question}")
        assert status == 404
        assert says in json.loads(body)["error"]


def test_metrics_come_in_parts(finished: Path, serve: Serve) -> None:
    url = serve(finished)
    whole = answer(url, "metrics?run=0")
    assert whole["steps"] == [0, 1, 2, 3, 4, 5, 6]
    part = answer(url, "metrics?run=0&since=5&generation=0")
    assert part["steps"] == [5, 6]
    assert part["columns"]["accuracy"] == whole["columns"]["accuracy"][5:]
    assert answer(url, "metrics?run=0&since=5&generation=8")["from"] == 0  # of another history: all of it


def test_summaries_of_all_groups_and_rows_of_some(finished: Path, serve: Serve) -> None:
    url = serve(finished)
    tables = [answer(url, f"step?run=0&step={number}") for number in range(1, 7)]
    step = max(tables, key=lambda table: len(table["groups"]))
    at, count = step["step"], len(step["groups"])
    assert count > 5
    assert step["kept"] == [i < 5 for i in range(count)]
    assert answer(url, f"group?run=0&step={at}&group={count - 1}")["kept"] is False
    assert 2 in answer(url, f"search?run=0&step={at}&text={step['groups'][2]['query']}")["groups"]
    response = answer(url, f"sample?run=0&step={at}&group=3&sample=1")["response"]
    quoted = "".join(f"%{byte:02x}" for byte in response.encode())
    assert not response or 3 in answer(url, f"search?run=0&step={at}&text={quoted}")["groups"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "nowhere: no such directory; give the run.dir of a run"),
        (["README.md"], "README.md: is a file; give the run.dir"),
        (["docs"], "docs: not a run directory (it has no run.json)"),
        (["RUN", "--port", "99999"], "cannot listen on 127.0.0.1:99999"),
        (["RUN", "--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["RUN", "--export", "/no/such/folder/report.html"], "/no/such/folder: no such directory"),
    ],
)
def test_bad_input_is_one_line(finished: Path, arguments: list[str], says: str) -> None:
    given = [str(finished) if text == "RUN" else text for text in arguments]
    done = run_r3("view", *given, "--no-browser", check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.9.9.9", True),
                        ("0.0.0.0", False), ("::", False), ("192.168.0.3", False), ("a.example", False)],
)  # fmt: skip
def test_loopback(host: str, local: bool) -> None:
    assert is_loopback(host) is local


def test_a_folder_of_runs_is_all_of_them(finished: Path, tmp_path: Path, serve: Serve) -> None:
    shutil.copytree(finished, tmp_path / "runs" / "b")
    shutil.copytree(finished, tmp_path / "runs" / "compared" / "a")
    (tmp_path / "runs" / "notes").mkdir()
    url = serve(tmp_path / "runs")
    assert [run["name"] for run in answer(url, "runs")["runs"]] == ["b", "a"]
    refused = run_r3("view", tmp_path / "runs" / "notes", check=False)
    assert refused.returncode != 0
    assert "nor has it runs inside" in refused.stderr


def test_the_optimisers_curves_are_there(finished: Path, serve: Serve) -> None:
    columns = answer(serve(finished), "metrics?run=0")["columns"]
    for name in ("loss", "grad_norm", "learning_rate", "clip_share/fresh", "kl/fresh"):
        assert any(value is not None for value in columns[f"update/{name}"])


# One file, opened from disk in a browser without a network, shows the pages of the run.


def test_an_export_opens_from_disk_and_asks_nobody(finished: Path, tmp_path: Path, page: Page) -> None:
    target = tmp_path / "report.html"
    said = run_r3("view", finished, "--export", target, "--steps", "4").stdout
    assert said.startswith(f"{target}: ")
    assert "4 steps" in said
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    url = target.as_uri()
    visit(page, url)
    assert page.locator(".grid").first.locator("canvas").count() == 17
    assert "exported report" in page.locator(".status").inner_text()
    for address in ("steps/6", "group/6/0/1", "queries", "buffer"):
        visit(page, url, f"#/0/{address}")
        assert "cannot be shown" not in page.inner_text("main")
    visit(page, url, "#/0/queries")
    page.locator("tr[data-row] a").first.click()
    page.wait_for_selector("[data-page=query] .chart")
    visit(page, url, "#/0/steps/6")
    page.locator("input.search").fill("q1")
    page.wait_for_function("() => document.querySelectorAll('tr[data-row]').length < 4")
    visit(page, url, "#/0/group/2/0")  # not among the four steps
    assert "not in the exported report" in page.inner_text("main")
    assert {address.split("#")[0] for address in asked} == {url}
    page_alone = re.sub(r'<script type="application/json".*?</script>', "", target.read_text(), flags=re.DOTALL)
    assert "http://" not in page_alone.replace("http://www.w3.org", "")


def test_an_export_of_no_steps_still_has_the_curves(finished: Path, tmp_path: Path, page: Page) -> None:
    target = tmp_path / "report.html"
    run_r3("view", finished, finished.parent / "run", "--export", target, "--steps", "0")
    visit(page, target.as_uri())
    assert page.locator(".run").count() == 2


def test_the_modules_can_be_joined() -> None:
    """No module is left out, and no `import` survives."""
    files = static_files()
    script = joined_scripts(files)
    assert "\nimport " not in script
    assert "\nexport " not in script
    names = re.findall(r"^(?:async )?(?:const|let|function|class) (\w+)", script, re.MULTILINE)
    assert sorted(names) == sorted(set(names))  # joined, all modules share one scope
    for name, source in files.items():
        if name.endswith(".js") and not name.startswith("vendor/"):
            assert source.decode().splitlines()[0] in script, name
            assert len(source.splitlines()) < 400, name


def test_the_page_asks_for_what_is_there_and_preloads_every_module() -> None:
    files = static_files()
    asked = re.findall(r'"/static/([^"]+)"', files["index.html"].decode())
    assert set(asked) <= files.keys()
    assert {name for name in files if name.endswith((".js", ".css"))} == {n for n in asked if not n.endswith(".svg")}


def test_steps_are_spread_evenly() -> None:
    assert spread(range(10, 20), 1) == [19]
    assert spread(range(10, 20), 0) == []
    assert spread([], 5) == []
    assert spread(range(1000), 3)[0::2] == [0, 999]


# `r3 show`, through the command.


def test_a_summary_with_curves(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(finished)]) == 0
    text = capsys.readouterr().out
    assert "finished, step 6 of 6" in text
    assert "r3-paper on file" in text
    for row in ("accuracy", "solve-none", "replayed answers", "reflection groups", "tokens/s"):
        assert any(line.startswith(row) for line in text.splitlines())
    assert set(text) & set("▁▂▃▄▅▆▇█")
    assert "--group 6/q" in text


def test_a_group_with_every_answer(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(RunFiles(finished).rollouts.read(6))
    query = rows[0]["query"]
    assert main(["show", str(finished), "--group", f"6/{query}"]) == 0
    text = capsys.readouterr().out
    for row in rows:
        if row["query"] == query:
            assert f"    {row['response']}\n" in text
    assert "advantage" in text


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ("6", "give STEP/QUERY, e.g. --group 12/q"),
        ("six/q1", "give STEP/QUERY"),
        ("6/nobody", "step 6 has no group of query nobody; it has q"),
        ("99/q1", "no rollouts were saved for step 99; they are kept of 6 steps, 1 to 6"),
    ],
)
def test_a_group_that_is_not_there(finished: Path, group: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(finished), "--group", group]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert len(captured.err.splitlines()) == 1


def test_no_run_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path / "none")]) == 2
    assert "no such directory" in capsys.readouterr().err
