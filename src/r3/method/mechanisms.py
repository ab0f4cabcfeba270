"""The settings of the mechanisms: R³'s three (replay, reflection, ranking); what is shown to a policy, or joins its
answers, that it could not find (demonstrations, hints, critiques); self-distillation.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from r3.settings import Switchable

# --------------------------------------------- R³: replay, reflection, ranking


class ReplaySettings(Switchable):
    """CCR: past samples of the opposite outcome join a homogeneous group; or any past samples any group."""

    when: Literal["homogeneous", "solve_none", "always", "revisited"] = "homogeneous"
    """Which groups: homogeneous ones, with what they lack; solve-none ones alone, with successes; all (RePO, RLEP),
    with successes and, unless `failures` is false, failures; or the same for those alone that `revisit` asks before
    their turn (ExGRPO)."""
    mode: Literal["join", "replace"] = "join"
    """Past samples join the fresh ones, or take the place of the last of them, which then are not trained on."""
    baseline: Literal["joint", "split"] = "joint"
    """Fresh and past samples are compared with each other (Eq. 3), or each with their like alone (RePO)."""
    min_history: int = Field(1, ge=1)
    """Nothing is replayed before a query has this many fitting samples (RePO: 16)."""
    k: int = Field(2, ge=1)
    """Most past samples that join a group. Few, so that the fresh samples keep the say on their own baseline."""
    max_age: int | None = Field(None, ge=0)
    """Oldest sample that may join, in optimiser updates since it was drawn; None for any."""
    order: Literal["newest", "random", "lowest_entropy", "highest_reward", "max_variance"] = "newest"
    """Which candidates first: the newest (closest to the current policy), a seeded draw, those written with the lowest
    mean entropy, those with the highest reward, or the k whose rewards vary most (half right, half wrong)."""
    candidates: int = Field(8, ge=1)
    """How many of a query's newest fitting samples to read from the buffer and choose k from."""
    distinct: bool = True
    """Different texts first; false takes them as they come, one easy success again and again if need be."""
    max_repeats: int | None = Field(None, ge=1)
    """An answer joins at most this many times, counted by its text over the whole run; None for any number."""
    ratio: Literal["drawn", "first_replayed"] = "drawn"
    """What the ratio of a sample that was drawn under another prompt is taken to. drawn: nobody knows how likely it was
    under this one, so the policy of the step stands in, the ratio is 1 at each replay, and nothing bounds how far its
    repetition pulls. first_replayed: its log-probs at the first replay are kept, and later ones are clipped, corrected
    and gated against them."""
    failures: bool = True
    """Past failures join solve-all groups; false leaves those alone, and only solve-none ones get their successes.
    With when=always or revisited: past failures join like past successes."""

    @model_validator(mode="after")
    def _past_samples_can_be_compared(self) -> ReplaySettings:
        if self.enabled and self.baseline == "split" and (self.when != "always" or not self.failures):
            raise ValueError(
                "replay.baseline=split compares past samples with each other, and they would all be alike: "
                "set replay.when=always and replay.failures=true, or replay.baseline=joint"
            )
        if self.enabled and self.min_history > self.candidates:
            raise ValueError(
                f"replay.min_history={self.min_history} is more than the {self.candidates} samples that are read: "
                "raise replay.candidates"
            )
        return self


DEFAULT_GUIDANCE = (
    "The attempt above is wrong. Find where it goes wrong, then solve the problem again from the start "
    "and give the corrected final answer."
)
DEFAULT_CUT_GUIDANCE = (
    "The attempt above was cut off before it came to an answer. Solve the problem again from the start, come to the "
    "point sooner, and give the final answer."
)
DEFAULT_TEMPLATE = "{question}\n\nA previous attempt at this problem:\n\n{attempt}\n\n{guidance}\n\n{instruction}"


