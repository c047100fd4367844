"""The child process that runs user code: started by the supervisor with a socket and a lifeline, reused until told.

It does not outlive its supervisor: the kernel kills it when that dies (Linux), the closed socket ends it elsewhere, and
the lifeline ends it when the supervisor is frozen, or has not been heard by the database for too long.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from typing import NoReturn

from airflow_dbpartition.config import DatabaseConfig
from airflow_dbpartition.errors import DbPartitionError
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.storable import JsonObject
from airflow_dbpartition.worker import messages
from airflow_dbpartition.worker.feeding import ClaimKey, key_of
from airflow_dbpartition.worker.lifeline import Lifeline
from airflow_dbpartition.worker.logs import configure_logging
from airflow_dbpartition.worker.messages import Channel, claim_from_json
from airflow_dbpartition.worker.runner import NOT_BEGUN, Outcome, run_claim
from airflow_dbpartition.worker.steps import load_steps

ORPHANED = 71  # exit code: the supervisor is gone
FENCED = 75  # exit code: the lifeline ran out
_LIFELINE_CHECK_S = 0.25
_IDLE_CONNECTION_S = 5.0
_PR_SET_PDEATHSIG = 1


class Child:
    """The child's two threads: the main one runs steps, the other one listens."""

    def __init__(self, channel: Channel, lifeline: Lifeline) -> None:
        self._channel = channel
        self._lifeline = lifeline
        self._claims: dict[ClaimKey, JsonObject] = {}  # in the order in which they are to be run
        self._arrived = threading.Condition()
        self._saying = threading.Lock()
        self._is_retired = False
        self._stopping: set[ClaimKey] = set()
        self._busy = False
        self._started = threading.Event()
        self._start: JsonObject = {}

    def main(self) -> None:
        """Serve until the supervisor is gone; never returns normally."""
        threading.Thread(target=self._listen, name="dbpartition-listen", daemon=True).start()
        self._started.wait()
        configure_logging(**self._start["logging"])
        try:
            steps = load_steps(self._start["imports"])
        except DbPartitionError as error:
            self._say(messages.UNUSABLE, message=str(error), cause=repr(error.__cause__))
            os._exit(1)
        repository = JobRepository.connect(DatabaseConfig(**self._start["database"]))
        streams = _standard_streams()
        self._say(messages.READY, steps=list(steps))
        while True:
            received = self._next_claim(_IDLE_CONNECTION_S)
            if received is None:
                repository.engine.dispose()  # an idle child holds no connection
                received = self._next_claim()
                assert received is not None
            if self._lifeline.remaining_s < 0:
                os._exit(FENCED)
            claim = claim_from_json(received)
            key = key_of(claim)
            began = time.monotonic()
            outcome = run_claim(claim, repository, partial(self._stopping.__contains__, key))
            took_s = time.monotonic() - began
            self._busy = False
            self._flush()
            self._stopping.discard(key)
            spent = _standard_streams() != streams
            self._done(key, outcome, took_s=took_s, spent=spent)
            if spent:
                self._retire()

    def _next_claim(self, timeout_s: float | None = None) -> JsonObject | None:
        """The next claim, from when on it cannot be given back; None = none has come."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._claims, timeout_s):
                return None
            self._busy = True
            return self._claims.pop(next(iter(self._claims)))

    def _retire(self) -> NoReturn:
        """Begin nothing any more; the supervisor ends this process when it has all its claims back."""
        with self._arrived:
            self._is_retired = True
            keys = list(self._claims)
        for key in keys:
            self._give_back(key)
        while True:
            signal.pause()

    def _give_back(self, key: ClaimKey) -> None:
        with self._arrived:
            found = self._claims.pop(key, None)
        if found is not None:
            self._done(key, NOT_BEGUN, took_s=None, spent=False)

    def _done(self, key: ClaimKey, outcome: Outcome, *, took_s: float | None, spent: bool) -> None:
        told = {"outcome": outcome.to_json(), "took_s": took_s, "spent": spent}
        self._say(messages.DONE, step_execution_id=key[0], version=key[1], **told)

    def _listen(self) -> None:
        while True:
            timeout = _LIFELINE_CHECK_S if self._busy else 1.0
            try:
                readable, _, _ = select.select([self._channel], [], [], timeout)
            except (OSError, ValueError):  # the step has closed our socket
                os._exit(ORPHANED)
            if self._busy and self._lifeline.remaining_s < 0:
                os._exit(FENCED)
            if not readable:
                continue
            received = self._channel.receive()
            if received is None:
                os._exit(ORPHANED)
            for message in received:
                if message["kind"] == messages.START:
                    self._start = message
                    self._started.set()
                elif message["kind"] == messages.RUN:
                    key = messages.key_of(message["claim"])
                    with self._arrived:
                        self._claims[key] = message["claim"]
                        self._arrived.notify()
                    if self._is_retired:
                        self._give_back(key)
                elif message["kind"] == messages.STOP:
                    self._stopping.add(messages.key_of(message))
                elif message["kind"] == messages.RETURN:
                    self._give_back(messages.key_of(message))

    def _say(self, kind: str, **values: object) -> None:
        try:
            with self._saying:
                self._channel.send(kind, **values)
        except OSError:
            os._exit(ORPHANED)

    @staticmethod
    def _flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the step may have closed it
                stream.flush()


def _standard_streams() -> list[object]:
    """What stdin, stdout and stderr are; a step that closes or replaces them does so for all that come after it."""
    found: list[object] = [_is_closed(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)]
    for fd in range(3):
        try:
            status = os.fstat(fd)
        except OSError:
            found.append(None)
        else:
            found.append((status.st_dev, status.st_ino))
    return found


def _is_closed(stream: object) -> bool:
    with suppress(Exception):  # whatever the step has put there
        return bool(getattr(stream, "closed", True))
    return True


def main(argv: list[str]) -> None:
    """`python -m airflow_dbpartition.worker.child SOCKET_FD LIFELINE_FD PARENT_PID`."""
    socket_fd, lifeline_fd, parent = (int(text) for text in argv)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(ORPHANED)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the supervisor to handle
    for fd in (socket_fd, lifeline_fd):
        os.set_inheritable(fd, False)  # what the step starts must not hold our socket open
    # A supervisor whose statement is not answered reads late; one that is gone ends us in other ways.
    channel = Channel(socket.socket(fileno=socket_fd), send_timeout_s=None)
    os.register_at_fork(after_in_child=channel.close)  # nor what it forks: it would hide our death, or answer for us
    Child(channel, Lifeline(lifeline_fd)).main()


if __name__ == "__main__":
    main(sys.argv[1:])
