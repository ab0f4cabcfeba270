"""`r3 show`, through the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from r3.cli import main
from r3.run import RunFiles


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
