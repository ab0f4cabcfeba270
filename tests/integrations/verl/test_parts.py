"""Parts of R³ in verl against verl's real ones: its config, data set, reward workers' calls, plugin loading.

Covers r3.integrations.verl.core, r3.integrations.verl.data, r3.integrations.verl.reward, r3.integrations.common.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.utils.dataset.rl_dataset import RLHFDataset

from r3.algorithm import Prompt
from r3.errors import ConfigError
from r3.integrations.common import BUFFER_FILE, Answer, prune_copies
from r3.integrations.verl import v0
from r3.integrations.verl.__main__ import main
from r3.integrations.verl.core import Batch, Core, Joining, answer_of
from r3.integrations.verl.data import Templated, check_ids, query_of
from r3.integrations.verl.reward import R3RewardManager
from r3.method.reflection import plain_prompt
from r3.samples import Context, Query, Sample
from tests.integrations.verl.running import composed, prepare, taken, verl_config
from tests.tokenizing import char_tokenizer, chat_tokenizer
from tests.train.tiny import ROOT, run_r3

# ---------------------------------------------------------------- data


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    lines = [f'{{"id": "q{i}", "problem": "What is {i}+{i}?", "answer": "{2 * i}"}}' for i in range(6)]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    (tmp_path / "recipe.yaml").write_text("task: {name: file, heldout: 2}\n")
    run_r3("data", "verl", tmp_path / "recipe.yaml", f"task.path={tmp_path / 'sums.jsonl'}", "--to", tmp_path / "data")
    return tmp_path / "data"


def dataset(file: Path, folder: Path) -> RLHFDataset:
    config = OmegaConf.create({"filter_overlong_prompts": False, "cache_dir": str(folder / "cache")})
    return RLHFDataset(str(file), chat_tokenizer(), config)


def test_exported_tasks_are_read_by_verl(exported: Path, tmp_path: Path) -> None:
    train, heldout = (dataset(exported / f"{name}.parquet", tmp_path) for name in ("train", "heldout"))
    assert (len(train), len(heldout)) == (4, 2)
    check_ids(train, "index")
    row = train[1]
    assert (row["index"], row["reward_model"]["ground_truth"]) == ("q1", "2")
    assert not {train[i]["index"] for i in range(4)} & {heldout[i]["index"] for i in range(2)}
    # What verl asks is what r3 train asks, under the same id.
    query = query_of(row["raw_prompt"], row["index"], "index")
    assert query.id == "q1"
    asked = chat_tokenizer().apply_chat_template(row["raw_prompt"], tokenize=False, add_generation_prompt=True)
    assert "What is 1+1?" in asked
    expected = chat_tokenizer().encode(asked, add_special_tokens=False)
    assert plain_prompt(query, Templated(chat_tokenizer(), {})).tolist() == expected


def test_rows_that_would_share_a_history_are_refused(exported: Path, tmp_path: Path) -> None:
    data = dataset(exported / "train.parquet", tmp_path)
    data.dataframe = data.dataframe.map(lambda row: {"extra_info": {**row["extra_info"], "index": "same"}})
    with pytest.raises(ConfigError, match=r"not unique, e\.g\. 'same': .*query_key=prompt"):
        check_ids(data, "index")
    check_ids(data, "prompt")
    data.dataframe = data.dataframe.remove_columns("extra_info")
    with pytest.raises(ConfigError, match=r"have no extra_info\.index"):
        check_ids(data, "index")
    prompts = [data[i]["raw_prompt"] for i in (0, 1, 0)]
    ids = [query_of(prompt, 0, "prompt").id for prompt in prompts]
    assert ids[0] == ids[2] != ids[1]


def test_template_options_reach_reflection_prompts() -> None:
    query = query_of([{"role": "user", "content": "?"}], 1, "index")
    prompt = plain_prompt(query, Templated(chat_tokenizer(), {"chat_template": "no turns"}))
    assert prompt.tolist() == chat_tokenizer().encode("no turns", add_special_tokens=False)


# ---------------------------------------------------------------- rewards


def answer(text: str, *, ended: bool = True, gold: str = "1/2") -> DataProto:
    """One answer as an agent loop hands it to the reward worker."""
    tokens = char_tokenizer().encode(text) + [char_tokenizer().eos_token_id] * ended
    responses = torch.tensor([tokens])
    columns = {"prompts": torch.ones(1, 3, dtype=torch.long), "responses": responses}
    columns["attention_mask"] = torch.ones(1, 3 + len(tokens), dtype=torch.long)
    given = {"data_source": "maths", "reward_model": {"ground_truth": gold}, "extra_info": {"index": "q"}}
    return DataProto(
        batch=TensorDict(columns, batch_size=1),
        non_tensor_batch={name: np.array([value], dtype=object) for name, value in given.items()},
    )


def test_rewards_are_the_papers_with_token_lengths(tmp_path: Path) -> None:
    prepare(tmp_path)
    config = verl_config(tmp_path, "reward.custom_reward_function.path=null", "++r3_method.reward.length_limit=100")

    async def judge() -> list[dict[str, Any]]:
        manager = R3RewardManager(config, char_tokenizer(), None)
        texts = [r"so \boxed{0.5}", r"so \boxed{2}", "no box"]
        try:
            told = [await manager.run_single(answer(text)) for text in texts]
            return [*told, await manager.run_single(answer(texts[0], ended=False))]
        finally:
            manager.verifier.close()

    right, wrong, boxless, cut = asyncio.run(judge())
    assert right["reward_score"] == pytest.approx(1 + 1 - 15 / 100)  # 14 characters and the end
    assert right["reward_extra_info"] == {"acc": 1, "truncated": 0, "reward_correct": 1, "reward_length": 1 - 15 / 100}
    assert [one["reward_score"] for one in (wrong, boxless, cut)] == [0, 0, 0]
    assert [one["reward_extra_info"]["truncated"] for one in (wrong, boxless, cut)] == [0, 0, 1]


def test_an_answers_parts_add_up_to_its_reward(tmp_path: Path) -> None:
    """DAPO's punishment of long answers among them."""
    prepare(tmp_path)
    config = verl_config(tmp_path, "+r3_method.name=dapo", "+r3_method.resample=off", "data.max_response_length=10")

    async def judge() -> dict[str, Any]:
        return await R3RewardManager(config, char_tokenizer(), lambda **_: 1.0).run_single(answer("it is 1.5"))

    told = asyncio.run(judge())
    one = np.ones(1, np.int32)
    rewards = answer_of(one, one, None, told["reward_extra_info"]).rewards
    assert rewards == {"correct": 1.0, "length": 0.0, "overlong": -0.5}
    assert sum(rewards.values()) == told["reward_score"]


