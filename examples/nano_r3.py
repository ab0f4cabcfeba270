"""R³ in one sitting: the whole method in one file, on the bundled model and its sums, in minutes on a CPU.

R³ (arXiv 2601.19620) is GRPO with three additions for groups of answers that would teach nothing: replay (CCR),
reflection (ISR) and ranking rewards (SERR). Read from top to bottom: sample, judge, reflect, replay, rank, compare,
learn, and last `train_step`, which is Algorithm 1. In `r3.method` every choice is a setting.

Where this departs from the paper, with `r3.method` and the bundled recipe:
- No length bonus: right is 1, wrong is 0. Answers here have at most 44 tokens, of L_max = 32,768.
- SERR's rewards are centred, so that being cut is not better than a complete wrong answer; ties share their ranks.
- A stale answer's ratio is taken to the policy as it is now, and a truncated importance weight corrects for its age.
  Drawn under another prompt, nothing tells how likely it was: the weight is 1.
- Only different texts are replayed, newest first; a failure shown is one of the newest 16; a wrong answer drawn in
  reflection is never replayed. The loss is a mean over queries, to which reflection groups add. No KL penalty.
Where it is simpler than `r3.method`:
- Fewer than k different texts are not filled up with repeated ones. (Nor in `r3 train`, whose buffer returns none.)
- No gate and no dual clip on ratios: the importance weight is bounded above, and a batch makes one update.
- A shown attempt is never shortened: here it always fits. The buffer is a dict and forgets nothing.
"""

import argparse
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from r3.tasks.arithmetic import Problem, judge, problem_set

MODEL = Path(__file__).parents[1] / "src/r3/embedded/model"  # 0.67 M parameters, a token per character
TERMS, HELDOUT = (3, 4, 5, 6, 7, 8), 480  # how long the sums are; how many to evaluate on
GROUP_SIZE, MAX_TOKENS = 8, 44  # G answers per prompt; longer ones are cut
ALPHA, LAMBDA = 1.0, 1e-6  # Eq. 3; α where replayed answers joined
REPLAYED = 2  # CCR: k, how many past answers may join a group
TAU, NEWEST = 0.25, 16  # ISR: a query is hard below this success rate; failures to choose from
REFLECTION = "{question}\nwrong: {attempt}\nretry:"
PEAK_SHARE, R_MAX = 0.2, 0.1  # SERR: p, and how far the rewards spread
CLIP, IMPORTANCE_CAP = 0.2, 2.0  # ε of the surrogate, and C for stale answers
LEARNING_RATE, BETAS, MAX_NORM, MICRO_BATCH = 2e-4, (0.9, 0.95), 1.0, 64


@dataclass
class Answer:  # what the policy wrote, and what it thought meanwhile: L tokens, the stop token included
    prompt: list[int]  # that it was drawn under; answers drawn together under one prompt are a group
    tokens: list[int]  # [L]
    logprobs: list[float]  # [L] log π(token) when it was drawn
    entropies: list[float]  # [L] H_t of the distribution it was drawn from
    truncated: bool
    query: str = ""
    reflected: bool = False  # drawn under a reflection prompt
    right: bool = False


@dataclass
class Row:  # a sequence to train on, each of whose answer tokens weighs `weight` · `advantage` in the loss
    prompt: list[int]
    answer: Answer
    advantage: float
    weight: float
    replayed: bool


