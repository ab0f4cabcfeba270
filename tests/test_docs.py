"""What the troubleshooting page names is there: settings are settings, metrics are metrics of a real run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from r3.cli import main
from r3.config import Config
from r3.config_text import all_keys
from tests.train.tiny import overrides

PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("run")
    assert main(["train", "--quiet", *overrides(folder, method__reflection__give_up_after=4)]) == 0
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {key for line in lines for key in line}


def test_settings_and_metrics_of_the_troubleshooting_page_exist(metrics: set[str]) -> None:
    named = re.findall(r"`([a-z_]+(?:[./][a-z_]+)+)(?:=[^`]*)?`", PAGE.read_text())
    settings = {name for name in named if "/" not in name} - {"metrics.jsonl"}
    assert settings
    assert settings <= set(all_keys(Config))
    counts = {name for name in named if "/" in name}
    # Counted only once they happen: a run this small need not meet every reason.
    seldom = {"replay/too_old", "reflection/too_long", "reflection/given_up"}
    assert counts - seldom <= metrics