@pytest.mark.parametrize("told", [0.7, {"score": 0.7}])
def test_a_judge_of_the_users_own(tmp_path: Path, told: Any) -> None:
    prepare(tmp_path)
    seen: list[dict[str, Any]] = []

    async def judge(right_above: float) -> float:
        config = verl_config(tmp_path, f"+r3_method.right_above={right_above}")
        manager = R3RewardManager(config, char_tokenizer(), lambda **given: seen.append(given) or told)
        return float((await manager.run_single(answer("text", gold="g")))["reward_extra_info"]["acc"])

    assert (asyncio.run(judge(0.5)), asyncio.run(judge(0.8))) == (1.0, 0.0)
    assert {k: seen[0][k] for k in ("solution_str", "ground_truth")} == {"solution_str": "text", "ground_truth": "g"}


# ---------------------------------------------------------------- what the trainer refuses on the way


def given(prompt: list[int]) -> Answer:
    ids = np.asarray(prompt, np.int32)
    return Answer(ids, np.asarray([5], np.int32), np.zeros(1, np.float32), None, False, True, {"correct": 1.0})


def test_a_reflection_prompt_that_verl_cut_stops_the_run() -> None:
    core = Core(composed(), taken(composed()))
    query, shown = Query("q", "?"), Context("reflection", 1)
    plain = Prompt(query, 2, 0, np.array([1, 2]), "?")
    asked = {"plain": plain, "reflecting": Prompt(query, 2, 0, np.array([3, 4, 5]), "??", shown, plain.tokens)}
    answers = {"plain": {"plain_0_0": given([1, 2])}, "reflecting": {"reflecting_0_0": given([3, 4, 5])}}
    core._batch = Batch(2, 1, asked, {})
    core.answered(answers)
    assert [prompt.context.kind for prompt, _ in core.batch.answers] == ["plain", "reflection"]
    asked["reflecting"] = replace(asked["reflecting"], tokens=np.array([2, 3, 4, 5]))
    with pytest.raises(ValueError, match=r"cut a reflection prompt of 4 tokens .* data\.max_prompt_length"):
        core.answered(answers)


def test_answers_of_another_reward_manager_are_refused() -> None:
    with pytest.raises(ValueError, match=r"without reward_correct.* reward\.reward_manager\.name=r3_reward"):
        answer_of(np.ones(1, np.int32), np.ones(1, np.int32), None, {"acc": 1, "truncated": 0})


# ---------------------------------------------------------------- rows in a DataProto


