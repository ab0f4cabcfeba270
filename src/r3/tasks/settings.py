"""Where the queries come from and who judges the answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from r3.settings import Settings


class TaskSettings(Settings):
    """Where the queries come from and who judges the answers."""

    name: Literal["arithmetic", "graded-arithmetic", "reasoning-gym", "file"] = "arithmetic"
    """'arithmetic' is for the embedded model, 'graded-arithmetic' the like for any chat model; 'reasoning-gym' has
    puzzles of many families (needs r3-rl[reasoning-gym]); 'file' reads a file of yours or a maths set by name."""
    difficulty: list[Annotated[int, Field(ge=1, le=1000)]] = Field(
        default_factory=lambda: [3, 4, 5, 6, 7, 8], max_length=1000
    )
    """arithmetic, graded-arithmetic: how many terms the sums have."""
    size: int = Field(256, ge=1, le=1_000_000)
    """Made tasks (all but file): how many training problems."""
    split: Literal["train", "warm"] = "train"
    """graded-arithmetic, reasoning-gym: which problems to train on; 'warm' are others, for a supervised warm start."""
    family: str | None = None
    """reasoning-gym: the family of puzzles, e.g. letter_counting, number_sorting, knights_knaves."""
    options: dict[str, Any] = Field(default_factory=dict)
    """reasoning-gym: the family's own settings, e.g. {n_people: 2}."""
    path: str | None = None
    """file: a JSONL, JSON or Parquet file; the name of a set in the folder R3_DATA (deepscaler, math, gsm8k); or a
    data set of the Hugging Face hub, as hf:owner/name or hf:owner/name@split (needs r3-rl[datasets])."""
    heldout_path: str | None = None
    """file: the evaluation data, likewise; without it the last `heldout` rows of `path` are kept apart."""
    rows: tuple[int, int] | None = None
    """file: only the rows of `path` from the first number (from 0) up to the second, e.g. to warm-start on some and
    reinforce on others."""
    retries_from: str | None = None
    """r3 sft: the directory of an r3 train on the same problems. Where it answered wrongly, learn the reflection prompt
    that shows the answer too, so that the model can do something with a failure in its context."""
    pass_rates_from: str | None = None
    """The directory of an r3 train on the same problems ({seed} is filled in); one step with large groups is enough.
    Only problems with a pass rate there from min_pass_rate to max_pass_rate are trained on."""
    min_pass_rate: float = Field(0.0, ge=0, le=1)
    """With pass_rates_from: leave out problems that were solved more seldom than this; above 0, those never solved."""
    max_pass_rate: float = Field(1.0, ge=0, le=1)
    """With pass_rates_from: leave out problems that were solved more often than this."""
    heldout: int = Field(512, ge=0, le=1_000_000)
    """How many problems are kept apart for evaluation."""
    id_column: str = "id"
    """file: column of the stable query id; where it is missing the id is a hash of the question."""
    question_column: str = "problem"
    """file: column of the question."""
    answer_column: str = "answer"
    """file: column of the reference answer."""
    instruction: str = "Let's think step by step and output the final answer within \\boxed{}."
    """Appended to every question (not for arithmetic)."""
    min_difficulty: float | None = None
    """file: leave out problems whose column `difficulty` is below this (deepscaler: 0 to 100)."""
    max_difficulty: float | None = None
    """file: leave out problems whose column `difficulty` is above this."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """file: leave out training problems whose prompt is longer than this."""
    verifier: str = "math"
    """file: 'math' judges the last \\boxed{} symbolically, 'boxed' as text; or the dotted path of your own function
    f(completion, **columns) → float or bool (right above 0.5)."""
    caged: bool = False
    """file: run your own function in killable worker processes with a time and a memory limit."""
    chat: bool = True
    """Put the question through the tokenizer's chat template (not for arithmetic)."""

    @model_validator(mode="after")
    def _pass_rates_have_a_source(self) -> TaskSettings:
        if self.pass_rates_from is None and (self.min_pass_rate, self.max_pass_rate) != (0.0, 1.0):
            raise ValueError("min_pass_rate and max_pass_rate need pass_rates_from, the run that measured them")
        if self.min_pass_rate > self.max_pass_rate:
            raise ValueError(f"min_pass_rate={self.min_pass_rate:g} is above max_pass_rate={self.max_pass_rate:g}")
        return self
