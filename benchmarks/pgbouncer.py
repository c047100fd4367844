"""PgBouncer in transaction mode in front of a PostgreSQL server, as long as a context lasts."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg2
from sqlalchemy.engine import make_url

from airflow_dbpartition.demo.processes import Guard, SessionProcess, free_port, log_tail

STARTS_WITHIN_S = 10.0


class PgBouncerMissingError(Exception):
    """The program is not installed."""


@dataclass(frozen=True)
class PgBouncer:
    """One that runs: what to connect to, and its process."""

    url: str
    pid: int

    def clients(self) -> int:
        """How many connections it has from the database's clients."""
        url = make_url(self.url)
        connection = psycopg2.connect(host=url.host, port=url.port, user=url.username, dbname="pgbouncer")
        connection.autocommit = True  # its console knows no BEGIN
        with contextlib.closing(connection), connection.cursor() as cursor:
            cursor.execute("SHOW CLIENTS")
            database = [column.name for column in cursor.description or ()].index("database")
            return sum(row[database] == url.database for row in cursor.fetchall())


@contextlib.contextmanager
def pgbouncer(database_url: str, *, clients: int, pool_size: int) -> Iterator[PgBouncer]:
    """Start one for a single database.

    Args:
        clients: connections to it.
        pool_size: connections from it to the server.

    Raises:
        PgBouncerMissingError: it is not installed.
    """
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        raise PgBouncerMissingError("PgBouncer is not installed (on Debian: apt install pgbouncer)")
    url = make_url(database_url)
    port = free_port()
    guard = Guard()
    with tempfile.TemporaryDirectory() as place:
        users = Path(place, "users.txt")
        users.write_text(f'"{url.username}" ""\n')
        settings = Path(place, "pgbouncer.ini")
        settings.write_text(
            f"[databases]\n{url.database} = host={url.host} port={url.port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
            f"listen_port = {port}\nauth_type = trust\nauth_file = {users}\npool_mode = transaction\n"
            f"default_pool_size = {pool_size}\nmax_client_conn = {clients}\nunix_socket_dir =\n"
            "ignore_startup_parameters = extra_float_digits\nlog_connections = 0\nlog_disconnections = 0\n"
            f"stats_users = {url.username}\n"
        )
        identity = None
        if os.geteuid() == 0:  # it refuses to be root
            Path(place).chmod(0o755)
            identity = pwd.getpwnam("nobody").pw_uid
        process = SessionProcess(
            [program, str(settings)],
            log_path=Path(place, "pgbouncer.log"),
            environment={"PATH": "/usr/bin:/bin"},
            cwd=Path("/"),
            user_id=identity,
            group_id=identity,
        )
        guard.add(process)
        try:
            _wait_until_it_answers(process, port)
            yield PgBouncer(url.set(port=port).render_as_string(hide_password=False), process.pid)
        finally:
            process.kill()
            guard.close()


def _wait_until_it_answers(process: SessionProcess, port: int) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if process.exit_code is not None or time.monotonic() > deadline:
            raise SystemExit(f"PgBouncer did not start:\n{log_tail(process.log_path)}")
        time.sleep(0.02)
