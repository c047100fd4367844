"""Pull the examples into the pages again: `python docs/pull_examples.py` (with --check: only say what differs).

In a page, a line `<!-- include: path#region -->` says that the fenced block after it is a region of a file (without
`#region`: all of it). A region stands between the lines `[start region]` and `[end region]`, behind a comment sign.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"^<!-- include: (?P<path>[\w./-]+)(?:#(?P<region>[\w-]+))? -->\n```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
MARK = re.compile(r"^\s*(?:#|--) \[(?:start|end) [\w-]+\]\n", re.MULTILINE)


def pages() -> Iterator[Path]:
    """README and every page of the documentation."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def region(path: str, name: str | None) -> str:
    """A region of a file, at the left margin, without blank lines at its ends.

    Raises:
        KeyError: the file has no such region.
    """
    text = (ROOT / path).read_text(encoding="utf-8")
    if name is not None:
        found = re.search(rf"^\s*(?:#|--) \[start {name}\]\n(.*?)^\s*(?:#|--) \[end {name}\]$", text, re.M | re.S)
        if found is None:
            raise KeyError(f"{path} has no region {name!r}")
        text = found[1]
    return textwrap.dedent(MARK.sub("", text)).strip("\n") + "\n"


def pulled(page: str) -> str:
    """The page with every marked block as its file has it now."""

    def block(match: re.Match[str]) -> str:
        head = match[0][: match.start("text") - match.start()]
        return f"{head}{region(match['path'], match['region'])}```"

    return BLOCK.sub(block, page)


def main(arguments: list[str]) -> int:
    differing = []
    for path in pages():
        page = path.read_text(encoding="utf-8")
        if pulled(page) != page:
            differing.append(path)
            if "--check" not in arguments:
                path.write_text(pulled(page), encoding="utf-8")
    for path in differing:
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
    return 1 if differing and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
