"""`r3 data verl`: what it writes, and what it refuses. (That verl reads it is tested with verl: make test-verl.)"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'r3-rl[parquet]'")
import pyarrow.parquet as parquet

from tests.train.tiny import run_r3


def export(folder: Path, ids: list[str], *more: str, check: bool = True) -> tuple[int, str]:
    rows = [{"id": name, "problem": f"What is {i}+{i}?", "answer": str(2 * i)} for i, name in enumerate(ids)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(f"task: {{name: file, heldout: 1, path: {folder / 'sums.jsonl'}}}\n")
    done = run_r3("data", "verl", folder / "recipe.yaml", *more, "--to", folder / "out", check=check)
    return done.returncode, done.stdout + done.stderr


def test_rows_as_verl_wants_them(tmp_path: Path) -> None:
    _, said = export(tmp_path, ["a", "b", "c"], "task.instruction=Think.")
    assert "train.parquet: 2 queries" in said
    assert "note" not in said
    train = parquet.read_table(tmp_path / "out/train.parquet").to_pylist()
    assert train[1] == {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "What is 1+1?\n\nThink."}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": "b", "split": "train"},
    }
    heldout = parquet.read_table(tmp_path / "out/heldout.parquet").to_pylist()
    assert [row["extra_info"]["index"] for row in heldout] == ["c"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["heldout.parquet", "train.parquet"]


def test_ids_must_be_unique(tmp_path: Path) -> None:
    code, said = export(tmp_path, ["a", "a", "c"], check=False)
    assert code != 0
    assert "'a'" in said


def test_it_says_when_verl_needs_another_judge(tmp_path: Path) -> None:
    _, said = export(tmp_path, ["a", "b"], "task.verifier=tests.train.tiny.judge")
    assert "this task's verifier is tests.train.tiny.judge" in said
    assert "reward.custom_reward_function.path" in said
