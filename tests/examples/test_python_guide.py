"""The Python guide's code blocks and the notebook run as they are written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "r3_in_a_notebook.ipynb"


def test_the_guides_code_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)
    module, *rest = blocks
    assert module.startswith("# judges.py\n")
    (tmp_path / "judges.py").write_text(module)
    (tmp_path / "guide.py").write_text("\n".join(rest))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "guide.py"], cwd=tmp_path, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "http://127.0.0.1" in done.stdout
    steps = [json.loads(line)["step"] for line in (tmp_path / "runs/sums/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(7))


@pytest.mark.filterwarnings("default")  # the libraries' own deprecations are theirs
def test_the_notebook_runs_in_a_kernel(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs a notebook's kernel: pip install nbclient ipykernel")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # committed without the results of a machine
    nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = "".join(output.get("text", "") for output in outputs)
    shown = "".join(str(output["data"]) for output in outputs if "data" in output)
    assert "step 4/4" in texts
    assert "('callback', " in shown
    assert re.search(r"\d\.\d% \[\d", texts)
    assert "http://127.0.0.1" in shown
