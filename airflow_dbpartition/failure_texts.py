"""Reading what a failure says: the line of a stored text that names the error."""

from __future__ import annotations

_TRACEBACK = "Traceback (most recent call last):"
_LINKS = "(Background on this error at:"  # SQLAlchemy's last line, the same for every error


def headline(text: str | None) -> str:
    """Of a traceback the error itself, of any other text the last line; empty for no text."""
    return next(iter(essence(text, lines=1)), "")


def essence(text: str | None, *, lines: int) -> list[str]:
    """The error and what follows it (the statement, the cause), at most so many lines."""
    said = [line for line in (text or "").strip().splitlines() if line.strip() and not line.startswith(_LINKS)]
    start = max((number for number, line in enumerate(said) if line.strip() == _TRACEBACK), default=None)
    if start is None:
        return said[-lines:]
    for number in range(start + 1, len(said)):
        if not said[number][0].isspace():
            return said[number : number + lines]
    return said[-lines:]
