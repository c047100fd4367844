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
from airflow_dbpartition.worker import messages
from airflow_dbpartition.worker.child import FENCED, ORPHANED
from airflow_dbpartition.worker.executors import ClaimKey, Finished, key_of
from airflow_dbpartition.worker.lifeline import Lifeline
from airflow_dbpartition.worker.messages import Channel, claim_to_json
from airflow_dbpartition.worker.runner import FAILED, INTERRUPTED, UNSTARTED, Outcome

log = structlog.get_logger("dbpartition.worker")

START_TIMEOUT_S = 120.0
_EXIT_TIMEOUT_S = 5.0
_RESPAWN_WAIT_S = (0.0, 0.5, 1.0, 2.0, 5.0)


@dataclass
class _ChildHandle:
    process: subprocess.Popen[bytes]
    channel: Channel
    ready: bool = False
    running: ClaimKey | None = None
    since: float = 0.0
    done: int = 0
    verdict: Outcome | None = None  # why we killed it
    leaving: bool = False
    born: float = field(default_factory=time.monotonic)


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
        self._prefetch = prefetch
        self._children: list[_ChildHandle] = []
        self._waiting: list[Claim] = []
        self._finished: list[Finished] = []
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
        return idle + self._prefetch - len(self._waiting)

    def run(self, claim: Claim) -> None:
        self._waiting.append(claim)
        self._feed()

    def _feed(self) -> None:
        for child in self._children:
            if not self._waiting or self._lifeline.remaining_s <= 0:
                return  # not heard for too long: others may have it by now
            if child.ready and child.running is None and not child.leaving:
                claim = self._waiting.pop(0)
                child.running = key_of(claim)
                child.since = time.monotonic()
                try:
                    child.channel.send(messages.RUN, claim=claim_to_json(claim))
                except OSError:  # dead, or deaf: noticed when its socket is read
                    child.verdict = Outcome(UNSTARTED, "its process did not take it")
                    _kill_group(child.process)

    def interrupt(self, key: ClaimKey) -> None:
        if any(key_of(claim) == key for claim in self._waiting):
            self._give_up_waiting(key)
            return
        child = self._runner_of(key)
        if child is not None:
            with contextlib.suppress(OSError):
                child.channel.send(messages.STOP, step_execution_id=key[0], version=key[1])

    def _give_up_waiting(self, *keys: ClaimKey) -> None:
        self._waiting = [claim for claim in self._waiting if key_of(claim) not in keys]
        self._finished += [Finished(key, Outcome(UNSTARTED, "it had not begun")) for key in keys]

    def kill(self, key: ClaimKey, kind: str, why: str) -> None:
        child = self._runner_of(key)
        if child is not None:
            child.verdict = Outcome(kind, why)
            _kill_group(child.process)

    def kill_all(self, why: str) -> bool:
        for child in list(self._children):
            if child.running is not None or self._closing:
                child.verdict = child.verdict or Outcome(INTERRUPTED, why)
                _kill_group(child.process)
        return True

    def withdraw(self) -> list[ClaimKey]:
        waiting, self._waiting = self._waiting, []
        return [key_of(claim) for claim in waiting]

    def started(self, key: ClaimKey) -> float | None:
        child = self._runner_of(key)
        return None if child is None else child.since

    def _runner_of(self, key: ClaimKey) -> _ChildHandle | None:
        return next((child for child in self._children if child.running == key), None)

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
                key = (message["step_execution_id"], message["version"])
                if child.running == key:
                    child.running = None
                    child.done += 1
                    self._finished.append(Finished(key, Outcome.from_json(message["outcome"])))
                if message["spent"]:
                    log.warning("a step closed or replaced the standard streams of its process", pid=child.process.pid)
                if message["spent"] or (self._max_partitions is not None and child.done >= self._max_partitions):
                    child.leaving = True
                    _kill_group(child.process)

    def _bury(self, child: _ChildHandle) -> None:
        """Its socket is closed: it is dead, or a step has closed what is ours; dead it will be."""
        self._children.remove(child)
        child.channel.close()
        code = _wait_briefly(child.process)
        _kill_group(child.process)  # also what the step itself has started
        if child.running is not None:
            self._finished.append(Finished(child.running, child.verdict or _verdict(code)))
        if code is None:
            code = child.process.wait()
        if child.running is not None:
            log.warning("a child process died", pid=child.process.pid, how=_how_it_ended(code))
        elif not child.leaving and not self._closing:
            log.warning("an idle child process died", pid=child.process.pid, how=_how_it_ended(code))
        if not child.ready:  # it never came to life: do not spin
            self._deaths += 1
            if not any(other.ready for other in self._children):
                self._give_up_waiting(*map(key_of, self._waiting))
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
