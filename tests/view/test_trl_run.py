"""A run of TRL's trainer with R³ in `r3 view`: its folder opens like one of r3's own.

Covers r3.integrations.common.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

pytest.importorskip("trl", reason="needs TRL: pip install 'r3-rl[trl]'")

from r3.run import RunFiles
from tests.integrations.trl_tiny import logged, losses, make
from tests.view.browser import Page, browser, page, visit
from tests.view.conftest import Serve

__all__ = ["browser", "page"]
pytestmark = pytest.mark.filterwarnings("default")


def lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_of_trl_opens_in_the_viewer(tmp_path: Path, serve: Serve, page: Page) -> None:
    trainer = make(tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    run = tmp_path / "out" / "r3_run"
    steps = lines(run)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["update/loss"] for line in steps] == pytest.approx(losses(trainer))
    assert [line["groups/plain"] for line in steps] == logged(trainer, "r3/groups/plain")
    reflected = next(
        (step, i, about)
        for step in RunFiles(run).rollouts.steps()
        for i, about in enumerate(RunFiles(run).rollouts.contents(step).summaries)  # type: ignore[union-attr]
        if about["context"] == "reflection"
    )
    url = serve(tmp_path / "out")
    visit(page, url)
    assert "finished · step 6 of 6" in page.locator(".status").inner_text()
    assert page.locator("#problems p").count() == 0
    assert page.locator(".chart", has_text="Loss").locator("canvas").count() == 1
    step, number, about = reflected
    visit(page, url, f"#/0/group/{step}/{number}/0")
    assert f"attempt #{about['shown']}" in page.inner_text("main")
    visit(page, url, "#/0/buffer")
    assert page.locator(".tile").first.inner_text().startswith("samples")
    visit(page, url, "#/0/settings")
    assert page.locator("tr.changed[data-key='trl.num_generations']").count() == 1
    assert page.locator("tr.changed[data-key='method.ranking.peak_fraction']").count() == 1
    # Going on from the second step takes the record back with it.
    resumed = make(tmp_path, save_strategy="steps", save_steps=2, num_train_epochs=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    again = lines(run)
    assert [line["step"] for line in again] == list(range(1, 9))
    assert [line["reward"] for line in again[:6]] == pytest.approx([line["reward"] for line in steps])


def test_a_new_run_in_the_folder_begins_a_new_record(tmp_path: Path) -> None:
    make(tmp_path, max_steps=2).train()
    make(tmp_path, max_steps=1, r3_rollouts_every=0).train()
    run = tmp_path / "out" / "r3_run"
    assert [line["step"] for line in lines(run)] == [1]
    assert RunFiles(run).rollouts.steps() == []
    assert yaml.safe_load((run / "config.yaml").read_text())["trl"]["r3_rollouts_every"] == 0
