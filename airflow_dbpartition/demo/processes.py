"""Child processes of the demo and the end-to-end tests: started apart, watched, and never left behind."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from airflow_dbpartition.errors import DbPartitionError

POLL_INTERVAL_S = 0.05
GUARD_GRACE_S = 10.0
PORT_RANGE = range(20_000, 32_000)


class DemoError(DbPartitionError):
    """A process of the demo did not start, died, or answered with an error."""


class ProcessRow(NamedTuple):
    """One line of the process table."""

    pid: int
    parent: int
    session: int
    is_zombie: bool


def free_port() -> int:
    """Return a TCP port that is free on 127.0.0.1 now; another process may still take it first.

    It lies below the range that outgoing connections take theirs from: while our server is down, a client that
    retries could otherwise be given the very port it dials, and talk to itself.
    """
    for port in random.SystemRandom().sample(PORT_RANGE, k=100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise DemoError(f"no free port on 127.0.0.1 among 100 tried of {PORT_RANGE.start}-{PORT_RANGE.stop - 1}")


def log_tail(path: Path, *, lines: int = 25) -> str:
    """Return the last lines of a log, indented for an error message."""
    try:
        text = path.read_bytes()[-64_000:].decode(errors="replace")
    except OSError as error:
        return f"  (no log: {error})"
    tail = text.splitlines()[-lines:]
    return "\n".join(f"  {line}" for line in tail) if tail else "  (the log is empty)"


def process_table() -> list[ProcessRow]:
    """Return the processes of this machine, from /proc where there is one and from ps elsewhere."""
    return _table_from_proc() if Path("/proc/self/stat").exists() else _table_from_ps()


def family(root: int) -> list[int]:
    """Return the living processes of the session that `root` leads, and all that descend from them.

    The session finds orphans (their parent is gone); descent finds those that opened a session of their own.
    """
    rows = [row for row in process_table() if not row.is_zombie]
    found = {row.pid for row in rows if row.pid == root or row.session == root}
    while more := {row.pid for row in rows if row.parent in found} - found:
        found |= more
    return sorted(found)


def pids_with_environment(setting: str) -> set[int]:
    """Return the processes started with this variable; empty where there is no /proc."""
    found = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if setting.encode() in environ.read_bytes().split(b"\0"):
                found.add(int(environ.parent.name))
        except OSError:
            continue  # it ended meanwhile, or is another user's
    return found


def send_signal(pid: int, signal_number: int) -> None:
    """Signal a process that may be gone already."""
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        return


class SessionProcess:
    """One child process in a session of its own, with its output in a log file.

    Args:
        command: program and arguments.
        log_path: where stdout and stderr are appended.
        environment: the whole environment of the child.
        user_id: run as this user (only root may ask for it); None for our own.
        group_id: the group that goes with `user_id`.
        cwd: directory to run in.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        environment: Mapping[str, str],
        cwd: Path,
        user_id: int | None = None,
        group_id: int | None = None,
    ) -> None:
        self.log_path = log_path
        with log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=cwd,
                start_new_session=True,  # Ctrl-C in the terminal is ours to pass on
                user=user_id,
                group=group_id,
                extra_groups=None if user_id is None else [],
            )
        self.pid = self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it."""
        return self._popen.poll()

    def members(self) -> list[int]:
        """The process, its children, and what they left behind."""
        return family(self.pid)

    def send(self, signal_number: int) -> None:
        """Signal the process itself, not its children."""
        if self.exit_code is None:
            send_signal(self.pid, signal_number)

    def wait(self, *, timeout_s: float) -> bool:
        """Wait for the process itself to end; False when it outlived the timeout."""
        try:
            self._popen.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL the process and its whole family; return when nothing of it is left."""
        doomed = set(self.members())
        self.send(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while doomed and time.monotonic() < deadline:
            for pid in doomed:
                send_signal(pid, signal.SIGKILL)
            self._popen.poll()
            time.sleep(POLL_INTERVAL_S / 5)
            alive = {row.pid for row in process_table() if not row.is_zombie}
            doomed = (doomed & alive) | set(self.members())
        self._popen.wait(timeout=10)


class Guard:
    """Ends the guarded processes when this Python dies, however it dies (its pipe to a small watcher breaks)."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "airflow_dbpartition.demo.guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
        )

    def add(self, process: SessionProcess, *, signal_number: int = signal.SIGTERM) -> None:
        """From now on the process ends with us: by this signal, and after 10 s by SIGKILL."""
        self._tell(f"add {process.pid} {int(signal_number)}")

    def remove(self, process: SessionProcess) -> None:
        """The process is ended already: its number may be given to another."""
        self._tell(f"remove {process.pid}")

    def close(self) -> None:
        """Let the watcher go without ending anything."""
        self._popen.kill()
        self._popen.wait()
        if self._popen.stdin is not None:
            try:
                self._popen.stdin.close()
            except BrokenPipeError:
                return

    def _tell(self, line: str) -> None:
        if self._popen.stdin is None:
            return
        try:
            self._popen.stdin.write(line + "\n")
            self._popen.stdin.flush()
        except (BrokenPipeError, ValueError):
            return  # the watcher is gone: nothing depends on it while we live


def _table_from_proc() -> list[ProcessRow]:
    rows = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        state, parent, _group, session = stat[stat.rindex(")") + 1 :].split()[:4]
        rows.append(ProcessRow(pid=int(entry), parent=int(parent), session=int(session), is_zombie=state in "ZX"))
    return rows


def _table_from_ps() -> list[ProcessRow]:
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat="], check=True, capture_output=True, text=True, timeout=10
    )
    rows = []
    for line in listing.stdout.splitlines():
        pid, parent, state = line.split()[:3]
        try:
            session = os.getsid(int(pid))
        except OSError:
            continue  # it ended meanwhile
        rows.append(ProcessRow(pid=int(pid), parent=int(parent), session=session, is_zombie=state.startswith("Z")))
    return rows
