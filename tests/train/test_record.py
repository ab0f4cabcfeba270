"""What a run records: its rollouts, its metrics, and what W&B and trackio get of them.

Covers r3.run.rollouts, r3.train.sampler, r3.train.record.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3.buffer import SampleBuffer
from r3.cli import main
from r3.errors import RunError
from r3.policy.update import Updater, UpdateReport
from r3.run import RunFiles
from r3.run.rollouts import Rollouts
from r3.samples import Sample
from r3.train.record import TokenTexts
from tests.tokenizing import char_tokenizer, chat_tokenizer
from tests.train.tiny import overrides, read_metrics, run_r3


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


# A step's metrics in real runs: the ranking's, against pairs counted one by one; the alarm of a failing judge.


LIMIT, PEAKS = 12, 0.25


def in_order(samples: list[Sample]) -> tuple[float, int]:
    """How many pairs of a right and a wrong answer SERR orders rightly by their first half-limit of tokens."""
    late = []
    for sample in samples:
        assert sample.entropies is not None
        if len(sample) > LIMIT // 2:
            seen = sorted(map(float, sample.entropies[: LIMIT // 2]))
            most = max(1, int(PEAKS * len(seen)))
            late.append((sum(seen[-most:]) / most, sum(seen) / len(seen), bool(sample.outcome)))
    scores = [sum(peak > p and mean < m for p, m, _ in late) for peak, mean, _ in late]
    pairs = [(scores[i], scores[j]) for i, (*_, a) in enumerate(late) for j, (*_, b) in enumerate(late) if a and not b]
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs), len(pairs)


def test_the_rankings_order_is_measured_in_training(tmp_path: Path) -> None:
    settings = overrides(tmp_path, train__epochs=2, rollout__group_size=8, method__reflection="off")
    assert main(["train", "--quiet", *settings]) == 0
    lines = [line for line in read_metrics(tmp_path / "run") if line["step"] > 0]
    with SampleBuffer.open_reader(tmp_path / "run" / "buffer.sqlite") as buffer:
        history = buffer.history([f"q{i}" for i in range(12)])
    for line in lines:
        counted = [
            in_order([sample for sample in samples if sample.step == line["step"]]) for samples in history.values()
        ]
        assert line["ranking/pairs"] == sum(pairs for _, pairs in counted)
        # The buffer rounds entropies to half precision, which may tie a pair or two.
        assert line["ranking/pairs_in_order"] == pytest.approx(sum(ordered for ordered, _ in counted), abs=1)
        if line["ranking/pairs"]:
            assert line["ranking/auc"] == line["ranking/pairs_in_order"] / line["ranking/pairs"]
    assert sum(line["ranking/pairs"] for line in lines) > 20


def test_a_judge_that_fails_is_said_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Answers that nobody found wrong count as wrong: a person should hear of it, not only find it in the metrics."""
    judge = {"task__verifier": "tests.tasks.test_files.raises", "task__caged": "true", "train__steps": 1}
    assert main(["train", "--quiet", *overrides(tmp_path, **judge)]) == 0
    (line,) = [line for line in read_metrics(tmp_path / "run") if line["step"] == 1]
    assert line["verify/error"] > 0
    assert f"step 1: the verifier gave up on {line['verify/error']:.0f} of" in caplog.text


