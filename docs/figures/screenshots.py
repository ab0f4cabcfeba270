"""Make the pictures of docs/view.md: `python docs/figures/screenshots.py RUN_DIR [RUN_DIR …] PROBE_DIR`.

The first run and the probe give every page, all runs the comparison. It starts `r3 view` on the runs, opens each page
in Debian's Chromium (or the one that CHROMIUM names) and writes view-*.png beside this script.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
SHOWN = {"overview", "steps", "sample", "reflection", "query", "probe"}
"""These pages, in light colours, are in the docs; another OUT gets all, dark ones and a phone's too."""
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 780}


def main() -> None:
    """Write all pictures into HERE, or into the folder that the environment variable OUT names."""
    out, runs, probe = Path(os.environ.get("OUT", HERE)), sys.argv[1:-1], sys.argv[-1]
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        with serving([runs[0], probe]) as url:
            for name, scheme, size in (("", "light", DESKTOP), ("-dark", "dark", DESKTOP), ("-phone", "light", PHONE)):
                page = browser.new_page(viewport=size, color_scheme=scheme)
                for title, address in addresses(page, url).items():
                    if out == HERE and f"{title}{name}" not in SHOWN:
                        continue
                    picture(page, url, address, out / f"view-{title}{name}.png")
                page.close()
        with serving(runs) as url:
            page = browser.new_page(viewport=DESKTOP, color_scheme="light")
            picture(page, url, "#/0/overview", out / "view-compare.png", smoothing=0.8)
        browser.close()


def picture(page: Page, url: str, address: str, target: Path, smoothing: float = 0.0) -> None:
    """One picture, in few colours: a page of text and lines needs no more, and a third of the bytes."""
    size = page.viewport_size or DESKTOP
    page.set_viewport_size({**size, "height": 1000 if "/group/" in address and size["width"] > 1000 else 800})
    open_page(page, url, address)
    if smoothing:
        page.locator("#smoothing").fill(str(smoothing))
    if "/group/" in address:
        page.locator(".tok").nth(page.locator(".tok").count() // 2).hover()
    page.screenshot(path=target)
    Image.open(target).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(target, optimize=True)


@contextmanager
def serving(runs: list[str]) -> Iterator[str]:
    """`r3 view` over the runs; gives its address."""
    command = [sys.executable, "-m", "r3", "view", *runs, "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()


def open_page(page: Page, url: str, address: str) -> None:
    """Open an address and wait until its page is there and at rest."""
    page.goto(url + address)
    page.wait_for_function("a => document.getElementById('main').dataset.ready === a", arg=address)
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def addresses(page: Page, url: str) -> dict[str, str]:
    """Pages worth a picture: with groups that R³ did something to, found by asking the server."""
    saved = ask(page, url, "steps?run=0")["steps"]
    groups = [(step, i, group) for step in saved for i, group in enumerate(table(page, url, step))]
    ranked = [(s, i, g) for s, i, g in groups if sum(paid is not None for paid in g["ranking"]) > 2]
    step, number, group = next((found for found in ranked if len(found[2]["outcomes"]) > found[2]["fresh"]), ranked[0])
    best = max((paid, i) for i, paid in enumerate(group["ranking"]) if paid is not None)[1]
    solved = next((s, i, g["outcomes"]) for s, i, g in groups if g["context"] == "reflection" and any(g["outcomes"]))
    replayed = [(s, i, g) for s, i, g in groups if len(g["outcomes"]) > g["fresh"]]
    query = replayed[-1][2]["query"]
    return {
        "overview": "#/0/overview",
        "steps": f"#/0/steps/{replayed[len(replayed) // 2][0]}",
        "sample": f"#/0/group/{step}/{number}/{best}",
        "reflection": f"#/0/group/{solved[0]}/{solved[1]}/{solved[2].index(True)}",
        "query": f"#/0/query/{page.evaluate('encodeURIComponent', query)}",
        "queries": "#/0/queries",
        "buffer": "#/0/buffer",
        "settings": "#/0/settings",
        "probe": "#/0/probe",
    }


def table(page: Page, url: str, step: int) -> list[dict[str, Any]]:
    answer = ask(page, url, f"step?run=0&step={step}")
    return [group for group, kept in zip(answer["groups"], answer["kept"], strict=True) if kept]


def ask(page: Page, url: str, question: str) -> Any:
    return page.request.get(f"{url}api/{question}").json()


if __name__ == "__main__":
    main()
