"""The executor that runs partitions in child processes: reused, replaced when they die, killed when they must be."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import structlog

from airflow_dbpartition.config import DatabaseConfig
from airflow_dbpartition.domain import Claim
from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.storable import JsonObject
from airflow_dbpartition.worker import messages
from airflow_dbpartition.worker.child import FENCED, ORPHANED
from airflow_dbpartition.worker.executors import Finished
from airflow_dbpartition.worker.feeding import ClaimKey, Feed, key_of
from airflow_dbpartition.worker.lifeline import Lifeline
from airflow_dbpartition.worker.messages import Channel, claim_to_json
from airflow_dbpartition.worker.runner import FAILED, INTERRUPTED, LOST, NOT_BEGUN, UNSTARTED, Outcome

log = structlog.get_logger("dbpartition.worker")

START_TIMEOUT_S = 120.0
_EXIT_TIMEOUT_S = 5.0
_RESPAWN_WAIT_S = (0.0, 0.5, 1.0, 2.0, 5.0)


@dataclass
class _ChildHandle:
    process: subprocess.Popen[bytes]
    channel: Channel
    ready: bool = False
    given: dict[ClaimKey, float] = field(default_factory=dict)  # and since when: only the first one has begun
    done: int = 0
    verdict: tuple[ClaimKey | None, Outcome] | None = None  # why we killed it, and for which claim; None = for any
    leaving: bool = False
    born: float = field(default_factory=time.monotonic)

    @property
    def running(self) -> ClaimKey | None:
        """What it runs, as far as it has told."""
        return next(iter(self.given), None)

    @property
    def unbegun(self) -> list[ClaimKey]:
        """What it was given ahead: it says when one ends, before it begins the next."""
        return list(self.given)[1:]

    def kill(self, key: ClaimKey | None, outcome: Outcome) -> None:
        self.verdict = self.verdict or (key, outcome)
        _kill_group(self.process)

    def verdict_on(self, key: ClaimKey, code: int | None) -> Outcome:
        """What became of the claim that it ran when it died."""
        if self.verdict is None:
            return _verdict(code)
        condemned, outcome = self.verdict
        if condemned in (None, key):
            return outcome
        return Outcome(INTERRUPTED, "its process was killed for another partition")


class ProcessExecutor:
    """A pool of child processes, one partition each at a time.

    Args:
        slots: children at once.
        imports: modules that register the steps, imported in the children only.
        database: what the children connect to.
        lifeline: the shared deadline that ends children when this process is frozen or cut off.
        logging: arguments of `configure_logging` for the children.
        max_partitions: a child is replaced after so many; None = never.
        prefetch: claims taken ahead of the idle children.
    """

    def __init__(
        self,
        *,
        slots: int,
        imports: tuple[str, ...],
        database: DatabaseConfig,
        lifeline: Lifeline,
        logging: dict[str, str],
        max_partitions: int | None = None,
        prefetch: int = 0,
    ) -> None:
        self._slots = slots
        self._imports = imports
        self._database = database
        self._lifeline = lifeline
        self._logging = logging
        self._max_partitions = max_partitions
        self._waiting = Feed(slots, prefetch)
        self._children: list[_ChildHandle] = []
        self._finished: list[Finished] = []
        self._unwanted: set[ClaimKey] = set()  # claims that are lost, and were with a child that had not begun them
        self._deaths = 0
        self._respawn_at = 0.0
        self._closing = False

    # --- life --------------------------------------------------------------------------------------------------

    def start(self, wake: Callable[[], None]) -> tuple[str, ...]:
        del wake  # the children's sockets wake the supervisor
        for _ in range(self._slots):
            self._children.append(self._spawn())
        deadline = time.monotonic() + START_TIMEOUT_S
        first = self._children[0]
        while time.monotonic() < deadline:
            select.select([first.channel], [], [], 1.0)
            received = first.channel.receive()
            if received is None:
                code = first.process.wait(timeout=_EXIT_TIMEOUT_S)
                raise ConfigurationError(
                    f"the first child process ended while importing {', '.join(self._imports) or 'the steps'}: "
                    f"{_how_it_ended(code)}"
                )
            for message in received:
                if message["kind"] == messages.UNUSABLE:
                    raise ConfigurationError(message["message"])
                if message["kind"] == messages.READY:
                    first.ready = True
                    return tuple(message["steps"])
        raise ConfigurationError(f"importing {', '.join(self._imports)} took more than {START_TIMEOUT_S:g} s")

    def _spawn(self) -> _ChildHandle:
        """Called in the main thread only: on Linux a child dies with the *thread* that started it."""
        ours, theirs = socket.socketpair()
        with theirs:
            fds = (theirs.fileno(), self._lifeline.fd)
            process = subprocess.Popen(
                [sys.executable, "-m", "airflow_dbpartition.worker.child", *map(str, fds), str(os.getpid())],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is ours to handle; and the whole group can be killed
            )
        handle = _ChildHandle(process, Channel(ours))
        with contextlib.suppress(OSError):  # died at once: noticed when its socket is read
            handle.channel.send(
                messages.START, imports=list(self._imports), database=asdict(self._database), logging=self._logging
            )
        return handle

    def close(self) -> None:
        self._closing = True
        self.kill_all("the worker ends")
        for child in self._children:
            child.channel.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=_EXIT_TIMEOUT_S)
        self._children.clear()

    # --- work --------------------------------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        usable = [child for child in self._children if child.ready and not child.leaving]
        if not usable:
            return 0  # nothing can be run here now: others may take it
        idle = sum(1 for child in usable if child.running is None)
        ahead = len(self._waiting) + sum(len(child.given) - 1 for child in usable if child.given)
        return idle + self._waiting.wanted - ahead

    def run(self, claim: Claim) -> None:
        self._waiting.add(claim)
        self._feed()

    def _feed(self) -> None:
        """Hand out what waits; to children that are busy only where partitions take less than handing them out does."""
        for depth in range(self._waiting.depth):
            for child in self._children:
                claim = self._waiting.next()
                if claim is None or self._lifeline.remaining_s <= 0:
                    return  # not heard for too long: others may have it by now
                if len(child.given) != depth or not self._takes_more(child):
                    continue
                if depth > 0 and not child.channel.is_roomy:
                    return  # a busy child may not read for long, and nobody may wait for it
                line = messages.line_of(messages.RUN, claim=claim_to_json(claim))
                if depth > 0 and len(line) > messages.ROOMY_BYTES:
                    return
                self._waiting.take()
                self._give(child, key_of(claim), line)

    def _takes_more(self, child: _ChildHandle) -> bool:
        may_take = self._max_partitions is None or child.done + len(child.given) < self._max_partitions
        return child.ready and not child.leaving and may_take

    def _give(self, child: _ChildHandle, key: ClaimKey, line: bytes) -> None:
        child.given[key] = time.monotonic()
        try:
            child.channel.send_line(line)
        except OSError:  # dead, or deaf: noticed when its socket is read
            child.kill(key, Outcome(UNSTARTED, "its process did not take it"))

    def interrupt(self, key: ClaimKey) -> None:
        if self._waiting.remove(key):
            self._never_began(key)
            return
        child = self._holder_of(key)
        if child is not None:
            self._tell(child, messages.STOP if child.running == key else messages.RETURN, key)

    @staticmethod
    def _tell(child: _ChildHandle, kind: str, key: ClaimKey) -> None:
        with contextlib.suppress(OSError):
            child.channel.send(kind, step_execution_id=key[0], version=key[1])

    def _never_began(self, *keys: ClaimKey) -> None:
        self._finished += [Finished(key, NOT_BEGUN) for key in keys]

    def kill(self, key: ClaimKey, kind: str, why: str) -> None:
        child = self._holder_of(key)
        if child is None:
            return
        if child.running == key:
            child.kill(key, Outcome(kind, why))
        else:  # it runs another one; what it has begun meanwhile is killed when that is known
            self._unwanted.add(key)
            self._tell(child, messages.RETURN, key)

    def kill_all(self, why: str) -> bool:
        for child in list(self._children):
            if child.given or self._closing:
                child.kill(None, Outcome(INTERRUPTED, why))
        return True

    def withdraw(self) -> list[ClaimKey]:
        for child in self._children:
            for key in child.unbegun:  # reported as unstarted, unless it begins meanwhile
                self._tell(child, messages.RETURN, key)
        return self._waiting.withdraw()

    def withdraw_overdue(self) -> list[ClaimKey]:
        for child in self._children:
            overdue = [key for key in child.unbegun if self._waiting.is_overdue(child.given[key])]
            for key in overdue:
                self._tell(child, messages.RETURN, key)
                child.given[key] = time.monotonic()  # asked once
                self._waiting.was_wrong()
        return self._waiting.withdraw_overdue()

    def started(self, key: ClaimKey) -> float | None:
        child = self._holder_of(key)
        return child.given[key] if child is not None and child.running == key else None

    def _holder_of(self, key: ClaimKey) -> _ChildHandle | None:
        return next((child for child in self._children if key in child.given), None)

    # --- news --------------------------------------------------------------------------------------------------

    def watched(self) -> list[int]:
        return [child.channel.fileno() for child in self._children]

    def finished(self) -> list[Finished]:
        if self._children:
            readable, _, _ = select.select([child.channel for child in self._children], [], [], 0)
            for child in list(self._children):
                if child.channel in readable:
                    self._read(child)
        self._replace()
        self._feed()
        done, self._finished = self._finished, []
        return done

    def _read(self, child: _ChildHandle) -> None:
        received = child.channel.receive()
        if received is None:
            self._bury(child)
            return
        for message in received:
            if message["kind"] == messages.READY:
                child.ready = True
                self._deaths = 0
            elif message["kind"] == messages.UNUSABLE:
                log.error("a child process cannot import the steps", reason=message["message"])
            elif message["kind"] == messages.DONE:
                self._done(child, message)
                if message["spent"]:
                    log.warning("a step closed or replaced the standard streams of its process", pid=child.process.pid)
                if message["spent"] or (self._max_partitions is not None and child.done >= self._max_partitions):
                    child.leaving = True
                if child.leaving and not child.given:
                    _kill_group(child.process)

    def _done(self, child: _ChildHandle, message: JsonObject) -> None:
        key = messages.key_of(message)
        if child.given.pop(key, None) is None:
            return
        self._unwanted.discard(key)
        self._finished.append(Finished(key, Outcome.from_json(message["outcome"])))
        if message["took_s"] is None:
            return  # it had not begun, and another one still runs
        child.done += 1
        self._waiting.ran(message["took_s"])
        begun = child.running
        if begun is not None:
            child.given[begun] = time.monotonic()
            if begun in self._unwanted:
                child.kill(begun, Outcome(LOST, "the claim was lost"))

    def _bury(self, child: _ChildHandle) -> None:
        """Its socket is closed: it is dead, or a step has closed what is ours; dead it will be."""
        self._children.remove(child)
        child.channel.close()
        code = _wait_briefly(child.process)
        _kill_group(child.process)  # also what the step itself has started
        begun = child.running
        self._unwanted.difference_update(child.given)
        self._never_began(*child.unbegun)
        if begun is not None:
            self._finished.append(Finished(begun, child.verdict_on(begun, code)))
        if code is None:
            code = child.process.wait()
        if begun is not None:
            log.warning("a child process died", pid=child.process.pid, how=_how_it_ended(code))
        elif not child.leaving and not self._closing:
            log.warning("an idle child process died", pid=child.process.pid, how=_how_it_ended(code))
        if not child.ready:  # it never came to life: do not spin
            self._deaths += 1
            if not any(other.ready for other in self._children):
                self._never_began(*self._waiting.withdraw())
            wait = _RESPAWN_WAIT_S[min(self._deaths, len(_RESPAWN_WAIT_S) - 1)]
            self._respawn_at = time.monotonic() + wait

    def _replace(self) -> None:
        if self._closing or time.monotonic() < self._respawn_at:
            return
        while len(self._children) < self._slots:
            self._children.append(self._spawn())


def _wait_briefly(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        return None


def _verdict(code: int | None) -> Outcome:
    if code is None or code == ORPHANED:  # we are here, so its end of the socket is what has gone
        return Outcome(FAILED, "the step closed the descriptors of its worker process")
    if code == FENCED:
        return Outcome(INTERRUPTED, "the child ended itself: its supervisor was not heard for too long")
    return Outcome(FAILED, f"the process that ran this partition died: {_how_it_ended(code)}")


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _how_it_ended(code: int) -> str:
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = "?"
        hints = {
            "SIGKILL": " (out of memory, or killed by hand)",
            "SIGSEGV": " (a crash in native code)",
            "SIGABRT": " (a crash in native code)",
            "SIGBUS": " (a crash in native code)",
        }
        return f"killed by signal {-code} {name}{hints.get(name, '')}"
    return f"exit code {code} (os._exit, or a crash of the interpreter)"
