"""vLLM servers of the tests: real ones, in processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[3]


class Server:
    """A vLLM server on a port of its own, which can die and come back there."""

    def __init__(self, model: Path, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.model, self.log = model, folder / f"server-{self.port}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.address = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--max-num-seqs", "16", "--skip-tokenizer-init"]
        command = [sys.executable, "-m", "r3.rollout.vllm.serve", str(self.model), *options]
        with self.log.open("ab") as log:  # a session of its own, so that all its processes can be killed at once
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        """Until it answers; if it ends instead, say what it said."""
        assert self.process is not None
        while True:
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=60):
                    return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                time.sleep(0.2)

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
