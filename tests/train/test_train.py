"""`r3 train` from the command line: same seed, same run; all mechanisms; every method; budgets; what is left on disk.

Covers r3.evaluate.run, r3.train.loop, r3.train.session, r3.train.sampler.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from r3.buffer import SampleBuffer
from r3.cli import main
from r3.evaluate.run import HeldOut
from r3.method import reflection
from r3.method.objective import Loss
from r3.run.directory import RunFiles
from r3.samples import PromptText, Query
from r3.train.sampler import QueryStream
from tests.train.test_bad_input import refused
from tests.train.tiny import overrides, read_metrics, run_r3, save_task


def train(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    assert main(["train", "--quiet", *overrides(folder, **settings)]) == 0
    return read_metrics(folder / "run")


def contents(folder: Path) -> list[tuple[Any, ...]]:
    """Everything in a run's buffer that training could see."""
    with SampleBuffer.open_reader(folder / "run" / "buffer.sqlite") as buffer:
        history = buffer.history([f"q{i}" for i in range(12)])
        rates = buffer.success_rate([f"q{i}" for i in range(12)])
    rows = [
        (s.id, q, s.step, s.policy_version, s.outcome, s.reward, s.tokens.tolist(), s.logprobs.tolist(), s.context)
        for q, samples in history.items()
        for s in samples
    ]
    return [*sorted(rows), *sorted(rates.items())]