# Sample and judge. B prompts of up to P tokens, R = B·G rows, V words in the vocabulary, T tokens so far.
@torch.no_grad()
def generate(policy, prompts: list[list[int]], group_size: int, stop: int) -> list[list[Answer]]:
    """`group_size` answers to each prompt at temperature 1, with the log-prob and the entropy of every token."""
    width = max(map(len, prompts))
    tokens_BP = torch.tensor([[stop] * (width - len(p)) + p for p in prompts])  # padded on the left: all end together
    mask_BP = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    output = policy(tokens_BP, attention_mask=mask_BP, position_ids=(mask_BP.cumsum(1) - 1).clamp(min=0))
    cache = output.past_key_values
    cache.batch_repeat_interleave(group_size)  # a prompt is read once for its whole group
    logits_RV, mask_RT = (x.repeat_interleave(group_size, 0) for x in (output.logits[:, -1], mask_BP))
    columns, ended_R1 = [], torch.zeros(len(mask_RT), 1, dtype=torch.bool)
    while len(columns) < MAX_TOKENS and not ended_R1.all():  # rows that ended go on until all have: cut off below
        logprobs_RV = logits_RV.log_softmax(1)
        token_R1 = torch.multinomial(logprobs_RV.exp(), 1)
        entropy_R1 = -(logprobs_RV.exp() * logprobs_RV).sum(1, keepdim=True)
        columns.append(torch.stack([token_R1, logprobs_RV.gather(1, token_R1), entropy_R1]))
        ended_R1 |= token_R1 == stop
        mask_RT = torch.cat([mask_RT, torch.ones_like(token_R1)], 1)
        position_R1 = mask_RT.sum(1, keepdim=True) - 1
        output = policy(token_R1, attention_mask=mask_RT, position_ids=position_R1, past_key_values=cache)
        logits_RV = output.logits[:, -1]
    answers = []
    for row, (tokens, logprobs, entropies) in enumerate(torch.cat(columns, 2).transpose(0, 1).tolist()):
        ids = [int(token) for token in tokens[: tokens.index(stop) + 1 if stop in tokens else MAX_TOKENS]]
        drawn = logprobs[: len(ids)], entropies[: len(ids)]
        answers.append(Answer(prompts[row // group_size], ids, *drawn, truncated=stop not in tokens))
    return [answers[first : first + group_size] for first in range(0, len(answers), group_size)]


def ask(policy, tokenizer, asked: list[tuple[Problem, str]], reflected: bool = False, group_size: int = GROUP_SIZE):
    """A judged group for each problem in these words. A truncated answer cannot be verified: it counts as wrong."""
    prompts = [tokenizer.encode(words) for _, words in asked]
    groups = generate(policy, prompts, group_size, tokenizer.eos_token_id) if prompts else []
    for (problem, _), group in zip(asked, groups, strict=True):
        for answer in group:
            text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
            answer.right = not answer.truncated and judge(problem.answer, text).right
            answer.query, answer.reflected = problem.question, reflected
    return groups


# The three additions. `past` holds a query's answers from the sample buffer S, oldest first.
def reflect(question: str, past: list[Answer], epoch: int, tokenizer) -> str | None:
    """ISR: query ⊕ past wrong answer ⊕ guidance, from epoch 2 on, where the query's mean past outcome is below τ."""
    outcomes = [answer.right for answer in past if not answer.reflected]  # help says nothing about the query
    if epoch == 1 or not outcomes or fmean(outcomes) >= TAU:
        return None
    shown = random.choice([answer for answer in past if not answer.right][-NEWEST:])
    attempt = tokenizer.decode(shown.tokens, skip_special_tokens=True).strip()
    return REFLECTION.format(question=question, attempt=attempt)


def replay(group: list[Answer], past: list[Answer]) -> list[Answer]:
    """CCR: up to k past answers of the opposite outcome, G_C, for a plain group that is all right or all wrong."""
    outcomes = {answer.right for answer in group}
    if group[0].reflected or len(outcomes) == 2:
        return []
    wanted, different = outcomes == {False}, {}
    for answer in reversed(past):  # cross-context: a success may come from reflection, a failure may not
        if answer.right == wanted and (wanted or not answer.reflected):
            different.setdefault(tuple(answer.tokens), answer)
    return list(different.values())[:REPLAYED]


def ranking_rewards(group: list[Answer]) -> list[float]:
    """SERR: R_max · (1 − rank/(N−1)), less its mean, for the N truncated answers of a group without a right one."""
    rewards, cut = [0.0] * len(group), [i for i, answer in enumerate(group) if answer.truncated]
    if len(cut) < 2 or any(answer.right for answer in group):
        return rewards
    structure = []
    for i in cut:
        entropies = sorted(group[i].entropies, reverse=True)
        structure.append((fmean(entropies[: max(1, int(PEAK_SHARE * len(entropies)))]), fmean(entropies)))
    # i ≻ j iff peak_i > peak_j and global_i < global_j; an answer's score is how many others it dominates
    scores = [sum(p > q and m < n for q, n in structure) for p, m in structure]
    for i, score in zip(cut, scores, strict=True):
        rank = sum(other > score for other in scores) + (scores.count(score) - 1) / 2  # tied ones share their ranks
        rewards[i] = R_MAX * (0.5 - rank / (len(cut) - 1))
    return rewards


# Compare and learn. S sequences of up to T tokens; N answer tokens of all of them, one sequence after the other.
def advantages(rewards: list[float], alpha: float = 1.0) -> list[float]:
    """Eq. 3: A_i = (R_i − mean(G_mix)) / (α · std(G_mix) + λ). With α = 1 it is Eq. 1, GRPO's."""
    mean, spread = fmean(rewards), pstdev(rewards)
    return [(reward - mean) / (alpha * spread + LAMBDA) for reward in rewards]


def compare(group: list[Answer], past: list[Answer], queries: int) -> list[Row]:
    """SERR, then G_mix = G ∪ G_C (CCR), then Eq. 3; and what a token weighs in a loss that is a mean over `queries`."""
    joined = replay(group, past)
    members = group + joined
    ranking = ranking_rewards(group) + [0.0] * len(joined)
    rewards = [answer.right + extra for answer, extra in zip(members, ranking, strict=True)]
    weights = [1 / (queries * len(members) * len(answer.tokens)) for answer in members]
    compared = zip(members, advantages(rewards, ALPHA if joined else 1.0), weights, strict=True)
    return [Row(group[0].prompt, *facts, replayed=i >= len(group)) for i, facts in enumerate(compared)]


def answer_logprobs(policy, rows: list[Row]) -> torch.Tensor:
    """log π of the rows' answer tokens under the policy as it is now, with gradient. [N]"""
    sequences = [torch.tensor(row.prompt + row.answer.tokens) for row in rows]
    tokens_ST = pad_sequence(sequences, batch_first=True)  # padded on the right, where no token looks
    logprobs_ST1 = policy(tokens_ST).logits[:, :-1].log_softmax(2).gather(2, tokens_ST[:, 1:, None])
    ends = [(len(row.prompt) - 1, len(row.prompt) + len(row.answer.tokens) - 1) for row in rows]
    return torch.cat([logprobs_T1[start:end, 0] for logprobs_T1, (start, end) in zip(logprobs_ST1, ends, strict=True)])


def surrogate(logprobs_N: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """The clipped surrogate as a loss: −Σ weight · w · min(r·A, clip(r, 1−ε, 1+ε)·A). Micro-batches add up.

    r = π/π_old and w = min(π_old/π_behaviour, C). Fresh answers: π_old = π_behaviour, so w = 1, as in GRPO.
    """
    behaviour_N = torch.tensor([logprob for row in rows for logprob in row.answer.logprobs])
    facts = [(r.advantage, r.weight, r.replayed, r.answer.prompt != r.prompt) for r in rows for _ in r.answer.tokens]
    advantage_N, weight_N, replayed_N, moved_N = torch.tensor(facts).T
    stale_N, moved_N = (replayed_N + moved_N) > 0, moved_N > 0
    old_N = torch.where(stale_N, logprobs_N.detach(), behaviour_N)
    importance_N = (old_N - behaviour_N).exp().clamp(max=IMPORTANCE_CAP).masked_fill(moved_N, 1.0)
    ratio_N = (logprobs_N - old_N).exp()
    gain_N = torch.minimum(ratio_N * advantage_N, ratio_N.clamp(1 - CLIP, 1 + CLIP) * advantage_N)
    return -(weight_N * importance_N * gain_N).sum()


def update(policy, optimiser, rows: list[Row]) -> None:
    """One step of AdamW. Rows with advantage 0 have no gradient: left out, they still count in the others' weights."""
    rows = sorted((row for row in rows if row.advantage), key=lambda row: len(row.prompt) + len(row.answer.tokens))
    for some in (rows[first : first + MICRO_BATCH] for first in range(0, len(rows), MICRO_BATCH)):
        surrogate(answer_logprobs(policy, some), some).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM)
    optimiser.step()
    optimiser.zero_grad()


def train_step(policy, optimiser, tokenizer, buffer: dict[str, list[Answer]], problems: list[Problem], epoch: int):
    """Algorithm 1: one batch D_b, from questions to an updated policy. Says how often each part acted."""
    groups = ask(policy, tokenizer, [(p, p.question) for p in problems])
    hard = [(p, words) for p in problems if (words := reflect(p.question, buffer[p.question], epoch, tokenizer))]
    groups += ask(policy, tokenizer, hard, reflected=True)
    rows = [row for group in groups for row in compare(group, buffer[group[0].query], len(problems))]
    update(policy, optimiser, rows)
    for group in groups:
        buffer[group[0].query] += group  # S ← S ∪ D_b's answers
    right = fmean(answer.right for group in groups[: len(problems)] for answer in group)
    replayed, ranked = sum(row.replayed for row in rows), sum(any(ranking_rewards(group)) for group in groups)
    return f"right {right:.0%}  replayed {replayed}  reflected {len(hard)}  ranked {ranked}"


def accuracy(policy, tokenizer, problems: list[Problem]) -> float:
    """Share of right answers, one per problem."""
    return fmean(group[0].right for group in ask(policy, tokenizer, [(p, p.question) for p in problems], group_size=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="R³ in one file, on the bundled model and its sums.")
    for name, default in (("seed", 0), ("problems", 256), ("queries", 32), ("steps", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, help="folder to save the trained policy in")
    options = parser.parse_args()
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # tensors are so small that handing parts of them to other cores costs more than it saves
    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    optimiser = torch.optim.AdamW(policy.parameters(), LEARNING_RATE, betas=BETAS, weight_decay=0.0)
    heldout = problem_set(0, HELDOUT, TERMS, "heldout")
    problems = problem_set(options.seed, options.problems, TERMS, "train")
    buffer: dict[str, list[Answer]] = defaultdict(list)  # S: every answer so far, by query
    print(f"held-out accuracy before training: {accuracy(policy, tokenizer, heldout):.1%}")
    epochs = options.steps * options.queries // len(problems) + 1
    order = [problem for _ in range(epochs) for problem in random.sample(problems, len(problems))]
    for step in range(options.steps):
        first = step * options.queries
        epoch, batch = first // len(problems) + 1, order[first : first + options.queries]
        counts = train_step(policy, optimiser, tokenizer, buffer, batch, epoch)
        print(f"step {step + 1}/{options.steps}  epoch {epoch}  {counts}", flush=True)
    print(f"held-out accuracy after training: {accuracy(policy, tokenizer, heldout):.1%}")
    if options.out:
        policy.save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
