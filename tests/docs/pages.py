"""The pages of the documentation, taken apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tests.modules import import_file

ROOT = Path(__file__).resolve().parent.parent.parent
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def script(name: str) -> ModuleType:
    """One of the scripts in docs/, imported."""
    return import_file(ROOT / "docs" / f"{name}.py", f"docs_{name}")


@dataclass(frozen=True)
class Page:
    """A page: its text, and its text without the fenced blocks."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def prose(self) -> str:
        return _FENCE.sub("", self.text)

    def blocks(self, *languages: str) -> Iterator[tuple[str, str]]:
        """(language, text) of each fenced block, of these languages or of all."""
        for match in _FENCE.finditer(self.text):
            if not languages or match["language"] in languages:
                yield match["language"], match["text"]

    def inline_code(self) -> Iterator[str]:
        for match in _INLINE.finditer(self.prose):
            yield match[1]

    def links(self) -> Iterator[str]:
        for match in _LINK.finditer(self.prose):
            yield match[1]

    def anchors(self) -> set[str]:
        """What a link to a heading is called, as GitHub makes it."""
        headings = re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def pages() -> list[Page]:
    return [Page(ROOT / "README.md"), *(Page(path) for path in sorted((ROOT / "docs").rglob("*.md")))]