class ReflectionSettings(Switchable):
    """ISR: hard queries get, beside the plain prompt, one that shows a past failure."""

    tau: float = Field(0.25, ge=0, le=1)
    """τ: a query is hard if its mean past outcome is below this."""
    from_epoch: int = Field(2, ge=1)
    """First epoch with reflection prompts; the buffer is empty in the first."""
    window: int | None = Field(None, ge=1)
    """How many of a query's newest plain answers (whole steps) say whether it is hard. None: all of them, as in the
    paper, which keeps asking for reflection long after the policy has learnt a query."""
    when: Literal["hard", "unsolved"] = "hard"
    """Reflect on every hard query (the paper), or on those alone that were never solved yet: the others have a success
    to replay, which costs nothing."""
    at_once: bool = False
    """A right reflection answer joins its query's plain group in the same step, where that solved none; else replay
    finds it in the buffer when the query is met again, as in the paper."""
    budget: Literal["extra", "shared"] = "extra"
    """A hard query's reflection group costs another G answers (the paper), or shares the query's own G: half of them
    plain, half with the failure shown."""
    max_share: float = Field(1.0, gt=0, le=1)
    """At most this share of a step's answers goes to reflection prompts."""
    min_lift: float = Field(0.0, ge=0)
    """Pause unless reflection answers are right at least this many times as often as plain answers to the same queries
    in the same steps, over the last `lift_window` of them; 0: never pause, as in the paper."""
    lift_window: int = Field(128, ge=1)
    """Over how many of the newest reflection answers lift is measured; nothing is paused before there are that many."""
    probe_every: int = Field(8, ge=1)
    """Steps between two queries that are reflected on while paused, to notice when reflection begins to pay."""
    give_up_after: int | None = Field(None, ge=1)
    """Leave a query alone after this many reflection answers, none of them right; None: never, as in the paper."""
    candidates: int = Field(16, ge=1)
    """The shown failure is drawn from this many of the newest ones: the errors that the policy still makes."""
    train_as: Literal["reflection", "plain", "both"] = "reflection"
    """Prompt to train a reflection answer under: its own, the plain query's, or both at half weight each."""
    max_prompt_tokens: int = Field(4096, ge=1)
    """Budget of a reflection prompt; the shown attempt is shortened in its middle to fit, the question never."""
    template: str = DEFAULT_TEMPLATE
    """The reflection prompt: {question}, {attempt} and, where they stand, {guidance}, {feedback} and {instruction} are
    filled in. The feedback is what the verifier said of the attempt, such as the test that it failed; the instruction
    is what the question ends with (task.instruction), asked for once more."""
    guidance: str = DEFAULT_GUIDANCE
    """What the model is told to do about the shown attempt."""
    cut_guidance: str = DEFAULT_CUT_GUIDANCE
    """The same for an attempt that the length limit cut: nobody knows whether it was on a wrong way."""
    show: Literal["all", "answer"] = "all"
    """How much of the attempt is shown: all of it, or only what follows its thought (behind the last </think>). An
    attempt that was cut within its thought is shown as it is."""
    cut_marker: str = "\n[…]\n"
    """Stands where the middle of a long attempt was cut."""

    @model_validator(mode="after")
    def _template_has_places(self) -> ReflectionSettings:
        for place in ("{question}", "{attempt}"):
            if self.template.count(place) != 1:
                raise ValueError(f"the reflection template must contain {place} exactly once")
        return self


class RankingSettings(Switchable):
    """SERR: truncated answers of a solve-none group are ranked by the structure of their entropy."""

    peak_fraction: float = Field(0.2, gt=0, le=1)
    """p: share of a response's tokens, the most undecided ones, whose mean entropy is its peak entropy."""
    max_reward: float = Field(0.1, ge=0, lt=1)
    """R_max, the best-ranked sample's reward; below any right answer's (1), small since entropy can be gamed."""
    scope: Literal["truncated", "failed"] = "truncated"
    """Rank the truncated answers (the paper's method section) or every failed one (its abstract's wording)."""
    centred: bool = False
    """Pay the rewards less their mean, so that being cut is not in itself better than a complete wrong answer."""
    standardised: bool = True
    """Divide a group that has ranking rewards alone by its standard deviation too (Eq. 1), which makes them as large as
    a right answer's whatever R_max is; false leaves them at their own size."""
    alone: bool = True
    """Train on a batch in which nothing but ranking rewards teaches. Adam divides by the gradient's own size, so that
    such a batch moves the weights as far as one with right answers; false makes no update of it."""
    anneal_updates: int | None = Field(None, ge=1)
    """R_max falls linearly to 0 over this many optimiser updates: exploration is paid for early on; None: it stays."""
    gate: bool = False
    """Pay only while the order of cut answers is seen to tell which of them would have finished right: answers that
    went on are cut in hindsight, at half the length limit. Before there are `auc_window` pairs nothing is paid."""
    min_auc: float = Field(0.5, ge=0, lt=1)
    """The gate opens where the AUC of the order, less twice its standard error, is above this; 0.5 is chance."""
    auc_window: int = Field(256, ge=2)
    """Over how many of the newest pairs of a right and a wrong answer the AUC is measured (whole steps)."""
    limit: int | None = Field(None, ge=2)
    """The length limit that the gate halves; None: rollout.max_tokens."""


# ---------------------------------------------------------------- outside help

CritiqueSource = Literal["verdict", "gold", "column"]


class DemonstrationSettings(Switchable):
    """A right answer from the data joins the group of its query, as if drawn with probability 1 (LUFFY)."""

    enabled: bool = False
    """Whether demonstrations join; each query has its own (task.demonstration_column, or what a made task writes)."""
    when: Literal["always", "solve_none"] = "always"
    """Which groups: all of them (the paper), or those alone that solved none."""
    trusted: bool = False
    """Take demonstrations for right. false: the task's judge decides, and one that it finds wrong does not join."""
    max_tokens: int | None = Field(None, ge=1)
    """A demonstration of more tokens does not join; None: rollout.max_tokens."""


