"""R³ inside TRL on GSM8K, with one GPU: `R3_DATA=… python recipes/trl/gsm8k.py MODEL [--method grpo] [--vllm]`.

MODEL is a Hugging Face folder or hub id with a chat template, e.g. what recipes/sft-gsm8k-smollm2.yaml writes. The
problems, prompts and judge are those of recipes/gsm8k-smollm2.yaml, so that the two trainers can be compared.
"""

from __future__ import annotations

import argparse
from typing import Any

from datasets import Dataset

from r3.config import TaskSettings
from r3.integrations.trl import R3Config, R3Trainer
from r3.tasks import load_task
from r3.verify import MathVerifier


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--method", default="r3", help="a preset of r3's: r3, r3-paper, r3-no-replay, …, or grpo")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/trl-gsm8k")
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM in the same process")
    parser.add_argument("--cpu", action="store_true", help="no GPU: a few steps to see that it runs")
    options = parser.parse_args()

    task = load_task(TaskSettings(name="file", path="gsm8k", rows=(3764, 4020), heldout=128), seed=0)
    data = Dataset.from_list(
        [
            {"id": q.id, "prompt": [{"role": m.role, "content": m.content} for m in q.prompt], "gold": q.answer}
            for q in task.train
        ]
    )
    verifier = MathVerifier()

    def correct(completions: list[list[dict[str, str]]], gold: list[str], **_: Any) -> list[float]:
        cases = [(turns[0]["content"], answer) for turns, answer in zip(completions, gold, strict=True)]
        return [float(verdict.right) for verdict in verifier.verify_many(cases)]

    args = R3Config(
        output_dir=options.out,
        r3_method=options.method,
        r3_id_column="id",
        r3_overrides={"reflection": {"tau": 0.02, "from_epoch": 2, "max_prompt_tokens": 768}, "ranking.centred": True},
        max_steps=options.steps,
        per_device_train_batch_size=64,
        gradient_accumulation_steps=8,  # 512 answers a step: 32 problems, 16 each
        num_generations=16,
        max_completion_length=256,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=not options.cpu,
        use_cpu=options.cpu,
        gradient_checkpointing=False,
        use_vllm=options.vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = R3Trainer(options.model, correct, args, train_dataset=data)
    trainer.train()
    trainer.save_model(options.out)


if __name__ == "__main__":
    main()