def test_same_seed_same_run_in_another_process(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = train(tmp_path / "a")
    run_r3("train", "--quiet", *overrides(tmp_path / "b"))
    assert read_metrics(tmp_path / "b" / "run") == first
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    (tmp_path / "c").mkdir()
    assert train(tmp_path / "c", run__seed=2) != first


def test_every_mechanism_acts_and_is_counted(tmp_path: Path) -> None:
    lines = train(tmp_path, train__epochs=4)
    total = {
        key: sum(line.get(key) or 0 for line in lines) for key in lines[-1] if key != "heldout/right_each"
    }  # null: nothing to average
    assert total["replay/samples"] > 0
    assert total["groups/reflection"] > 0
    assert total["ranking/samples"] > 0
    assert total["update/count"] > 0
    first_epoch = [line for line in lines if line.get("epoch") == 1]
    assert all(line["replay/samples"] == line["groups/reflection"] == 0 for line in first_epoch)  # S is empty
    for line in lines[1:]:
        assert line["groups/plain"] == 4
        assert 0 <= line["solve_none"] + line["solve_all"] <= 1
        parts = sum(value for key, value in line.items() if key.startswith("reward/"))
        assert line["reward"] == pytest.approx(parts)
        assert line["tokens/generated"] > 0
    assert {"heldout/right", "heldout/total", "heldout/low", "heldout/high"} <= lines[0].keys() & lines[-1].keys()


def test_a_run_tokenizes_each_problem_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its check, the digest of its tokenizer, every epoch and every evaluation have the same prompts."""
    texts: Counter[str] = Counter()
    tokenized = reflection.tokenized

    def counted(prompt: PromptText, query: Query, tokenizer: reflection.Tokenizer) -> list[int]:
        texts[str(prompt)] += 1
        return tokenized(prompt, query, tokenizer)

    monkeypatch.setattr(reflection, "tokenized", counted)
    train(tmp_path, method="grpo", evaluate__every=1)
    assert len(texts) == 12
    assert set(texts.values()) == {1}


def reflected(folder: Path) -> dict[str, list[tuple[int, int]]]:
    """(tried, solved) of every reflection group, by query and in order, from the buffer's ledger."""
    with SampleBuffer.open_reader(folder / "run" / "buffer.sqlite") as buffer:
        ledgers = {query_id: buffer.ledger(query_id) for query_id in (f"q{i}" for i in range(12))}
    return {q: [(e.tried, e.solved) for e in entries if e.context == "reflection"] for q, entries in ledgers.items()}


def test_a_query_is_given_up_after_reflections_in_vain(tmp_path: Path) -> None:
    """Two groups of four without a right answer are eight answers: there is no third; one right answer keeps it on."""
    lines = train(tmp_path, train__epochs=6, method__reflection__tau=1.0, method__reflection__give_up_after=8)
    groups = reflected(tmp_path)
    vain = {q: own for q, own in groups.items() if not any(solved for _, solved in own)}
    assert any(len(own) == 2 for own in vain.values())
    assert all(len(own) <= 2 for own in vain.values())
    assert any(len(own) > 2 for q, own in groups.items() if q not in vain)
    assert sum(line.get("reflection/given_up", 0) for line in lines) > 0


@pytest.mark.parametrize("method", ["grpo", "dapo", "r3-no-replay", "r3-no-reflection", "r3-no-ranking"])
def test_methods_are_settings_of_one_pipeline(tmp_path: Path, method: str) -> None:
    lines = train(tmp_path, method=method)
    total = {
        key: sum(line.get(key) or 0 for line in lines) for key in lines[-1] if key != "heldout/right_each"
    }  # null: nothing to average
    acted = {"replay": "replay/samples", "reflection": "groups/reflection", "ranking": "ranking/samples"}
    off = list(acted) if method in ("grpo", "dapo") else [method.removeprefix("r3-no-")]
    for mechanism, key in acted.items():
        assert (total[key] == 0) == (mechanism in off), mechanism
    if method == "dapo":  # groups without variance were replaced, so more queries were asked per step
        assert max(line.get("groups", 0) for line in lines) > 4


def test_the_run_directory_holds_what_it_promises(tmp_path: Path) -> None:
    train(tmp_path, run__tensorboard="true", run__keep_checkpoints=2)
    files = RunFiles(tmp_path / "run")
    info = files.read_info()
    assert info["seed"] == 1
    assert {"r3", "torch", "transformers", "python"} <= info["versions"].keys()
    assert "queries_per_step: 4" in files.read_config()
    assert files.checkpoints.steps() == [4, 6]
    policy = files.checkpoints.folder / "step-000006" / "policy"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    assert torch.isfinite(model(torch.tensor([tokenizer.encode("1 + 1")])).logits).all()
    rows = list(files.rollouts.read(6))
    assert {"prompt", "response", "outcome", "advantage", "reward_parts", "entropies", "replay"} <= rows[0].keys()
    assert any((tmp_path / "run" / "tensorboard").iterdir())
    with SampleBuffer.open_reader(files.buffer_path) as buffer:
        lines = read_metrics(tmp_path / "run")
        assert buffer.stats().samples == sum(4 * line["groups"] for line in lines[1:])
        assert buffer.check() == []


def test_lora_trains_adapters_only_and_resumes(tmp_path: Path) -> None:
    whole = train(tmp_path, model__lora__enabled="true", train__steps=4)
    policy = tmp_path / "run" / "checkpoints" / "step-000004" / "policy"
    assert (policy / "adapter_model.safetensors").exists()
    assert not (policy / "model.safetensors").exists()
    other = tmp_path / "other"
    other.mkdir()
    train(
        other,
        model__lora__enabled="true",
        model__path=tmp_path / "model",
        task__path=tmp_path / "task.jsonl",
        train__steps=2,
    )
    assert main(["train", "--quiet", "--resume", str(other / "run"), "train.steps=4"]) == 0
    assert strip_heldout(read_metrics(other / "run")) == strip_heldout(whole)


def test_bfloat16_trains_float32_masters_and_resumes_exactly(tmp_path: Path) -> None:
    whole = train(tmp_path, model__dtype="bfloat16", train__steps=4)
    policy = tmp_path / "run" / "checkpoints" / "step-000004" / "policy"
    weights = AutoModelForCausalLM.from_pretrained(policy, dtype="auto")
    state = torch.load(policy.parent / "trainer.pt", weights_only=True)
    masters = state["optimiser"]["masters"]
    assert weights.dtype == torch.bfloat16
    assert all(master.dtype == torch.float32 for master in masters)
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters)  # they hold more than bfloat16
    other = tmp_path / "other"
    other.mkdir()
    same = {"model__path": tmp_path / "model", "task__path": tmp_path / "task.jsonl", "model__dtype": "bfloat16"}
    train(other, **same, train__steps=2)
    assert main(["train", "--quiet", "--resume", str(other / "run"), "train.steps=4"]) == 0
    assert strip_heldout(read_metrics(other / "run")) == strip_heldout(whole)