class HintSettings(Switchable):
    """A query whose group solved none is asked again with a hint, a plainer one if need be (SAGE)."""

    enabled: bool = False
    """Whether failed queries are asked again, which costs a whole group for each hint that is tried."""
    levels: int | None = Field(None, ge=1)
    """Most hints of a query that are tried in one step, from the vaguest on; None: all that it has."""
    from_step: int = Field(1, ge=1)
    """The first step with hints (Scaf-GRPO: 50, once plain training has had its turn)."""
    template: str = "{question}\n\nA hint:\n\n{hint}\n\n{instruction}"
    """The prompt: {question}, {hint} and, where it stands, {instruction} are filled in."""
    max_prompt_tokens: int = Field(4096, ge=1)
    """Budget of a hinted prompt; one that is longer is not asked, and the hints behind it neither."""

    @model_validator(mode="after")
    def _template_has_places(self) -> HintSettings:
        for place in ("{question}", "{hint}"):
            if self.template.count(place) != 1:
                raise ValueError(f"hint.template must contain {place} exactly once")
        return self


_ATTEMPT = "{question}\n\nAn attempt at this problem:\n\n{attempt}\n\n"
_AGAIN = "Find the mistake, then solve the problem again from the start.\n\n{instruction}"
CRITIQUES: dict[CritiqueSource, str] = {
    "verdict": _ATTEMPT + "The attempt is wrong. What a check said of it: {feedback}. " + _AGAIN,
    "gold": _ATTEMPT + "The attempt is wrong. The right answer is {feedback}. " + _AGAIN,
    "column": _ATTEMPT + "What a critic says of it:\n\n{feedback}\n\n" + _AGAIN,
}


class CritiqueSettings(Switchable):
    """A failure is shown with what was said of it, and a right refinement joins the plain group (Critique-GRPO)."""

    enabled: bool = False
    """Whether failures are refined in the step that they were made in, which costs an answer each."""
    feedback: CritiqueSource = "gold"
    """What is said of a failure: the verifier's word, the right answer, or the data's own (task.feedback_column)."""
    when: Literal["solve_none", "failures"] = "solve_none"
    """Refine the answers of groups that solved none (the paper's text), or wrong ones of every group (its code)."""
    attempts: int | None = Field(None, ge=1)
    """Most failures of a group that are refined, the first ones; None: all of them."""
    joins: int = Field(1, ge=1)
    """Most right refinements that join a group, the first ones."""
    template: str | None = None
    """The prompt: {question}, {attempt}, {feedback} and, where it stands, {instruction} are filled in; null: one that
    fits the source of the feedback."""
    max_prompt_tokens: int = Field(4096, ge=1)
    """Budget of the prompt; the failure is shortened in its middle to fit, the question never."""
    cut_marker: str = "\n[…]\n"
    """Stands where the middle of a long failure was cut."""

    @property
    def wording(self) -> str:
        """The template, given or of its own."""
        return CRITIQUES[self.feedback] if self.template is None else self.template

    @model_validator(mode="after")
    def _template_has_places(self) -> CritiqueSettings:
        for place in ("{question}", "{attempt}"):
            if self.wording.count(place) != 1:
                raise ValueError(f"critique.template must contain {place} exactly once")
        if self.feedback != "verdict" and "{feedback}" not in self.wording:  # that it is wrong the template may say
            raise ValueError(
                f"critique.feedback={self.feedback} is not shown: critique.template must contain {{feedback}}"
            )
        return self


# ----------------------------------------------------------- self-distillation

TEMPLATE = (
    "{question}\n\nA correct solution of this problem:\n\n{attempt}\n\nSolve the problem yourself.\n\n{instruction}"
)
FEEDBACK = (
    "{question}\n\nWhat a check said of an earlier attempt at this problem:\n\n{attempt}\n\nSolve the problem yourself."
    "\n\n{instruction}"
)


class DistillSettings(Switchable):
    """Self-distillation: the policy that sees a right answer teaches itself without, token by token (SDPO)."""

    enabled: bool = False
    """Whether the teacher is asked, which costs one more forward pass for each answer that is taught."""
    weight: float = Field(1.0, gt=0, le=1)
    """Share of the teacher in an answer's advantage; the rest is the method's own. 1: the teacher alone (SDPO)."""
    clip: float | None = Field(None, gt=0)
    """Largest absolute log T − log S of a token; None for no bound."""
    history: bool = True
    """Show a past success from the buffer where the group has no other one."""
    feedback: bool = True
    """Show what the verifier said (a failing test, say) where no success is known."""
    show: Literal["all", "answer"] = "all"
    """How much of a success is shown: all of it, or only what follows its thought (behind the last </think>)."""
    template: str = TEMPLATE
    """The teacher's prompt: {question}, {attempt} (the success) and, where it stands, {instruction} are filled in."""
    feedback_template: str = FEEDBACK
    """The same where the verifier's word is shown, in the place of {attempt}."""
    max_prompt_tokens: int = Field(4096, ge=1)
    """Budget of the teacher's prompt; what is shown is shortened in its middle to fit, the question never."""

    @model_validator(mode="after")
    def _templates_have_places(self) -> DistillSettings:
        for name in ("template", "feedback_template"):
            for place in ("{question}", "{attempt}"):
                if getattr(self, name).count(place) != 1:
                    raise ValueError(f"distill.{name} must contain {place} exactly once")
        return self
