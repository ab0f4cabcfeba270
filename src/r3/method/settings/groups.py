"""What a group is compared by, and which groups a batch has."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from r3.settings import Settings, Switchable


class AdvantageSettings(Settings):
    """Eq. 1 and Eq. 3, and the variants other trainers offer."""

    alpha: float = Field(1.0, gt=0)
    """α of Eq. 3, in groups that hold replayed samples; above 1 it tempers them. 1 is plain standardisation."""
    eps: float = Field(1e-6, ge=0)
    """λ of Eq. 3, added to the scaled standard deviation."""
    scale: Literal["std", "none", "mean", "batch_std"] = "std"
    """Divide by the group's standard deviation (GRPO), by nothing (Dr. GRPO), by the group's mean reward (MaxRL; no
    reward may be negative), or by the standard deviation of the batch's centred rewards (REINFORCE++)."""
    baseline: Literal["mean", "leave_one_out", "sign"] = "mean"
    """Subtract the group's mean (GRPO) or the mean of the other samples (RLOO); or compare nothing: a right answer gets
    `right_weight`, a wrong one −1 (W-REINFORCE; needs scale=none)."""
    homogeneous: Literal["none", "zvp", "lens", "signed"] = "none"
    """What a group gets that is all right or all wrong, and that neither replay nor ranking made comparable. none:
    nothing; zvp: each token an advantage by its entropy (RL-ZVP); lens: wrong answers cost more the surer the policy
    was, in mixed groups too (LENS); signed: as baseline=sign, in these groups alone."""
    zvp_alpha: float = Field(0.1, gt=0)
    """α of RL-ZVP: what a nat of entropy adds to a right token's advantage. Its paper: 0.1 or 0.2; 0.3 is unstable."""
    lens_weight: float = Field(0.25, gt=0)
    """What an all-wrong group weighs with LENS, beside a mixed one."""
    right_weight: float = Field(0.1, ge=0)
    """λ of W-REINFORCE: what a right answer gets, where a wrong one gets −1; 0 learns from wrong answers alone."""
    solve_all: Literal["scaled", "unscaled"] = "scaled"
    """Groups that solved all: divided like the others, so that whatever tells right answers apart (their length) pulls
    as hard as right and wrong do, and a past failure that joins gets −√(fresh/past); or left at the rewards' own size
    (then α does not act in them)."""
    cap: float | None = Field(None, gt=0)
    """Largest absolute advantage. A lone success among n gets √(n−1): a cap keeps one stale sequence from ruling."""


class ResampleSettings(Switchable):
    """Groups without variance leave the batch, and others take their place (DAPO's dynamic sampling, POLARIS)."""

    enabled: bool = False
    """Whether groups without variance are replaced."""
    max_rounds: int = Field(4, ge=1)
    """Most extra rounds of sampling to fill a batch; after that the batch is trained as full as it got."""
    fill: Literal["draw", "copy"] = "draw"
    """What takes their place: groups of further queries (DAPO), or copies of the batch's other groups, which cost no
    tokens (POLARIS)."""
    min_share: float = Field(0.0, ge=0, lt=1)
    """With fill=copy: train only if more than this share of the batch's groups has variance (POLARIS: a third)."""

    @model_validator(mode="after")
    def _share_of_a_batch_that_is_copied(self) -> ResampleSettings:
        if self.fill == "draw" and self.min_share > 0:
            raise ValueError(
                f"resample.min_share={self.min_share:g} is of a batch that is filled with copies, and with "
                "resample.fill=draw others are drawn for it: set resample.fill=copy or leave it out"
            )
        return self
