"""A tiny real run of `R3Trainer`, in this process or as a script: `python -m tests.integrations.trl_tiny`."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset

from r3.integrations.trl import R3Config, R3Trainer
from r3.integrations.trl.grpo import query_of
from tests.tokenizing import char_tokenizer
from tests.train.tiny import judge, save_model

OVERRIDES: dict[str, Any] = {
    "reflection": {"max_prompt_tokens": 200, "template": "{question} NOT {attempt} BUT ", "cut_marker": "..."},
    "ranking.peak_fraction": 0.25,
}


def correct(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Right or wrong by the first character, with odds that differ between questions."""
    return [float(judge(completion, share)) for completion, share in zip(completions, answer, strict=True)]


def questions(count: int = 8, *, times: int = 1) -> Dataset:
    """Questions that are solved never, rarely, often or always, in turn; each so many times in a row."""
    shares = ["0", "10", "90", "100"]
    rows = [{"prompt": f"What is {i}+{i}?", "answer": shares[i % 4]} for i in range(count)]
    return Dataset.from_list([row for row in rows for _ in range(times)])


def query_id(row: dict[str, Any]) -> str:
    return query_of(row, None).id


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """The arguments of a run of six steps, three epochs, of four questions answered four times."""
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 12,
        "num_train_epochs": 3,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 3,
        **more,
    }


def make(
    folder: Path,
    trainer: Any = R3Trainer,
    config: Any = R3Config,
    *,
    peft_config: Any = None,
    data: Dataset | None = None,
    **more: Any,
) -> Any:
    model = folder / "model"
    if not model.exists():
        save_model(model)
    if issubclass(config, R3Config):
        more = {"r3_method": "r3-paper", "r3_overrides": OVERRIDES, **more}
    tokenizer = copy.deepcopy(char_tokenizer())  # other tests share the original
    tokenizer.pad_token = tokenizer.eos_token
    return trainer(
        str(model),
        correct,
        config(**settings(folder, **more)),
        train_dataset=questions() if data is None else data,
        processing_class=tokenizer,
        peft_config=peft_config,
    )


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


if __name__ == "__main__":  # several runs one after the other: importing takes longer than training
    home, histories = Path(sys.argv[1]), []
    for more, resume in json.loads(sys.argv[2]):
        made = make(home, **more)
        made.train(resume_from_checkpoint=resume)
        histories.append(made.state.log_history)
    if made.accelerator.is_main_process:
        (home / "histories.json").write_text(json.dumps(histories))
