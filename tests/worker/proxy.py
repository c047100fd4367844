"""A TCP proxy between a worker and PostgreSQL, which can be frozen, cut, or lose the answer to one commit."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

from sqlalchemy.engine import make_url

HEARTBEAT = b"dbpartition heartbeat"
ALONE = b"SET TRANSACTION ISOLATION LEVEL READ COMMITTED; "  # begins a message that is a transaction of its own
_CHUNK = 1 << 16


class _Link:
    """One client's connection and the one to the server that goes with it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.greeting = b""  # the client's first words name the application
        self.said = b""  # by the client, since its last commit

    def close(self) -> None:
        for side in (self.client, self.server):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
            side.close()


class Proxy:
    """Stands before the server of a URL. Use it as a context manager.

    Args:
        url: of a PostgreSQL database, by TCP.
    """

    def __init__(self, url: str) -> None:
        self._target = make_url(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._links: list[_Link] = []
        self._flowing = threading.Condition()
        self._frozen: bytes | None = None  # links whose greeting holds this; b"" = all
        self._refusing = False
        self._closed = False
        self._doomed: bytes | None = None
        self.answers_lost = threading.Event()
        self.url = self._target.set(
            host="127.0.0.1", port=self._listener.getsockname()[1], query={"sslmode": "disable"}
        ).render_as_string(hide_password=False)

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._listener.close()
        self.cut()
        self.restore()

    # --- mischief ----------------------------------------------------------------------------------------------

    def freeze(self, who: bytes = b"") -> None:
        """Nothing goes through any more, and nothing is closed; only for those whose greeting holds `who`."""
        with self._flowing:
            self._frozen = who

    def cut(self) -> None:
        """Close every connection, and all that come."""
        self._refusing = True
        for link in list(self._links):
            link.close()

    def restore(self) -> None:
        with self._flowing:
            self._frozen, self._refusing = None, False
            self._flowing.notify_all()

    def lose_answer_to_commit_of(self, words: bytes) -> None:
        """The next transaction that says this is committed; then its connection closes without an answer."""
        self._doomed = words

    # --- work --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
                if self._refusing:
                    client.close()
                    continue
                server = socket.create_connection((self._target.host or "127.0.0.1", self._target.port or 5432))
            except OSError:
                continue
            link = _Link(client, server)
            self._links.append(link)
            for source in (client, server):
                threading.Thread(target=self._pump, args=(link, source), daemon=True).start()

    def _pump(self, link: _Link, source: socket.socket) -> None:
        from_client = source is link.client
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                if from_client and not link.greeting:
                    link.greeting = data
                with self._flowing:
                    self._flowing.wait_for(lambda: self._frozen is None or self._frozen not in link.greeting)
                if not from_client:
                    link.client.sendall(data)
                elif self._is_doomed(link, data):
                    self._commit_unheard(link, data)
                else:
                    link.server.sendall(data)
        link.close()

    def _is_doomed(self, link: _Link, data: bytes) -> bool:
        link.said += data
        if b"COMMIT\0" not in data and ALONE not in data:
            return False
        said, link.said = link.said, b""
        return self._doomed is not None and self._doomed in said

    def _commit_unheard(self, link: _Link, data: bytes) -> None:
        self._doomed = None
        link.client.close()  # the answer finds nobody
        link.server.sendall(data)
        self.answers_lost.set()
