"""One sentence per line in Markdown, so that a changed sentence is a changed line: check, or rewrite.

    python -m tools.sentences [--fix] [FILE.md …]        (without files: every Markdown file that git tracks)

Headings, tables, code, HTML and quotes are left as they are. A sentence ends at a full stop, question or exclamation
mark before a space and something that can begin a sentence; abbreviations and initials end none.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ABBREVIATIONS = ("e.g.", "i.e.", "vs.", "cf.", "etc.", "Eq.", "Fig.", "No.", "St.", "resp.", "approx.", "Dr.")
END = re.compile(r"(?<=[.!?])([\"”')\]*_`]*) +(?=[\"“(\[*_`]*[A-ZÀ-ÝR0-9`])")
ITEM = re.compile(r"^(\s*)([-*+]|\d+[.)])(\s+)")
FENCE = re.compile(r"^\s*(```|~~~)")
APART = re.compile(r"^\s*(#|\||>|<|!\[|\[[^\]]+\]:|---|===|\*\*\*$)")


def rewritten(text: str) -> str:
    """The text with one sentence per line.

    >>> print(rewritten("One. Two, e.g. Three,\\nand\\nmore. `Four` it is.\\n\\n- A b.\\n  C d.\\n"), end="")
    One.
    Two, e.g. Three, and more.
    `Four` it is.
    <BLANKLINE>
    - A b.
      C d.
    """
    lines, paragraph, out, fenced = text.split("\n"), [], [], False
    for line in [*lines, ""]:
        opens = FENCE.match(line) is not None
        if fenced or opens or not line.strip() or APART.match(line) or _is_code(line, paragraph):
            out += _sentences(paragraph)
            paragraph = []
            fenced = fenced != opens
            out.append(line)
        elif ITEM.match(line):
            out += _sentences(paragraph)
            paragraph = [line]
        else:
            paragraph.append(line)
    return "\n".join(out[:-1])


def _is_code(line: str, paragraph: list[str]) -> bool:
    return line.startswith("    ") and not paragraph


def _sentences(paragraph: list[str]) -> list[str]:
    if not paragraph:
        return []
    item = ITEM.match(paragraph[0])
    first = item.group(0) if item else re.match(r"\s*", paragraph[0])[0]  # type: ignore[index]  # matches always
    rest = " " * len(first)
    text = " ".join([paragraph[0][len(first) :].strip(), *(line.strip() for line in paragraph[1:])])
    sentences = _split(text)
    return [first + sentences[0], *(rest + sentence for sentence in sentences[1:])]


def _split(text: str) -> list[str]:
    code = [match.span() for match in re.finditer(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", text)]
    sentences, start = [], 0
    for end in END.finditer(text):
        cut = end.end(1)
        word = text[start : end.start()].rsplit(" ", 1)[-1].lstrip('("“*')
        inside = any(low < end.start() < high for low, high in code)
        if inside or word in ABBREVIATIONS or re.fullmatch(r"[A-Z]\.", word) or re.fullmatch(r"\d+\.", text[start:cut]):
            continue
        sentences.append(text[start:cut])
        start = end.end()
    return [*sentences, text[start:]]


def main() -> int:
    """Check or rewrite; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--fix", action="store_true", help="rewrite the files")
    arguments = parser.parse_args()
    files = arguments.files or tracked()
    wrong = {path: new for path in files if (new := rewritten(old := path.read_text(encoding="utf-8"))) != old}
    if arguments.fix:
        for path, new in wrong.items():
            path.write_text(new, encoding="utf-8")
        return 0
    for path, new in wrong.items():
        pairs = zip(path.read_text(encoding="utf-8").split("\n"), new.split("\n"), strict=False)
        line = next((number for number, (a, b) in enumerate(pairs, 1) if a != b), 1)
        print(f"{path}:{line}: not one sentence per line; run make format", file=sys.stderr)
    return int(bool(wrong))


def tracked() -> list[Path]:
    """The Markdown files that git knows."""
    listed = subprocess.run(["git", "ls-files", "*.md"], capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.splitlines()]


if __name__ == "__main__":
    sys.exit(main())
