"""What is checked of a run of verl's, whichever of its trainers it was in."""

from __future__ import annotations

import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from r3.buffer import SampleBuffer
from r3.method.mixed import StepResult
from r3.method.objective import ORIGINS, TokenBatch, policy_loss
from r3.method.settings import ObjectiveSettings
from tests.integrations import contract
from tests.integrations.verl import running


def updates(folder: Path) -> dict[int, dict[int, dict[str, Any]]]:
    """The mini-batches of each step, those of both workers together."""
    found: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for path in sorted(folder.glob("update-*.pkl")):
        step, number, _ = map(int, path.stem.split("-")[1:])
        part = pickle.loads(path.read_bytes())
        one = found[step].setdefault(number, {**part, "rows": []})
        one["rows"] += part["rows"]
    return found


def samples(path: Path) -> list[tuple[Any, ...]]:
    """All samples of a buffer by id, as comparable values."""
    with SampleBuffer.open_reader(path) as buffer:
        found = [one for _, one in sorted(buffer.find(range(1, 1000)).items())]
    return [
        (s.id, s.query_id, s.tokens.tobytes(), s.logprobs.tobytes(), s.outcome, s.step, s.reward, s.context.kind)
        for s in found
    ]


def moved(folder: Path) -> float:
    """How far the weights went from the first to the last that the server got."""
    first, last = (torch.load(folder / f"weights-{number}.pt") for number in (0, 7))
    return max(float((last[key] - first[key]).abs().max()) for key in first)


def check_number_of_updates(folder: Path, expected: int) -> None:
    """It stays though the batch grows."""
    grown = 0
    for parts in updates(folder).values():
        assert len(parts) == expected
        sizes = {part["mini_batch_size"] for part in parts.values()}
        assert [len(part["rows"]) for part in parts.values()] == [*sizes] * expected
        grown += min(sizes) > contract.BATCH * contract.GROUP // expected
    assert grown > 0


def check_members(folder: Path) -> None:
    """Every member of a mixed group is trained once."""
    for number, parts in updates(folder).items():
        trained = [
            (row["prompts"], row["responses"])
            for part in parts.values()
            for row in part["rows"]
            if any(row["advantages"]) and any(row["response_mask"])
        ]
        for weighted in running.steps(folder)[number].weighted:
            key = (weighted.prompt.tolist(), weighted.sample.tokens.tolist())
            if key in trained:
                trained.remove(key)
            else:
                assert weighted.origin == "replayed"  # gated to silence, token by token
        assert not trained


def check_log_probs(folder: Path) -> None:
    """The log-probs that verl's sharded workers had for every row, by a plain model with the weights they sent off."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    sent = {number: torch.load(folder / f"weights-{number}.pt") for number in range(8)}
    for number, parts in updates(folder).items():
        model.load_state_dict(sent[number - 1])
        for row in (row for part in parts.values() for row in part["rows"]):
            ids, length = torch.tensor([row["prompts"] + row["responses"]]), len(row["responses"])
            with torch.no_grad():
                log_TV = model(ids).logits[0].log_softmax(-1)[-length - 1 : -1]
            expected = log_TV.gather(1, ids[0, -length:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(row["old_log_probs"]), expected, rtol=0, atol=1e-4)


def methods_loss(result: StepResult, rows: list[dict[str, Any]]) -> float:
    """The same by r3's objective, from what was decided and the log-probs that verl computed."""
    proximal = {(tuple(r["prompts"]), tuple(r["responses"])): torch.tensor(r["old_log_probs"]) for r in rows}
    weighted = result.weighted
    old = [proximal[tuple(w.prompt.tolist()), tuple(w.sample.tokens.tolist())] for w in weighted]
    drawn = [
        torch.tensor(w.sample.logprobs) if w.origin == "replayed" else old[i] for i, w in enumerate(weighted)
    ]  # π_prox is π_behave for fresh samples; verl has its own correction for its engines' differences
    batch = TokenBatch(
        sequence_T=torch.cat([torch.full((len(o),), i) for i, o in enumerate(old)]),
        behaviour_T=torch.cat(drawn),
        advantage_T=torch.cat([torch.from_numpy(w.advantage_T) for w in weighted]),
        weight_S=torch.tensor([w.weight for w in weighted]),
        origin_S=torch.tensor([ORIGINS.index(w.origin) for w in weighted]),
        other_context_S=torch.tensor([w.other_context for w in weighted]),
        proximal_T=torch.cat(old),
    )
    return float(policy_loss(torch.cat(old), batch, ObjectiveSettings()).loss)
