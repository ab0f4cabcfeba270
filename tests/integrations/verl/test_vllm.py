"""verl's V1 trainer with R³ and the real vLLM, on a CPU: no stand-in (make test-vllm).

Everything is verl's own: FSDP2's worker, vLLM's server in processes of its own, and the weights on their way from one
to the other. Covers r3.integrations.verl.v1.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from r3.buffer import SampleBuffer
from r3.integrations.common import BUFFER_FILE
from r3.samples import Query
from tests.integrations.verl import running
from tests.rollout.vllm.models import save_model
from tests.tokenizing import char_tokenizer

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")
STEPS = 3
ROUNDING = 5e-4
"""Most that float32 makes of the log-prob of a rare token (seen: 1.2e-4 at -8.3); another step's weights make 0.5."""
QUERIES = [Query(f"q{i}", f"What is {i}+{i}?", share) for i, share in enumerate(["0", "30", "70", "100"])]
ROLLOUT = "actor_rollout_ref.rollout"
REAL = {
    f"{ROLLOUT}.agent.default_agent_loop": "single_turn_agent",
    f"{ROLLOUT}.dtype": "float32",
    f"{ROLLOUT}.load_format": "dummy",  # random weights until verl sends the policy's
    f"{ROLLOUT}.free_cache_engine": False,  # vLLM cannot sleep on a CPU
    f"+{ROLLOUT}.enable_sleep_mode": False,
    f"{ROLLOUT}.enforce_eager": True,
    f"{ROLLOUT}.max_num_seqs": 32,
    f"{ROLLOUT}.max_model_len": 224,
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 16,
    f"+{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls": f"{running.HERE}.vllm_cpu.Extension",
    f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes": 1 << 26,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "data.max_response_length": 24,
    **running.ONE_WORKER,
    "trainer.total_training_steps": STEPS,
    "trainer.save_freq": 1,
    "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of three steps, each over all four queries."""
    folder = tmp_path_factory.mktemp("real")
    running.prepare(folder, QUERIES, save_model)
    done = running.run(folder, external="vllm_cpu", **REAL)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder


def test_vllm_draws_from_the_weights_that_the_trainer_sent(real: Path) -> None:
    """vLLM's log-probs at each step are those of the policy that the step before left behind."""
    logged = running.metrics(real)
    assert list(logged) == list(range(1, STEPS + 1))
    assert logged[1]["training/rollout_probs_diff_max"] < ROUNDING  # of the later ones replayed rows are part
    policies = [real / "model", *(real / f"checkpoints/global_step_{n}/actor/huggingface" for n in range(1, STEPS))]
    for number, policy in enumerate(policies, 1):
        assert gap(real, policy, number) < ROUNDING
        if number > 1:
            assert gap(real, policies[number - 2], number) > 1e-3, "the policy learns"


def test_r3_asks_and_learns_from_real_answers(real: Path) -> None:
    logged = running.metrics(real)
    assert logged[1]["r3_method/groups/reflection"] == 0
    for number in range(2, STEPS + 1):  # the first query is never solved, so it is asked again with a failure shown
        assert logged[number]["r3_method/groups/reflection"] == logged[number]["r3_method/reflection/built"] > 0
    for step in logged.values():
        assert all(math.isfinite(value) for value in step.values())
        assert step["r3_method/groups"] == len(QUERIES) + step["r3_method/groups/reflection"]
        assert step["r3_method/groups/failed"] == 0
    with SampleBuffer.open_reader(real / "checkpoints" / BUFFER_FILE) as buffer:
        kept = buffer.find(range(1, 1000)).values()
    answers = sum(step["r3_method/groups"] for step in logged.values()) * 4
    assert len(kept) == answers
    assert len({sample.tokens.tobytes() for sample in kept}) > answers / 2, "answers that were drawn, not one answer"


def gap(folder: Path, policy: Path, step: int) -> float:
    """The largest between vLLM's log-probs of a step's plain answers and those of this policy."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    prompts = {query.id: char_tokenizer().encode(query.prompt) for query in QUERIES}
    with SampleBuffer.open_reader(folder / "checkpoints" / BUFFER_FILE) as buffer:
        kept = [sample for sample in buffer.find(range(1, 1000)).values() if sample.step == step]
    gaps = []
    for sample in (sample for sample in kept if sample.context.kind == "plain"):
        ids_BT = torch.tensor([[*prompts[sample.query_id], *sample.tokens]])
        with torch.no_grad():
            logprobs_TV = model(ids_BT).logits[0].log_softmax(-1)[-len(sample) - 1 : -1]
        expected_T = logprobs_TV.gather(1, ids_BT[0, -len(sample) :, None])[:, 0]
        gaps.append(float((expected_T - torch.tensor(sample.logprobs)).abs().max()))
    return max(gaps)
