"""`R3Trainer` on conversations, the form of most data sets: prompts go through the chat template, reflections too.

Covers r3.integrations.trl.dataset.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs TRL: pip install 'r3-rl[trl]'")
from datasets import Dataset

from r3.integrations.trl import R3Config, R3Trainer
from tests.integrations.trl_tiny import OVERRIDES, logged, settings
from tests.tokenizing import char_tokenizer
from tests.train.tiny import judge, save_model

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own deprecations are theirs

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def correct(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    return [float(judge(turns[0]["content"], share)) for turns, share in zip(completions, answer, strict=True)]


def test_reflection_prompts_are_conversations_too(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(char_tokenizer())
    tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, tokenizer.eos_token
    system = {"role": "system", "content": "Be brief."}
    turns = [[system, {"role": "user", "content": f"What is {i}+{i}?"}] for i in range(8)]
    rows = [{"prompt": turn, "answer": share} for turn, share in zip(turns, ["0", "10", "90", "100"] * 2, strict=True)]
    args = R3Config(**settings(tmp_path, r3_overrides=OVERRIDES))
    trainer = R3Trainer(
        str(save_model(tmp_path / "model")),
        correct,
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    asked: list[tuple[str, str]] = []

    class Watch(type(trainer)):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            asked.extend((m.group.context.kind, tokenizer.decode(m.group.prompt)) for m in self.r3_step.groups)
            return batch

    trainer.__class__ = Watch
    trainer.train()
    assert sum(logged(trainer, "r3/replay/samples")) > 0
    plain = {text for kind, text in asked if kind == "plain"}
    assert plain == {f"[system]Be brief.\n[user]What is {i}+{i}?\n[assistant]" for i in range(8)}
    reflections = [text for kind, text in asked if kind == "reflection"]
    assert reflections
    for text in reflections:
        before, shown = text.split(" NOT ")
        assert before.startswith("[system]Be brief.\n[user]What is ")
        assert shown.endswith(" BUT \n[assistant]")
