"""Draw the figures of the README and of docs/view.md beside this script.

    python docs/figures/make.py demo RUN_DIR
    python docs/figures/make.py view RUN_DIR [RUN_DIR …] PROBE_DIR

demo: demo.svg from a run's metrics. Held-out accuracy would need an evaluation at every step, so the curve is the
accuracy on the training questions, as sampled; the two points with intervals are the held-out accuracy before and
after.

view: view-*.png. The first run and the probe give every page, all runs the comparison. It starts `r3 view` on the runs
and opens each page in Debian's Chromium (or the one that CHROMIUM names).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

HERE = Path(__file__).parent
WIDTH, HEIGHT, LEFT, TOP = 380, 220, 46, 34
INK, GRID = "#57606a", "#d0d7de"
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#b8bec6"  # told apart by colour-blind readers too
SHOWN = {"overview", "steps", "sample", "reflection", "query", "probe"}
"""These pages, in light colours, are in the docs; another OUT gets all, dark ones and a phone's too."""
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 780}


def main() -> None:
    """Draw what the first word names."""
    what, *folders = sys.argv[1:]
    if what == "demo":
        draw_demo(Path(folders[0]))
    else:
        draw_view(folders[:-1], folders[-1])


def draw_demo(run: Path) -> None:
    """Write demo.svg."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    panels = [accuracy_panel(lines, steps), group_panel(steps)]
    body = "".join(f'<g transform="translate({i * (WIDTH + 80)},0)">{panel}</g>' for i, panel in enumerate(panels))
    width, height = 2 * WIDTH + 80 + LEFT + 20, HEIGHT + TOP + 44
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}">'
        f'<rect width="100%" height="100%" fill="white"/>{body}</svg>\n'
    )
    (HERE / "demo.svg").write_text(svg)


def accuracy_panel(lines: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> str:
    """Training accuracy as a smoothed line, held-out accuracy as points with their intervals."""
    last = steps[-1]["step"]
    smooth = [mean([s["accuracy"] for s in steps[max(0, i - 4) : i + 1]]) for i in range(len(steps))]
    line = " ".join(f"{x(s['step'], last):.1f},{y(v):.1f}" for s, v in zip(steps, smooth, strict=True))
    marks = ""
    for held in (h for h in lines if "heldout/accuracy" in h):
        at = x(held["step"], last)
        marks += (
            f'<line x1="{at}" x2="{at}" y1="{y(held["heldout/low"])}" y2="{y(held["heldout/high"])}" '
            f'stroke="{ORANGE}" stroke-width="2"/>'
            f'<circle cx="{at}" cy="{y(held["heldout/accuracy"])}" r="4" fill="{ORANGE}"/>'
        )
    key = legend([(BLUE, "training questions, as sampled"), (ORANGE, "held-out problems, 95 % interval")])
    return (
        frame("Accuracy", last)
        + f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="2"/>'
        + marks
        + key
    )


def group_panel(steps: Sequence[dict[str, Any]]) -> str:
    """Shares of solve-none, mixed and solve-all groups, stacked."""
    last = steps[-1]["step"]
    none = [mean([s["solve_none"] for s in steps[max(0, i - 4) : i + 1]]) for i in range(len(steps))]
    rest = [1 - mean([s["solve_all"] for s in steps[max(0, i - 4) : i + 1]]) for i in range(len(steps))]
    areas = ""
    for low, high, colour in (([0.0] * len(none), none, ORANGE), (none, rest, GREY), (rest, [1.0] * len(rest), BLUE)):
        there = [f"{x(s['step'], last):.1f},{y(v):.1f}" for s, v in zip(steps, high, strict=True)]
        back = [f"{x(s['step'], last):.1f},{y(v):.1f}" for s, v in zip(steps, low, strict=True)]
        areas += f'<polygon points="{" ".join(there + back[::-1])}" fill="{colour}" fill-opacity="0.85"/>'
    key = legend([(ORANGE, "all wrong (solve-none)"), (GREY, "mixed"), (BLUE, "all right (solve-all)")], y(0.62))
    return areas + frame("Groups of 8 answers to one question", last) + key


def frame(title: str, last: int) -> str:
    """Title, axes and their numbers."""
    rows = "".join(
        f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y(v)}" y2="{y(v)}" stroke="{GRID}" stroke-width="0.7"/>'
        f'<text x="{LEFT - 8}" y="{y(v) + 4}" text-anchor="end">{v:.0%}</text>'
        for v in (0, 0.25, 0.5, 0.75, 1.0)
    )
    columns = "".join(
        f'<text x="{x(s, last)}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{s}</text>'
        for s in range(0, last + 1, max(1, last // 4))
    )
    return (
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="600">{title}</text>{rows}{columns}'
        f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 36}" text-anchor="middle">step</text>'
    )


def legend(entries: Sequence[tuple[str, str]], top: float = TOP + 8) -> str:
    """Colours and what they stand for, on the right."""
    return "".join(
        f'<g transform="translate({LEFT + WIDTH - 210},{top + 18 * i})"><rect width="214" height="18" fill="white" '
        f'fill-opacity="0.8"/><rect x="6" y="4" width="10" height="10" fill="{colour}"/>'
        f'<text x="22" y="13">{text}</text></g>'
        for i, (colour, text) in enumerate(entries)
    )


def x(step: float, last: int) -> float:
    return LEFT + WIDTH * step / last


def y(share: float) -> float:
    return TOP + HEIGHT * (1 - share)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def draw_view(runs: list[str], probe: str) -> None:
    """Write all pictures into HERE, or into the folder that the environment variable OUT names."""
    from playwright.sync_api import sync_playwright

    out = Path(os.environ.get("OUT", HERE))
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
    from PIL import Image

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
