"""`R3Trainer` on a card, in bfloat16: all three mechanisms, and finite losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card"),
    pytest.mark.filterwarnings("default"),  # the libraries' own deprecations are theirs
]


def test_r3_trainer_trains_on_a_card(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs TRL: pip install 'r3-rl[trl]'")
    from tests.integrations.trl_tiny import logged, losses, make

    trainer = make(tmp_path, use_cpu=False, bf16=True)
    trainer.train()
    assert next(trainer.model.parameters()).is_cuda
    assert len(losses(trainer)) == 6
    assert torch.isfinite(torch.tensor(losses(trainer))).all()
    for name in ("r3/replay/samples", "r3/groups/reflection", "r3/ranking/samples"):
        assert sum(logged(trainer, name)) > 0, name
