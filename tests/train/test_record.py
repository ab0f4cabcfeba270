"""Saved rollouts: rows as they were trained, what each token wrote, files of which one group can be read alone.

Covers r3.run.rollouts.
"""

from __future__ import annotations

import gzip
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3.buffer import SampleBuffer
from r3.cli import main
from r3.errors import RunError
from r3.policy.update import Updater, UpdateReport
from r3.run.directory import RunFiles
from r3.run.rollouts import Rollouts
from r3.train.record import TokenTexts
from tests.tokenizing import char_tokenizer, chat_tokenizer
from tests.train.tiny import overrides


@pytest.mark.parametrize("text", ["12 + 30 = 42", "naïve café — 数学 🧮 ok", "", " leading", "a\n\n b"])
def test_the_widths_of_tokens_cut_the_text_where_they_wrote_it(text: str) -> None:
    tokenizer = chat_tokenizer()
    tokens = np.array([*tokenizer.encode(text), tokenizer.eos_token_id])
    texts = TokenTexts(tokenizer)
    widths = texts.widths(tokens, texts.decode(tokens))
    assert widths is not None
    assert len(widths) == len(tokens)
    assert sum(widths) == len(text)
    assert widths[-1] == 0  # the end is not text
    at = 0
    for token, width in zip(tokens, widths, strict=True):
        alone = tokenizer.decode([token], skip_special_tokens=True)
        if "\ufffd" not in alone and width:
            assert text[at : at + width] == alone
        at += width


def test_a_text_cut_inside_a_character_and_one_of_another_tokenizer() -> None:
    tokenizer = chat_tokenizer()
    tokens = np.array(tokenizer.encode("ok 🧮")[:-1])
    texts = TokenTexts(tokenizer)
    widths = texts.widths(tokens, texts.decode(tokens))
    assert widths is None or sum(widths) <= len(texts.decode(tokens))
    assert TokenTexts(char_tokenizer()).widths(np.array([5, 6, 7]), "something else") is None


def test_a_file_reads_the_same_whole_and_in_parts(tmp_path: Path) -> None:
    rollouts = Rollouts(tmp_path / "rollouts")
    noise = np.random.default_rng(0).integers(0, 10**9, (3, 40_000)).tolist()  # more than one member's field can hold
    rows = [{"group": g, "text": f"{g}/{i} é", "none": None} for g in (0, 1) for i in range(3)]
    path = rollouts.write(7, rows, [{"query": f"q{g}", "noise": noise[g]} for g in range(3)])
    assert [row["text"] for row in rollouts.read(7)] == [row["text"] for row in rows]
    unpacked = subprocess.run(["gzip", "-dc", str(path)], capture_output=True, check=True).stdout
    assert unpacked == gzip.decompress(path.read_bytes())
    assert len(unpacked.splitlines()) == len(rows)  # other readers do not see the table
    table = rollouts.contents(7)
    assert table is not None
    assert [about["query"] for about in table.summaries] == ["q0", "q1", "q2"]
    assert table.summaries[2]["noise"] == noise[2]
    assert table.places[2] is None  # no rows of it were kept
    assert table.places[1] is not None
    assert [row["text"] for row in rollouts.read_group(7, table.places[1])] == ["1/0 é", "1/1 é", "1/2 é"]
    again = rollouts.write(8, rows, [{"query": f"q{g}", "noise": noise[g]} for g in range(3)])
    assert again.read_bytes() == path.read_bytes()


def test_files_without_a_table_and_cut_ones(tmp_path: Path) -> None:
    rollouts = Rollouts(tmp_path / "rollouts")
    path = rollouts.write(1, [{"group": 0, "text": "a"}])
    assert rollouts.contents(1) is None
    path = rollouts.write(2, [{"group": 0, "text": "a" * 99}], [{"query": "q"}])
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        table = None
        with suppress(RunError):  # cut within the table
            table = rollouts.contents(2)
        if table is not None and table.places[0] is not None:
            with pytest.raises(RunError, match="damaged"):
                rollouts.read_group(2, table.places[0])


def test_a_query_that_a_batch_holds_twice_keeps_two_sets_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of four over three queries: the same past sample joins two groups, in two of a step's updates."""
    trained: list[tuple[Sequence[Any], UpdateReport]] = []
    update = Updater.update

    def watched(self: Updater, weighted: Sequence[Any], **named: Any) -> UpdateReport:
        report = update(self, weighted, **named)
        trained.append((weighted, report))
        return report

    monkeypatch.setattr(Updater, "update", watched)
    settings = {"task__heldout": 9, "train__epochs": 8, "train__updates_per_batch": 2, "train__learning_rate": "1e-2"}
    more = {"run__rollouts_every": 1, "run__rollouts_groups": 100, "method__objective__ratio_gate": "null"}
    assert main(["train", "--quiet", *overrides(tmp_path, **settings, **more)]) == 0
    rollouts, twice, apart = RunFiles(tmp_path / "run").rollouts, 0, 0
    with SampleBuffer.open_reader(tmp_path / "run" / "buffer.sqlite") as buffer:
        for step, (weighted, report) in enumerate(trained, start=1):
            rows = [row for row in rollouts.read(step) if row["advantage"] != 0]
            stored = buffer.find(row["id"] for row in rows)
            assert len(rows) == len(weighted)
            replayed: dict[int, list[Any]] = {}
            for i, (row, w) in enumerate(zip(rows, weighted, strict=True)):  # both in the order of groups and members
                assert row["tokens"] == w.sample.tokens.tolist() == stored[row["id"]].tokens.tolist()
                assert isinstance(row["ratios"], list) != w.other_context
                if not w.other_context:
                    assert row["ratios"] == pytest.approx(np.exp(report.log_ratios[i].astype(float)), abs=1e-4)
                if row["origin"] == "replayed":
                    replayed.setdefault(row["id"], []).append(row["ratios"])
            twice += sum(len(ratios) > 1 for ratios in replayed.values())
            apart += sum(any(ratio != ratios[0] for ratio in ratios) for ratios in replayed.values())
    assert twice > 0
    assert apart > 0  # or the test could not tell them apart
