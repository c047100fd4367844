"""What clients have said to a PostgreSQL server, counted from its own log.

`log_statement = all` writes one entry for each message, which is one round trip. A message may hold several commands.
Transaction control and settings are told apart from statements, which read or change something. Writing the log costs
the server something, so processor time is never measured in the same seconds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from servers import Server, rows

_PREFIX = "<%d>"
_ENTRY = re.compile(r"^<(?P<database>[^>]*)>LOG:  (?:statement|execute [^:]*): (?P<message>.*)$")
_CONTROL = frozenset(
    "BEGIN START COMMIT ROLLBACK ABORT END SAVEPOINT RELEASE SET RESET SHOW DISCARD DEALLOCATE".split()
)
_TAKES_EFFECT_S = 0.5


@dataclass
class Tally:
    """What one database's clients have said.

    Attributes:
        round_trips: messages.
        commands: all of them, BEGIN, COMMIT and SET too.
        statements: without those.
    """

    round_trips: int = 0
    commands: int = 0
    statements: int = 0

    def add(self, message: str) -> None:
        self.round_trips += 1
        for command in filter(None, map(str.strip, message.split(";"))):
            self.commands += 1
            self.statements += command.split()[0].upper() not in _CONTROL


@contextmanager
def counted_statements(server: Server, database: str) -> Iterator[Tally]:
    """A tally that is filled when the block has ended."""
    tally = Tally()
    log_path = server.embedded.log_path
    _configure(server, f"log_line_prefix = '{_PREFIX}'", "log_statement = 'all'")
    begins_at = log_path.stat().st_size
    try:
        yield tally
        ends_at = log_path.stat().st_size
    finally:
        _configure(server, "log_statement = 'none'")
    with log_path.open("rb") as log:
        log.seek(begins_at)
        lines = log.read(ends_at - begins_at).decode(errors="replace")
    for message in _messages(lines, database):
        tally.add(message)


def _messages(lines: str, database: str) -> Iterator[str]:
    message: list[str] = []
    for line in [*lines.splitlines(), "<>"]:
        if line.startswith("\t"):  # the entry goes on
            if message:
                message.append(line)
            continue
        if message:
            yield " ".join(message)
        entry = _ENTRY.match(line)
        message = [entry["message"]] if entry and entry["database"] == database else []


def _configure(server: Server, *settings: str) -> None:
    for setting in settings:
        rows(server.embedded.url(), f"ALTER SYSTEM SET {setting}")
    rows(server.embedded.url(), "SELECT pg_reload_conf()")
    time.sleep(_TAKES_EFFECT_S)  # each session reads it before its next command