def strip_heldout(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the evaluation that the shorter run made at its own end."""
    return [{k: v for k, v in line.items() if not k.startswith("heldout")} for line in lines]


def test_gradient_checkpointing_changes_no_number(tmp_path: Path) -> None:
    plain = train(tmp_path, train__steps=3)
    other = tmp_path / "other"
    other.mkdir()
    same = {"model__path": tmp_path / "model", "task__path": tmp_path / "task.jsonl"}
    recomputed = train(other, **same, model__gradient_checkpointing="true", train__steps=3)
    for one, two in zip(plain, recomputed, strict=True):
        assert one.keys() == two.keys()
        for key, value in one.items():
            assert two[key] == (value if value is None else pytest.approx(value, rel=1e-4, abs=1e-6)), key


def test_kl_and_several_updates(tmp_path: Path) -> None:
    lines = train(tmp_path, method__objective__kl=0.1, train__updates_per_batch=2, train__steps=4)
    taught = [line for line in lines[1:] if line["update/count"]]
    assert any(line["update/count"] == 2 for line in taught)
    assert any(line.get("update/kl/fresh", 0) > 0 for line in taught)


def test_what_the_verifier_could_not_judge_is_counted(tmp_path: Path) -> None:
    """A judge that raises, in the cage: wrong answers with that reason, and the run goes on."""
    lines = train(tmp_path, task__verifier="tests.tasks.test_files.raises", task__caged="true", train__steps=1)
    complete = 16 - round(16 * lines[1]["truncated"])
    assert lines[1]["verify/error"] == complete > 0
    assert (lines[1]["accuracy"], lines[1]["verify/timeout"]) == (0, 0)


def test_the_maths_verifier_judges_a_run(tmp_path: Path) -> None:
    """The default verifier, through r3 train: a random model boxes nothing, so all is wrong and none is an error."""
    lines = train(tmp_path, task__verifier="math", train__steps=1)
    assert lines[1]["accuracy"] == 0
    assert all(lines[1][f"verify/{reason}"] == 0 for reason in ("timeout", "memory", "crashed", "error"))


def test_nan_gradients_are_skipped_said_and_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from r3.policy import update

    good = update.policy_loss

    def poisoned(*arguments: Any) -> Any:
        result = good(*arguments)
        return Loss(result.loss * math.nan, result.diagnostics)

    monkeypatch.setattr(update, "policy_loss", poisoned)
    code = main(["train", "--quiet", *overrides(tmp_path, train__max_bad_updates=2)])
    assert code == 3
    assert "2 updates in a row had NaN or infinite gradients" in capsys.readouterr().err
    # What was trained before is whole and can be resumed once the cause is gone.
    monkeypatch.setattr(update, "policy_loss", good)
    assert main(["train", "--quiet", "--resume", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 6


def test_the_stream_is_a_function_of_its_position() -> None:
    queries = [Query(f"q{i}", "?") for i in range(7)]
    whole = QueryStream(queries, seed=3, epochs=3)
    everything = whole.take(100)
    assert whole.exhausted
    assert [epoch for _, epoch in everything] == [1] * 7 + [2] * 7 + [3] * 7
    for epoch in (1, 2, 3):
        assert {q.id for q, e in everything if e == epoch} == {q.id for q in queries}
    assert everything[:7] != [(q, 1) for q, _ in everything[7:14]]  # another order each epoch
    for position in range(21):
        resumed = QueryStream(queries, seed=3, epochs=3)
        resumed.take(5)  # read ahead, then go back
        resumed.position = position
        assert resumed.take(4) == everything[position : position + 4]


# A budget of generated tokens ends a run; evaluation goes by tokens, with several answers; both resume exactly.


BUDGET = {"train__tokens": 700, "train__epochs": 50, "evaluate__every_tokens": 200, "evaluate__samples": 3}


def test_a_run_resumed_with_a_larger_budget_is_the_run_that_had_it(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    assert main(["train", "--quiet", *overrides(tmp_path / "whole", **BUDGET)]) == 0
    same = {"model__path": tmp_path / "whole" / "model", "task__path": tmp_path / "whole" / "task.jsonl"}
    first = overrides(tmp_path / "parts", **same, **{**BUDGET, "train__tokens": 250})
    assert main(["train", "--quiet", *first]) == 0
    assert main(["train", "--quiet", "--resume", str(tmp_path / "parts" / "run"), "train.tokens=700"]) == 0

    def without_evaluation(name: str) -> list[dict[str, Any]]:
        lines = read_metrics(tmp_path / name / "run")  # the shorter run evaluated at its own end, too
        return [{k: v for k, v in line.items() if not k.startswith("heldout")} for line in lines]

    assert without_evaluation("parts") == without_evaluation("whole")
    lines = read_metrics(tmp_path / "whole" / "run")
    assert lines[-1]["tokens/total"] >= 700 > lines[-2]["tokens/total"]
    evaluated = [line for line in lines if "heldout/pass@3" in line]
    assert {line["heldout/total"] for line in evaluated} == {12}  # four problems, three answers each
    assert all(line["heldout/pass@3"] >= line["heldout/accuracy"] for line in evaluated)


def test_several_answers_are_averaged_within_problems() -> None:
    found = HeldOut(right=[0, 1, 4, 0], samples=4, truncated=0.25, mean_tokens=9.0, rewards={}).metrics()
    assert found["heldout/accuracy"] == 5 / 16
    assert found["heldout/pass@4"] == 2 / 4
    assert found["heldout/low"] < 5 / 16 < found["heldout/high"]
    one = HeldOut(right=[0, 1, 1, 0], samples=1, truncated=0.0, mean_tokens=9.0, rewards={}).metrics()
    assert not any("pass@" in key for key in one)
    assert one["heldout/low"] == pytest.approx(0.15, abs=0.005)  # Wilson's interval for 2 of 4
    assert one["heldout/high"] == pytest.approx(0.85, abs=0.005)


def test_held_out_answers_may_be_longer_than_those_in_training(tmp_path: Path) -> None:
    """The same run with four times the limit in evaluation alone: longer held-out answers, the same training."""
    lines = {}
    for name, more in (("same", {}), ("longer", {"evaluate__max_tokens": 48})):
        (tmp_path / name).mkdir()
        settings = overrides(tmp_path / name, train__steps=2, evaluate__samples=8, **more)
        assert main(["train", "--quiet", *settings]) == 0
        lines[name] = read_metrics(tmp_path / name / "run")
    short, long = lines["same"][0], lines["longer"][0]
    assert long["heldout/tokens"] > 12 >= short["heldout/tokens"]
    assert long["heldout/truncated"] < short["heldout/truncated"]
    assert [line.get("length/max") for line in lines["same"]] == [line.get("length/max") for line in lines["longer"]]
    assert max(line.get("length/max", 0) for line in lines["longer"]) == 12


# The same question under two ids, or twice in a batch: refused, or said in a line.


def arguments(folder: Path, rows: list[dict[str, Any]], **more: Any) -> list[str]:
    task = folder / "rows.jsonl"
    task.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["train", "--quiet", *overrides(folder, task__path=task, train__steps=1, **more)]


def rows_of(folder: Path, *changed: tuple[int, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in save_task(folder / "made.jsonl").read_text().splitlines()]
    for number, change in changed:
        rows[number] |= change
    return rows


def test_a_question_with_two_answers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(tmp_path, (3, {"problem": "What is 0 + 0?"}))
    line = refused(capsys, *arguments(tmp_path, rows))
    assert "row 4: the question of row 1 with another answer ('60', there '0')" in line
    assert not (tmp_path / "run").exists()
    rows = rows_of(tmp_path, (3, {"id": "q0"}))
    assert "row 4: id 'q0' appears twice" in refused(capsys, *arguments(tmp_path, rows))


def test_a_question_under_two_ids_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = rows_of(tmp_path, (6, {"problem": "What is 0 + 0?"}), (11, {"problem": "What is 1 + 1?", "answer": "10"}))
    assert main(arguments(tmp_path, rows)) == 0
    assert "1 training queries repeat the text of another" in caplog.text
    assert "1 held-out problems have the very text of a training query" in caplog.text


def test_a_batch_larger_than_the_task_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(arguments(tmp_path, rows_of(tmp_path), train__queries_per_step=9)) == 0
    assert "train.queries_per_step=9, and there are 8 training queries" in caplog.text
    caplog.clear()
    (tmp_path / "other").mkdir()
    assert main(arguments(tmp_path / "other", rows_of(tmp_path), train__queries_per_step=8)) == 0
    assert "training queries" not in caplog.text
