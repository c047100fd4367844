"""What a forked copy of a process must not have: the database connections of the one that it was copied from.

A connection is one conversation. A copy that spoke on it would mix its words into the other's transaction, could commit
or roll back that transaction, and would end the session when it exits. So in the copy every connection of ours is cut
off where only the copy sees it, and the copy's engines begin with an empty pool.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_connections: weakref.WeakSet[Any] = weakref.WeakSet()


def keep_connections_from_forks(engine: Engine) -> None:
    """Let the forked copies of this process make connections of their own with `engine`."""
    _engines.add(engine)

    @event.listens_for(engine, "connect")
    def remember(driver_connection: Any, _record: object) -> None:
        if _descriptor_of(driver_connection) is not None:  # SQLite has files, not sessions
            _connections.add(driver_connection)


def _begin_anew() -> None:
    for driver_connection in list(_connections):
        with contextlib.suppress(Exception):  # closed already
            _cut_off(driver_connection)
    _connections.clear()
    for engine in list(_engines):
        engine.dispose(close=False)


def _cut_off(driver_connection: Any) -> None:
    """Put a socket that nobody reads where the connection's own was."""
    descriptor = _descriptor_of(driver_connection)
    assert descriptor is not None
    dead, peer = socket.socketpair()
    with dead:
        peer.close()
        os.dup2(dead.fileno(), descriptor, inheritable=False)


def _descriptor_of(driver_connection: Any) -> int | None:
    if hasattr(driver_connection, "fileno"):  # psycopg2
        return int(driver_connection.fileno())
    socket_of_pymysql = getattr(driver_connection, "_sock", None)
    return None if socket_of_pymysql is None else int(socket_of_pymysql.fileno())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
