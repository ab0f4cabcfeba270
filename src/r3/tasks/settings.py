"""Where the queries come from and who judges the answers: one class of settings per family of tasks.

`task.name` says which family; an option of another family is refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from r3.settings import Settings
from r3.tasks.task import INSTRUCTION, Prompting

Split = Literal["train", "warm"]


RESERVED = ("length", "overlong", "ranking")
"""Names of what the method itself may add to a reward."""
GIVEN = "given"
"""In place of a function's path: it was given to `r3.train` as an object, under the reward's name."""


class RewardFunction(Settings):
    """One function of a reward (docs/rewards.md)."""

    function: str
    """The dotted path of a function f(completions, **columns) → list of float or None, as in TRL, or f(completion,
    **columns) → float or None; or a built-in one: correct (the task's own judge), boxed, think."""
    name: str = ""
    """What it is logged as, reward/NAME; the last part of its path, unless given."""
    weight: float = 1.0
    """What its score is multiplied with in the reward."""
    truncated: Literal["skip", "judge"] = "skip"
    """Whether answers that the length limit cut are scored too; none of them is right either way."""
    caged: bool = False
    """Run it in killable worker processes with a time and a memory limit; where it fails there, it counts 0."""

    @model_validator(mode="before")
    @classmethod
    def _a_path_is_enough(cls, given: Any) -> Any:
        return {"function": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _its_name_is_free(self) -> RewardFunction:
        if self.called in RESERVED or not self.called:
            raise ValueError(f"the name {self.called!r} is taken by another part of the reward; give it a name")
        return self

    @property
    def called(self) -> str:
        """The name, given or not."""
        return self.name or self.function.rpartition(".")[2]


class TaskSettings(Settings):
    """What every family of tasks has."""

    name: str
    """Which family of tasks."""
    heldout: int = Field(512, ge=0, le=1_000_000)
    """How many problems are kept apart for evaluation."""
    pass_rates_from: str | None = None
    """The directory of an r3 train on the same problems ({seed} is filled in); one step with large groups is enough.
    Only problems with a pass rate there from min_pass_rate to max_pass_rate are trained on."""
    min_pass_rate: float = Field(0.0, ge=0, le=1)
    """With pass_rates_from: leave out problems that were solved less often than this; above 0, those never solved."""
    max_pass_rate: float = Field(1.0, ge=0, le=1)
    """With pass_rates_from: leave out problems that were solved more often than this."""
    retries_from: str | None = None
    """r3 sft: the directory of an r3 train on the same problems. Where it answered wrongly, learn the reflection prompt
    that shows the answer too, so that the model can do something with a failure in its context."""

    rewards: list[RewardFunction] = Field(default_factory=list, max_length=100)
    """Functions that an answer's reward is the weighted sum of, in place of the method's own reward for right or wrong;
    a function alone, or a list of {function, name, weight, truncated, caged} (docs/rewards.md)."""
    outcome: str | None = None
    """The name of the reward that says right or wrong, where there are several."""
    right_above: float = 0.5
    """The score of the outcome above which an answer is right."""
    functions_in: list[str] = Field(default_factory=list, max_length=100)
    """Folders that functions named in this section are imported from, besides Python's own path; unless given, the
    recipe's folder and the current one."""

    @property
    def asks_the_judge(self) -> bool:
        """Whether one of several rewards is the verdict of the task's own judge."""
        return any(reward.function == "correct" for reward in self.rewards)

    @property
    def decides(self) -> RewardFunction | None:
        """The reward that says right or wrong, if rewards do."""
        return next(
            (reward for reward in self.rewards if reward.called == (self.outcome or self.rewards[0].called)), None
        )

    @property
    def own_functions(self) -> list[str]:
        """The dotted paths of the user's functions that this section names."""
        return [reward.function for reward in self.rewards if "." in reward.function]

    @field_validator("rewards", mode="before")
    @classmethod
    def _one_is_a_list(cls, given: Any) -> Any:
        return [given] if isinstance(given, str | Mapping) else given

    @model_validator(mode="after")
    def _one_reward_is_the_outcome(self) -> TaskSettings:
        names = [reward.called for reward in self.rewards]
        if not names and (self.outcome is not None or self.right_above != 0.5):
            raise ValueError("outcome and right_above are for task.rewards, and there are none")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two rewards are called {twice!r}: give each a name of its own")
        if len(names) > 1 and self.outcome is None:
            raise ValueError(
                f"outcome is needed with several rewards: name the one that says right or wrong ({', '.join(names)})"
            )
        if names and self.outcome is not None and self.outcome not in names:
            raise ValueError(f"outcome={self.outcome!r} is none of the rewards ({', '.join(names)})")
        decides = self.decides
        if decides is not None and decides.function == "correct" and self.right_above != 0.5:
            raise ValueError(
                f"right_above={self.right_above:g} is for an outcome that is a score, and correct says right or "
                "wrong itself: leave it out, or make a function the outcome"
            )
        return self

    @model_validator(mode="after")
    def _pass_rates_have_a_source(self) -> TaskSettings:
        if self.pass_rates_from is None and (self.min_pass_rate, self.max_pass_rate) != (0.0, 1.0):
            raise ValueError("min_pass_rate and max_pass_rate need pass_rates_from, the run that measured them")
        if self.min_pass_rate > self.max_pass_rate:
            raise ValueError(f"min_pass_rate={self.min_pass_rate:g} is above max_pass_rate={self.max_pass_rate:g}")
        return self


class ArithmeticSettings(TaskSettings):
    """Chains of sums with written working, for the embedded model."""

    name: Literal["arithmetic"] = "arithmetic"
    """Which family: arithmetic (for the embedded model), graded-arithmetic (for any chat model), reasoning-gym (puzzles
    of many families; needs r3-rl[reasoning-gym]), file (your own data, or a maths set by name), code (Python judged by
    running it) or code-tiny (little programs over a list, for a tiny model)."""
    difficulty: list[Annotated[int, Field(ge=1, le=1000)]] = Field(
        default_factory=lambda: [3, 4, 5, 6, 7, 8], max_length=1000
    )
    """How many terms the sums have."""
    size: int = Field(256, ge=1, le=1_000_000)
    """How many training problems."""


class PromptedSettings(TaskSettings):
    """Tasks whose question can be put as a chat, with an instruction behind it."""

    chat: bool = True
    """Put the question through the tokenizer's chat template."""
    system: str = ""
    """The system prompt of every chat that brings none of its own."""
    template: str = ""
    """What is made of the question: text in which {question} and {any column} are filled in; empty: the question."""
    instruction: str | None = None
    """Appended to every question. Unless given: to think and to put the answer into a box, where a box is judged."""
    chat_options: dict[str, Any] = Field(default_factory=dict)
    """What the chat template gets besides the turns, e.g. {enable_thinking: false}."""

    @property
    def boxed(self) -> bool:
        """Whether the task's judge looks for a box."""
        return True

    @property
    def prompting(self) -> Prompting:
        """How a question becomes a prompt."""
        unless_given = INSTRUCTION if self.boxed else ""
        instruction = unless_given if self.instruction is None else self.instruction
        return Prompting(self.chat, instruction, self.system, self.template, self.chat_options)

    @field_validator("chat_options")
    @classmethod
    def _options_are_the_templates(cls, given: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(given.keys() & {"conversation", "tokenize", "add_generation_prompt", "chat_template"}):
            raise ValueError(f"{', '.join(taken)}: set by r3 itself; give the options that the template knows")
        return given

    @model_validator(mode="after")
    def _a_system_prompt_is_for_chats(self) -> PromptedSettings:
        if not self.chat and (self.system or self.chat_options):
            raise ValueError("system and chat_options are for chats, and chat=false: put the text into template")
        return self


class GradedArithmeticSettings(PromptedSettings):
    """Chains of sums for any chat model, graded by their number of terms."""

    name: Literal["graded-arithmetic"]
    """Which family."""
    difficulty: list[Annotated[int, Field(ge=1, le=1000)]] = Field(
        default_factory=lambda: [3, 4, 5, 6, 7, 8], max_length=1000
    )
    """How many terms the sums have."""
    size: int = Field(256, ge=1, le=1_000_000)
    """How many training problems."""
    split: Split = "train"
    """Which problems to train on; 'warm' are others, for a supervised warm start."""


class ReasoningGymSettings(PromptedSettings):
    """Puzzles of a hundred families with their own scorers (needs r3-rl[reasoning-gym])."""

    name: Literal["reasoning-gym"]
    """Which family of tasks."""
    family: str
    """The family of puzzles, e.g. letter_counting, number_sorting, knights_knaves."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The puzzles' own settings, e.g. {n_people: 2}."""
    size: int = Field(256, ge=1, le=1_000_000)
    """How many training problems."""
    split: Split = "train"
    """Which problems to train on; 'warm' are others, for a supervised warm start."""


class RowSettings(PromptedSettings):
    """Tasks whose rows may hold what some methods show or train on, in columns of any name (docs/methods.md)."""

    demonstration_column: str | None = None
    """Column of a right answer in full, as a model would write it; luffy trains on it."""
    hint_column: str | None = None
    """Column of a hint, or of a list of hints from the vaguest to the plainest; sage and scaf-grpo show them."""
    feedback_column: str | None = None
    """Column of what a critic says of wrong answers to the problem; critique shows it in place of the verdict."""


class FileSettings(RowSettings):
    """Your own data, or a maths set by name."""

    name: Literal["file"]
    """Which family of tasks."""
    path: str
    """A JSONL, JSON, CSV or Parquet file; the name of a set in the folder R3_DATA (deepscaler, math, gsm8k); or a data
    set of the Hugging Face hub, as hf:owner/name or hf:owner/name@split (needs r3-rl[datasets])."""
    heldout_path: str | None = None
    """The evaluation data, likewise; without it the last `heldout` rows of `path` are kept apart."""
    rows: tuple[int, int] | None = None
    """Only the rows of `path` from the first number (from 0) up to the second, e.g. to warm-start on some and
    reinforce on others."""
    id_column: str = "id"
    """Column of the stable query id; where it is missing the id is a hash of the question."""
    question_column: str = "problem"
    """Column of the question."""
    answer_column: str = "answer"
    """Column of the reference answer."""
    min_difficulty: float | None = None
    """Leave out problems whose column `difficulty` is below this (deepscaler: 0 to 100)."""
    max_difficulty: float | None = None
    """Leave out problems whose column `difficulty` is above this."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Leave out training problems whose prompt is longer than this."""
    verifier: str = "math"
    """'math' judges the last \\boxed{} symbolically, 'boxed' as text; or the dotted path of your own function
    f(completion, **columns) → float or bool (right above 0.5)."""
    caged: bool = False
    """Run your own function in killable worker processes with a time and a memory limit."""

    @model_validator(mode="after")
    def _the_judge_is_asked(self) -> FileSettings:
        if self.rewards and self.verifier != "math" and not self.asks_the_judge:
            raise ValueError(
                f"verifier={self.verifier} would not be asked, since rewards judge in its place: add correct to "
                "task.rewards, which is its verdict, or leave verifier out"
            )
        if self.caged and ("." not in self.verifier or (self.rewards and not self.asks_the_judge)):
            raise ValueError(
                "caged=true is for a function of your own in task.verifier, and there is none; for rewards, set caged: "
                "true for each of them in task.rewards"
            )
        return self

    @property
    def own_functions(self) -> list[str]:
        return [*super().own_functions, *([self.verifier] if "." in self.verifier else [])]

    @property
    def boxed(self) -> bool:
        by_box = self.needs_answers and self.verifier in ("math", "boxed")
        return by_box or any(reward.function == "boxed" for reward in self.rewards)

    @property
    def needs_answers(self) -> bool:
        """Whether every row must have a reference answer: not where the user's rewards alone judge."""
        return not self.rewards or self.asks_the_judge


class SandboxedSettings(TaskSettings):
    """Tasks whose answers are code, judged by running it behind walls (docs/code.md)."""

    sandbox: Literal["auto", "namespaces", "landlock", "none"] = "auto"
    """What keeps answers' code from the machine: auto takes namespaces or else Landlock, and refuses to run where
    there is neither; none runs it unguarded, as this user."""
    workers: int = Field(2, ge=1)
    """How many answers are run at a time."""
    seconds: float = Field(5.0, gt=0)
    """CPU time for an answer and all its tests, or for one run of a program; three times as much by the clock."""
    memory_mb: int = Field(512, ge=128)
    """Memory that an answer may take."""
    graded: bool = False
    """Run all of a wrong answer's tests, and reward it with the share that passes. It stays wrong to the method."""


class CodeSettings(RowSettings, SandboxedSettings):
    """Python functions and programs, judged by tests."""

    name: Literal["code"]
    """Which family of tasks."""
    path: str
    """mbpp (the training and validation sets of MBPP, in the folder R3_DATA), or a file with columns problem and tests
    (and optionally id, setup and entry_point)."""
    heldout_path: str | None = None
    """The evaluation data, likewise; without it the last `heldout` rows of a file are kept apart."""
    instruction: str | None = "Write the whole function in one block of Python code."
    """Appended to every question."""

    @property
    def boxed(self) -> bool:
        return False

    max_prompt_tokens: int | None = Field(None, ge=1)
    """Leave out training problems whose prompt is longer than this."""


class TinyCodeSettings(SandboxedSettings):
    """Little programs over a list, for a model with a token per character."""

    name: Literal["code-tiny"]
    """Which family of tasks."""
    difficulty: list[int] = Field(default_factory=lambda: [3, 4])
    """How many steps the programs have."""
    size: int = Field(256, ge=1, le=1_000_000)
    """How many training problems."""
    split: Split = "train"
    """Which problems to train on; 'warm' are others, for a supervised warm start."""


FAMILIES: Mapping[str, type[TaskSettings]] = {
    "arithmetic": ArithmeticSettings,
    "graded-arithmetic": GradedArithmeticSettings,
    "reasoning-gym": ReasoningGymSettings,
    "file": FileSettings,
    "code": CodeSettings,
    "code-tiny": TinyCodeSettings,
}


def _family(given: Any) -> str:
    name = given.get("name", "arithmetic") if isinstance(given, dict) else getattr(given, "name", given)
    return str(name)


AnyTaskSettings = Annotated[
    Annotated[ArithmeticSettings, Tag("arithmetic")]
    | Annotated[GradedArithmeticSettings, Tag("graded-arithmetic")]
    | Annotated[ReasoningGymSettings, Tag("reasoning-gym")]
    | Annotated[FileSettings, Tag("file")]
    | Annotated[CodeSettings, Tag("code")]
    | Annotated[TinyCodeSettings, Tag("code-tiny")],
    Discriminator(_family),
]


def of_its_family(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those that the family they name does not have: another family was named over a recipe's."""
    family = FAMILIES.get(_family(given))
    return {key: value for key, value in given.items() if family is None or key in family.model_fields}