def one_row() -> DataProto:
    """A row of V0's: prompt 7 8 in room for three tokens, answer 9 in room for two."""
    columns = {
        "prompts": [0, 7, 8],
        "responses": [9, 0],
        "input_ids": [0, 7, 8, 9, 0],
        "attention_mask": [0, 1, 1, 1, 0],
        "position_ids": [0, 0, 1, 2, 2],
        "response_mask": [1, 0],
        "rm_scores": [1.0, 0.0],
        "rollout_log_probs": [-0.5, 0.0],
    }
    batch = TensorDict({name: torch.tensor([values]) for name, values in columns.items()}, batch_size=1)
    rows = DataProto(batch=batch, non_tensor_batch={"uid": np.array(["a"], dtype=object)})
    v0.name_rows(rows)
    return rows


def joining(prompt: list[int], tokens: list[int]) -> Joining:
    drawn = np.full(len(tokens), -0.25, np.float32)
    sample = Sample("q", np.asarray(tokens, np.int32), drawn, outcome=True, reward=1.0, reward_parts={"correct": 1.0})
    return Joining("a_4_0", "a_0_0", np.asarray(prompt, np.int32), sample)


def test_a_past_sample_and_an_empty_row_as_a_dataproto_has_them() -> None:
    rows = one_row()
    v0.add_rows(rows, [joining([5], [3, 4])], until=3, end=1)
    assert rows.non_tensor_batch[v0.KEYS].tolist() == ["a_0_0", "a_4_0", ""]
    assert rows.non_tensor_batch["uid"].tolist() == ["a", "a", "empty 0"]
    found = {name: column.tolist() for name, column in rows.batch.items()}
    assert found["input_ids"] == [[0, 7, 8, 9, 0], [0, 0, 5, 3, 4], [0, 0, 1, 1, 0]]
    assert found["attention_mask"] == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 1, 1, 0]]
    assert found["position_ids"][1] == [0, 0, 0, 1, 2]
    assert found["response_mask"] == [[1, 0], [1, 1], [0, 0]]
    assert found["rm_scores"] == [[1, 0], [0, 1], [0, 0]]
    assert found["rollout_log_probs"] == [[-0.5, 0], [-0.25, -0.25], [0, 0]]
    v0.keep(rows, ["a_0_0"])
    assert (len(rows), rows.batch["responses"].tolist()) == (1, [[9, 0]])


def test_rows_that_a_batch_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 tokens .* data\.max_response_length, 2: leave both as they were"):
        v0.add_rows(one_row(), [joining([5], [3, 4, 6])], until=2, end=1)
    rows = one_row()
    rows.batch["routed_experts"] = torch.zeros(1, 5, 1, 1)
    with pytest.raises(ValueError, match=r"no expert routes .*r3_method\.name=r3-no-replay"):
        v0.add_rows(rows, [joining([5], [3])], until=2, end=1)


# ---------------------------------------------------------------- loading, checkpoints


def python(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONWARNINGS": "ignore", **environment}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, cwd=ROOT)


def test_the_check_says_what_verl_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    assert capsys.readouterr().out == "verl 0.9.1 knows r3_sync, r3_mixed_group and r3_reward\n"
    done = python("-m", "r3.integrations.verl", VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode == 1
    assert "unset VERL_USE_EXTERNAL_PLUGINS" in done.stderr


@pytest.mark.parametrize("old", [True, False], ids=["with the class that verl patches", "without it"])
def test_a_trl_that_stops_verls_workers_is_told_of(tmp_path: Path, old: bool) -> None:
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").write_text("class AutoModelForCausalLMWithValueHead: ...\n" if old else "")
    done = python("-m", "r3.integrations.verl", PYTHONPATH=os.pathsep.join([str(tmp_path), *_paths()]))
    assert done.returncode == (0 if old else 1), done.stderr
    assert old or "pip uninstall trl" in done.stderr


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def test_a_plugin_that_does_not_load_shouts() -> None:
    done = python("-c", "import r3.integrations.verl as v; v.TESTED = ('0.1',); import verl; print('went on')")
    assert done.stdout == "went on\n"  # as verl would have it
    assert "its verl plugin did not load, so verl does not know trainer_mode=r3_sync" in done.stderr
    assert "pip install" in done.stderr


def test_copies_go_with_the_checkpoints_that_verl_thins_out(tmp_path: Path) -> None:
    for name in ("global_step_2", "global_step_4"):
        (tmp_path / name / "actor").mkdir(parents=True)
        (tmp_path / name / BUFFER_FILE).touch()
    (tmp_path / "global_step_2" / "actor").rmdir()
    prune_copies(str(tmp_path), "global_step_*", needs="actor")
    assert [path.parent.name for path in tmp_path.glob(f"*/{BUFFER_FILE}")] == ["global_step_4"]
