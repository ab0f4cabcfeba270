"""docs/results.md is what its raw files say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_made_from_its_raw_files() -> None:
    spec = importlib.util.spec_from_file_location("make_results", DOCS / "make_results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "results.md").read_text(encoding="utf-8") == module.page(), "run `make results`"
    for folder in module.folders():
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        assert size < 2_000_000, f"{folder} is too large for a repository"
