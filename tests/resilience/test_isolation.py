"""The repository's rules once more, where the server's own default isolation is a stricter one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import text

from airflow_dbpartition.demo.embedded import EmbeddedPostgres
from airflow_dbpartition.demo.processes import Guard, SessionProcess, free_port
from airflow_dbpartition.repository import JobRepository
from tests import scenarios
from tests.databases import Database, MysqlServer, PostgresServer, run_sql
from tests.races.racing import contestants, errors, race
from tests.worker.processes import wait_until

ISOLATIONS = ("repeatable read", "serializable", "innodb snapshot")


@pytest.fixture(scope="session")
def strict_role(own_server: EmbeddedPostgres) -> Iterator[PostgresServer]:
    """A server whose superuser we may give another default isolation."""
    server = PostgresServer(own_server.url())
    yield server
    own_server.start()
    server.close()


@pytest.fixture(scope="session")
def snapshot_server(tmp_path_factory: pytest.TempPathFactory, guard: Guard) -> Iterator[MysqlServer]:
    """A MariaDB of our own with innodb_snapshot_isolation=ON."""
    program = shutil.which("mariadbd") or shutil.which("mariadbd", path="/usr/sbin")
    installer = shutil.which("mariadb-install-db")
    if program is None or installer is None:
        pytest.skip("MariaDB's server is not installed here")
    directory = tmp_path_factory.mktemp("mariadb")
    data, port = directory / "data", free_port()
    own = ["--no-defaults", f"--datadir={data}", "--user=root"]
    subprocess.run([installer, *own, "--auth-root-authentication-method=normal"], check=True, capture_output=True)
    process = SessionProcess(
        [
            program,
            *own,
            f"--port={port}",
            "--bind-address=127.0.0.1",
            f"--socket={directory / 'socket'}",
            "--innodb-snapshot-isolation=ON",
            "--innodb-flush-log-at-trx-commit=0",
        ],
        log_path=directory / "mariadb.log",
        environment={"PATH": "/usr/bin:/bin"},
        cwd=Path("/"),
    )
    guard.add(process)
    try:
        wait_until(lambda: "ready for connections" in process.log_path.read_text(), "MariaDB is up", timeout_s=60)
        yield MysqlServer(f"mysql://root@127.0.0.1:{port}/")
    finally:
        process.kill()
        guard.remove(process)


@pytest.fixture(params=ISOLATIONS)
def fresh_database(request: pytest.FixtureRequest) -> Iterator[Database]:
    """Takes the place of the fixture of all tests: an empty place under each isolation in turn."""
    if request.param == "innodb snapshot":
        mysql: MysqlServer = request.getfixturevalue("snapshot_server")
        with mysql.fresh() as database:
            yield database
        return
    postgres: PostgresServer = request.getfixturevalue("strict_role")
    with postgres.fresh() as database:
        run_sql(database, f"ALTER ROLE postgres SET default_transaction_isolation = '{request.param}'")
        yield database
        run_sql(database, "ALTER ROLE postgres RESET default_transaction_isolation")


def test_the_default_is_what_this_test_says_and_ours_is_read_committed(
    database: Database, repository: JobRepository
) -> None:
    engine = database.plain_engine()
    with engine.connect() as plain, repository.engine.connect() as ours:
        if database.name == "mysql":
            assert plain.execute(text("SELECT @@innodb_snapshot_isolation")).scalar() == 1
            assert ours.execute(text("SELECT @@tx_isolation")).scalar() == "READ-COMMITTED"
        else:
            assert plain.execute(text("SHOW transaction_isolation")).scalar() in ISOLATIONS
            assert ours.execute(text("SHOW transaction_isolation")).scalar() == "read committed"
    engine.dispose()


def test_claims_settles_and_endings_that_race_are_right(database: Database, repository: JobRepository) -> None:
    names = ["a", "b", "c"]
    for name in names:
        scenarios.add_node(repository, name)
    job = scenarios.submit(repository, 30).job_execution_id
    with contestants(database, len(names)) as others:

        def work(name: str, own: JobRepository) -> int:
            done = 0
            while taken := scenarios.claim(own, name, 2):
                for one in taken:
                    scenarios.complete(own, one, write=1)
                    done += 1
                scenarios.sweep(own)
            own.executions.finalise(job)
            return done

        outcomes = race(*(partial(work, name, own) for name, own in zip(names, others, strict=True)))
    assert errors(outcomes) == []
    assert sum(outcomes) == 30
    assert scenarios.statuses(repository, job) == {"COMPLETED": 30}
    assert repository.reading.execution(job).status == "COMPLETED"
    assert scenarios.column(repository, job, "version") == [1] * 30
