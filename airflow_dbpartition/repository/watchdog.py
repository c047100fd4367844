"""A client-side end to every transaction: a connection that stays silent past its deadline is cut.

`statement_timeout` is the server's; behind a proxy that accepts and never answers it is never heard of, and libpq
would wait in recv() for ever. Shutting the socket down from another thread ends that wait with an error.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

_GRANULARITY_S = 0.25


class Watchdog:
    """Cuts connections that outlive their deadline; one daemon thread, started by the first watch."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Watch nothing: a forked copy has none of its process's threads, but may have the locks that they held."""
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[float, Any]] = {}
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition(self._lock)

    @contextlib.contextmanager
    def watch(self, driver_connection: Any, seconds: float) -> Iterator[None]:
        """Cut `driver_connection` if the block takes longer than `seconds`; only drivers that tell their socket."""
        self.begin(driver_connection, seconds)
        try:
            yield
        finally:
            self.end(driver_connection)

    def begin(self, driver_connection: Any, seconds: float) -> None:
        """Watch from now on, unless `end` comes within `seconds`; a watch that has begun already begins anew."""
        if not hasattr(driver_connection, "fileno"):
            return
        with self._lock:
            self._watched[id(driver_connection)] = (time.monotonic() + seconds, driver_connection)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dbpartition-watchdog", daemon=True)
                self._thread.start()
            elif len(self._watched) == 1:
                self._wake.notify()

    def end(self, driver_connection: Any) -> None:
        with self._lock:
            self._watched.pop(id(driver_connection), None)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._watched:
                    self._wake.wait()
                now = time.monotonic()
                for token, (deadline, connection) in list(self._watched.items()):
                    if now >= deadline:
                        del self._watched[token]
                        _cut(connection)
            time.sleep(_GRANULARITY_S)


def _cut(driver_connection: Any) -> None:
    # An error here means that it was closed meanwhile: nothing waits on it any more.
    with contextlib.suppress(Exception), socket.socket(fileno=driver_connection.fileno()) as borrowed:
        try:
            borrowed.shutdown(socket.SHUT_RDWR)
        finally:
            borrowed.detach()  # the descriptor is libpq's to close


WATCHDOG = Watchdog()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=WATCHDOG.begin_anew)
