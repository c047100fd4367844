"""The workers' proxy, with enough of PostgreSQL's protocol to break one transaction at a chosen moment."""

from __future__ import annotations

import contextlib
import threading
import time
from enum import Enum

from tests.worker.proxy import _CHUNK, ALONE, Proxy, _Link

_COMMITTED = b"COMMIT\0"  # the tag of CommandComplete, as it is the text of the query
_ROLLED_BACK = b"ROLLBACK\0"
_READY = b"Z\0\0\0\5I"  # ReadyForQuery, outside a transaction: the login is over when it is first said


class Moment(Enum):
    """When a connection breaks.

    SENDING: the server has half of a statement. RUNNING: it has run the statement, and nobody hears of it.
    COMMITTED: it has committed the transaction, and nobody hears of it. RUNNING is the same for a statement that is a
    transaction of its own.
    """

    SENDING = "sending"
    RUNNING = "running"
    COMMITTED = "committed"


class WireProxy(Proxy):
    """Breaks the connection of one transaction, or delays everything.

    Args:
        url: of a PostgreSQL database, by TCP.
        latency_s: how long an answer takes.
        mute: after the login, nothing that the server says is passed on.
    """

    def __init__(self, url: str, *, latency_s: float = 0.0, mute: bool = False) -> None:
        super().__init__(url)
        self.latency_s = latency_s
        self.mute = mute
        self.broken = threading.Event()
        self._trap: tuple[Moment, bytes] | None = None
        self._trapped: dict[_Link, Moment] = {}
        self._transaction: dict[_Link, bytes] = {}
        self._setting = threading.Lock()

    def __enter__(self) -> WireProxy:
        super().__enter__()
        return self

    def break_at(self, moment: Moment, words: bytes = b"") -> None:
        """The next transaction that says the words loses its connection at that moment; b"" = any."""
        with self._setting:
            self.broken.clear()
            self._trap = (moment, words)

    def _pump(self, link: _Link, source: object) -> None:
        from_client = source is link.client
        sender, receiver = (link.client, link.server) if from_client else (link.server, link.client)
        with contextlib.suppress(OSError):
            while data := sender.recv(_CHUNK):
                if from_client and not link.greeting:
                    link.greeting = data
                if self.latency_s:
                    time.sleep(self.latency_s / 2)
                with self._flowing:
                    self._flowing.wait_for(lambda: self._frozen is None or self._frozen not in link.greeting)
                if from_client and self._springs(link, data):
                    receiver.sendall(data[: len(data) // 2])
                    break
                if not from_client and self._is_to_stay_unheard(link, data):
                    break
                receiver.sendall(data)
                if self.mute and not from_client and _READY in data:
                    while sender.recv(_CHUNK):
                        pass
        link.close()

    def _springs(self, link: _Link, data: bytes) -> bool:
        """Note what the client says; True = send half of it and break."""
        said = self._transaction.get(link, b"") + data
        alone = ALONE in data
        self._transaction[link] = b"" if alone or _COMMITTED in data or _ROLLED_BACK in data else said
        with self._setting:
            if self._trap is None:
                return False
            moment, words = self._trap
            hit = words in said and (alone or (_COMMITTED in data) == (moment is Moment.COMMITTED))
            if not hit or (words not in data and moment is not Moment.COMMITTED):
                return False
            self._trap = None
            self._trapped[link] = Moment.RUNNING if alone and moment is Moment.COMMITTED else moment
        if moment is Moment.SENDING:
            self.broken.set()
        return moment is Moment.SENDING

    def _is_to_stay_unheard(self, link: _Link, data: bytes) -> bool:
        moment = self._trapped.get(link)
        if moment is None or (moment is Moment.COMMITTED and _COMMITTED not in data):
            return False
        self.broken.set()
        return True
