"""R³ in a training loop of your own, which samples, judges and updates with whatever you like.

    python examples/own_loop.py

Two calls are R³'s: `algorithm.ask` says what to answer, `algorithm.learn` what to train on. Everything else here is
plain torch and transformers, on the bundled model and its sums: replace it with yours. `nano_r3.py`, beside this file,
shows what happens inside the two calls; `r3 train` is the loop with everything in it.
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import r3
from r3.method.objective import ORIGINS
from r3.tasks.arithmetic import judge, problem_set

MODEL = Path(__file__).parents[1] / "src/r3/embedded/model"
GROUP_SIZE, MAX_TOKENS, QUERIES_PER_STEP = 8, 44, 8
METHOD = r3.MethodSettings(
    name="r3",  # or grpo, dapo, …: `r3 methods` lists them
    reflection={"template": "{question}\nwrong: {attempt}\nretry:", "max_prompt_tokens": 192},
)


@torch.no_grad()
def sample(policy, tokenizer, prompt: r3.Prompt, version: int, step: int) -> list[r3.Sample]:
    """Your engine and your judge: the prompt's answers, each with its log-probs, its entropies and its reward."""
    tokens = torch.tensor(prompt.tokens.tolist())[None]
    count = prompt.answers(GROUP_SIZE)
    output = policy.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=True,
        top_k=0,
        num_return_sequences=count,
        max_new_tokens=MAX_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        return_dict_in_generate=True,
        output_logits=True,
    )
    drawn = output.sequences[:, tokens.shape[1] :]
    logprobs = torch.stack(output.logits, 1).log_softmax(2)  # [answers, length, vocabulary]
    entropies = -(logprobs.exp() * logprobs).sum(2)
    logprobs = logprobs.gather(2, drawn[:, :, None])[:, :, 0]
    samples = []
    for ids, logprob, entropy in zip(drawn, logprobs, entropies, strict=True):
        ended = (ids == tokenizer.eos_token_id).nonzero()
        length = int(ended[0]) + 1 if len(ended) else len(ids)  # the token that ends an answer belongs to it
        text = tokenizer.decode(ids[:length], skip_special_tokens=True)
        right = len(ended) > 0 and judge(prompt.query.answer, text).right
        samples.append(
            r3.Sample(
                query_id=prompt.query.id,
                tokens=ids[:length].numpy(),
                logprobs=logprob[:length].numpy(),
                entropies=entropy[:length].numpy(),  # the ranking rewards look at them
                finish="stop" if len(ended) else "length",
                outcome=right,
                reward=float(right),
                context=prompt.context,  # the plain query, or one with a past failure shown
                policy_version=version,
                step=step,
                epoch=prompt.epoch,
            )
        )
    return samples


def update(policy, optimiser, weighted: Sequence[r3.WeightedSample]) -> None:
    """Your trainer: one optimiser step on the surrogate that the settings ask for (`METHOD.objective`)."""
    for row in weighted:  # losses add up, so a real trainer packs several rows into one forward
        ids = torch.tensor([*row.prompt.tolist(), *row.sample.tokens.tolist()])
        logprobs = policy(ids[None]).logits[0, :-1].log_softmax(1).gather(1, ids[1:, None])[:, 0]
        tokens = r3.TokenBatch(
            sequence_T=torch.zeros(len(row.sample), dtype=torch.long),
            behaviour_T=torch.tensor(row.behaviour_T),
            advantage_T=torch.tensor(row.advantage_T),
            weight_S=torch.tensor([row.weight]),
            origin_S=torch.tensor([ORIGINS.index(row.origin)]),
            other_context_S=torch.tensor([row.recomputed]),
        )
        r3.policy_loss(logprobs[len(row.prompt) - 1 :], tokens, METHOD.objective).loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description="R³ in a loop of your own, on the bundled model and its sums.")
    for name, default in (("seed", 0), ("problems", 16), ("steps", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # tensors are too small to share out
    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    optimiser = torch.optim.AdamW(policy.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.0)
    problems = problem_set(options.seed, options.problems, (3, 4, 5, 6, 7, 8), "train")
    queries = [r3.Query(problem.question, problem.question, problem.answer) for problem in problems]
    rng = random.Random(options.seed)
    order = [
        (query, epoch)
        for epoch in range(1, options.steps * QUERIES_PER_STEP // len(queries) + 2)
        for query in rng.sample(queries, len(queries))
    ]
    with tempfile.TemporaryDirectory() as folder, r3.SampleBuffer(Path(folder) / "samples.sqlite") as buffer:
        algorithm = r3.Algorithm(METHOD, buffer, tokenizer, seed=options.seed)
        for step in range(1, options.steps + 1):
            batch = order[(step - 1) * QUERIES_PER_STEP : step * QUERIES_PER_STEP]
            version = step - 1  # how many updates are behind the policy that answers
            asked = algorithm.ask(batch, step=step)
            groups = [prompt.group(sample(policy, tokenizer, prompt, version, step)) for prompt in asked.prompts]
            result = algorithm.learn(groups, version=version)
            update(policy, optimiser, result.weighted)
            right = fmean(answer.outcome for group in groups for answer in group.samples)
            replayed = sum(row.origin == "replayed" for row in result.weighted)
            print(
                f"step {step}/{options.steps}  right {right:.0%}  reflected {len(asked.reflections)}  "
                f"replayed {replayed}  trained on {len(result.weighted)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
