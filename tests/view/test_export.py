"""One file, opened from disk in a browser without a network, shows the pages of the run."""

from __future__ import annotations

import re
from pathlib import Path

from r3.view.export import joined_scripts, spread
from r3.view.server import static_files
from tests.train.tiny import run_r3
from tests.view.browser import Page, browser, page, visit

__all__ = ["browser", "page"]


def test_an_export_opens_from_disk_and_asks_nobody(finished: Path, tmp_path: Path, page: Page) -> None:
    target = tmp_path / "report.html"
    said = run_r3("view", finished, "--export", target, "--steps", "4").stdout
    assert said.startswith(f"{target}: ")
    assert "4 steps" in said
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    url = target.as_uri()
    visit(page, url)
    assert page.locator(".grid").first.locator("canvas").count() == 17
    assert "exported report" in page.locator(".status").inner_text()
    for address in ("steps/6", "group/6/0/1", "queries", "buffer"):
        visit(page, url, f"#/0/{address}")
        assert "cannot be shown" not in page.inner_text("main")
    visit(page, url, "#/0/queries")
    page.locator("tr[data-row] a").first.click()
    page.wait_for_selector("[data-page=query] .chart")
    visit(page, url, "#/0/steps/6")
    page.locator("input.search").fill("q1")
    page.wait_for_function("() => document.querySelectorAll('tr[data-row]').length < 4")
    visit(page, url, "#/0/group/2/0")  # not among the four steps
    assert "not in the exported report" in page.inner_text("main")
    assert {address.split("#")[0] for address in asked} == {url}
    page_alone = re.sub(r'<script type="application/json".*?</script>', "", target.read_text(), flags=re.DOTALL)
    assert "http://" not in page_alone.replace("http://www.w3.org", "")


def test_an_export_of_no_steps_still_has_the_curves(finished: Path, tmp_path: Path, page: Page) -> None:
    target = tmp_path / "report.html"
    run_r3("view", finished, finished.parent / "run", "--export", target, "--steps", "0")
    visit(page, target.as_uri())
    assert page.locator(".run").count() == 2


def test_the_modules_can_be_joined() -> None:
    """No module is left out, and no `import` survives."""
    files = static_files()
    script = joined_scripts(files)
    assert "\nimport " not in script
    assert "\nexport " not in script
    names = re.findall(r"^(?:async )?(?:const|let|function|class) (\w+)", script, re.MULTILINE)
    assert sorted(names) == sorted(set(names))  # joined, all modules share one scope
    for name, source in files.items():
        if name.endswith(".js") and not name.startswith("vendor/"):
            assert source.decode().splitlines()[0] in script, name
            assert len(source.splitlines()) < 400, name


def test_steps_are_spread_evenly() -> None:
    assert spread(range(10, 20), 1) == [19]
    assert spread(range(10, 20), 0) == []
    assert spread([], 5) == []
    assert spread(range(1000), 3)[0::2] == [0, 999]
