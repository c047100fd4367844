"""A lock of each node that PostgreSQL drops by itself when the node's session ends.

The process that held a session may be dead, or cut off, or about to connect again: the end of a session is a reason to
suspect its node, and never one to take its work away. No ownership lives in it.
"""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import text
from sqlalchemy.engine import Connection

from airflow_dbpartition.repository.transactions import Transactions

_LOCKS_OF_NODES = 0x64627061  # the first of the two numbers that name the lock; the second is the node's
_HOLDERS = text(
    "SELECT l.objid::bigint AS number, l.pid, statement_timestamp() AS now "
    "FROM pg_locks l JOIN pg_database d ON d.oid = l.database "
    "WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted AND l.classid::bigint = :locks_of_nodes "
    "AND d.datname = current_database()"
)


def number_of(node_id: str) -> int:
    """What names the node's lock; two nodes may share a number, and then only the end of both is seen."""
    return zlib.crc32(node_id.encode()) & 0x7FFFFFFF


def is_own(driver_connection: Any) -> bool:
    """Whether the session on PostgreSQL is this driver connection's own; a pooler lends out others."""
    with driver_connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return bool(cursor.fetchone()[0] == driver_connection.info.backend_pid)


def show(driver_connection: Any, node_id: str) -> bool:
    """Take the node's lock in the session of a driver connection on PostgreSQL that is in no transaction.

    Returns:
        False where the session is not this connection's own, or the lock is refused.
    """
    with contextlib.suppress(Exception), driver_connection.cursor() as cursor:
        if not is_own(driver_connection):
            return False
        # Shared: a number that two nodes have in common makes neither wait.
        cursor.execute(f"SELECT pg_advisory_lock_shared({_LOCKS_OF_NODES}, {number_of(node_id)})")
        return True
    return False


@dataclass(frozen=True)
class Presence:
    """Whose sessions were there.

    Args:
        seen: when, by the database's clock.
        process_ids: of the server's processes, by the number of the node.
    """

    seen: datetime
    process_ids: dict[int, int]


class Sessions:
    """Whose session is there."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def present(self) -> Presence | None:
        """Who is there now; None where nobody is, as on every database but PostgreSQL."""

        def work(connection: Connection) -> Presence | None:
            rows = connection.execute(_HOLDERS, {"locks_of_nodes": _LOCKS_OF_NODES}).all()
            return Presence(rows[0].now, {row.number: row.pid for row in rows}) if rows else None

        if self._transactions.engine.dialect.name != "postgresql":
            return None
        return self._transactions.run(work)