def test_successes_are_counted_by_where_they_come_from(tmp_path: Path) -> None:
    """Against the rollouts, in which every sample of every group stands."""
    more = {"method__reflection__at_once": "true", "method__reflection__tau": 0.9, "run__rollouts_groups": 100}
    assert main(["train", "--quiet", *overrides(tmp_path, train__epochs=3, **more)]) == 0
    total: Counter[str] = Counter()
    for line in read_metrics(tmp_path / "run")[1:]:
        rows = list(RunFiles(tmp_path / "run").rollouts.read(line["step"]))
        fresh = [row for row in rows if row["origin"] == "fresh"]
        plain = [row for row in fresh if row["context"] == "plain"]
        reflected = [row for row in fresh if row["context"] == "reflection"]
        replayed = [row for row in rows if row["origin"] == "replayed"]
        asked_twice = {row["query"] for row in reflected}
        same = [row for row in plain if row["query"] in asked_twice]
        expected = {
            "successes/fresh": right(plain),
            "successes/reflection": right(reflected),
            "successes/replayed": right(replayed),
            "lift/tried/plain": len(same),
            "lift/right/plain": right(same),
            "lift/tried/reflection": len(reflected),
            "lift/right/reflection": right(reflected),
        }
        assert {name: line[name] for name in expected} == expected
        for name, rows_of in (("yield/plain", plain), ("yield/reflection", reflected)):
            tokens = sum(len(row["tokens"]) for row in rows_of)
            assert line[name] == (pytest.approx(1000 * right(rows_of) / tokens) if tokens else None)
        total.update(expected)
    assert all(total.values()), total


def right(rows: list[dict[str, Any]]) -> int:
    return sum(row["outcome"] for row in rows)


def test_peak_memory_is_the_process_s_own_whoever_started_it() -> None:
    child = "from r3.train.record import peak_memory_gb; print(peak_memory_gb())"
    parent = f"import subprocess, sys; held = b'x' * 2_000_000_000; subprocess.run([sys.executable, '-c', {child!r}])"
    told = subprocess.run([sys.executable, "-c", parent], check=True, capture_output=True, text=True).stdout
    assert 0.01 < float(told) < 1.5


# W&B and trackio themselves, offline: what a run sends them, under which names, and that a resume goes on with it.
# Neither is skipped where it is missing: both are in the `dev` extra.


BLOCK = 32_768
LABELS = {"run__project": "spelling", "run__name": "'{method} of {seed}'", "run__group": "seeds", "run__tags": "[a, b]"}


def trained_with_a_step_twice(folder: Path, service: str) -> None:
    """Three steps with a checkpoint after the second and the last, which is lost: the third is made again."""
    settings = overrides(folder, train__steps=3, method="grpo", run__keep_checkpoints=2, **LABELS)
    run_r3("train", "--quiet", *settings, f"run.{service}=true")
    shutil.rmtree(folder / "run" / "checkpoints" / "step-000003")
    run_r3("train", "--quiet", "--resume", folder / "run", "train.steps=4")
    assert [line["step"] for line in read_metrics(folder / "run")] == [0, 1, 2, 3, 4]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trained_with_a_step_twice(tmp_path, "wandb")
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    runs, steps = [], []
    for file in files:
        for record in _records(file):
            if record.HasField("run"):
                runs.append(record.run)
            if record.HasField("history"):
                steps.append(record.history.step.num)
    for run in runs:
        assert (run.project, run.display_name, run.run_group, list(run.tags)) == (
            "spelling",
            "grpo of 1",
            "seeds",
            ["a", "b"],
        )
    assert len({run.run_id for run in runs}) == 1
    assert steps == [0, 1, 2, 3, 4]


def _records(path: Path) -> Iterator[Any]:
    """What is in a W&B file: LevelDB's log format behind a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, text = path.read_bytes(), 7, b""
    while place < len(data):
        if BLOCK - place % BLOCK < 7:  # a header does not fit: the block's end is padding
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        text += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or a last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(text)
            yield record
            text = b""


def test_trackio_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trained_with_a_step_twice(tmp_path, "trackio")
    (database,) = (tmp_path / "trackio").glob("spelling*.db")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        steps = connection.execute("select run_name, step from metrics order by step").fetchall()
        (config,) = connection.execute("select config from configs").fetchone()
    (name,) = {name for name, _ in steps}
    assert name.startswith("grpo of 1-")
    assert [step for _, step in steps] == [0, 1, 2, 3, 4]
    assert json.loads(config)["run"]["tags"] == ["a", "b"]
