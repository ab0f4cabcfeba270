"""What a run directory may hold besides runs, and more visitors than there are threads."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from r3.cli import main
from tests.train.tiny import save_model
from tests.view.conftest import Serve

NAMES = ["run.json", "config.yaml", "metrics.jsonl", "buffer.sqlite", "lock", "rollouts/step-000002.jsonl.gz"]


def pipe(path: Path) -> None:
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("special", [pipe, zeros])
@pytest.mark.parametrize("name", NAMES)
def test_special_files_neither_hang_nor_fill_memory(name: str, special: object, copy: Path, tmp_path: Path) -> None:
    """Each command ends by itself within 2 GB more than Python and torch take, with a line if with an error."""
    (copy / name).unlink()
    special(copy / name)  # type: ignore[operator]
    shown = limited("show", str(copy))
    assert shown.returncode in (0, 1), shown.stderr
    assert "Traceback" not in shown.stderr
    exported = limited("view", str(copy), "--export", str(tmp_path / "page.html"))
    assert exported.returncode in (0, 1), exported.stderr
    assert "Traceback" not in exported.stderr
    assert "unexpected" not in shown.stderr + exported.stderr


def limited(*arguments: str) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (2 * 2**30, 2 * 2**30))

    return subprocess.run(
        [sys.executable, "-m", "r3", *arguments],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )


def test_a_thousand_connections_at_once_all_get_an_answer(finished: Path, serve: Serve) -> None:
    """Those beyond the threads are told that it is busy; afterwards it serves as before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4000:
        pytest.skip("needs two thousand open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4000, hard))
    address = urlsplit(serve(finished))
    assert address.hostname is not None
    assert address.port is not None
    place = (address.hostname, address.port)
    request = f"GET /api/runs HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode()
    sockets = []
    try:
        for _ in range(1000):
            connection = socket.create_connection(place, timeout=120)
            connection.sendall(request)
            sockets.append(connection)
        answers = Counter(connection.recv(12) for connection in sockets)
    finally:
        for connection in sockets:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sum(answers.values()) == 1000
    assert set(answers) <= {b"HTTP/1.1 200", b"HTTP/1.1 404", b"HTTP/1.1 503"}, answers
    assert answers[b"HTTP/1.1 503"] < 1000
    with socket.create_connection(place, timeout=120) as connection:
        connection.sendall(request)
        assert connection.recv(8) == b"HTTP/1.1"


def test_a_models_own_code_is_not_run_unless_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(tmp_path / "model")
    trace = tmp_path / "it-ran"
    (folder / "configuration_own.py").write_text(
        f"open({str(trace)!r}, 'w').close()\nfrom transformers import LlamaConfig\nclass Own(LlamaConfig):\n    pass\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["train", "--dry-run", f"model.path={folder}", "task.name=arithmetic"]) == 2
    line = capsys.readouterr().err.strip()
    assert "model.trust_remote_code=true" in line
    assert "\n" not in line
    assert not trace.exists()
