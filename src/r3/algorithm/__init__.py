"""Algorithm 1 without a model: what to ask, and what to learn from the answers.

    asked  = algorithm.ask(batch, step=…)            a batch D_b: plain prompts, and reflection prompts of hard queries
    groups = [prompt.group(samples) for prompt …]    whoever generates answers every prompt G times and judges them
    result = algorithm.learn(groups, version=…)      replay, ranking, Eq. 3; what was answered joins the buffer S
    ...                                              train on result.weighted: prompt, tokens, advantage, weight

Our own loop and the trainers inside TRL and verl all go through these two calls, so that the order of Algorithm 1, and
what each of its lines reads from the buffer, is written down here and nowhere else.
"""

from __future__ import annotations

from r3.algorithm.algorithm import Algorithm
from r3.algorithm.prompts import Asked, Prompt, seed_of

__all__ = ["Algorithm", "Asked", "Prompt", "seed_of"]
