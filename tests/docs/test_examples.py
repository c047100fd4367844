"""The examples do what the pages say: steps run on real workers, DAGs import, SQL runs on every database."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from shutil import copy, copytree
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import create_engine, func, insert, select

from airflow_dbpartition import cli, migrations
from airflow_dbpartition.config import DatabaseConfig
from airflow_dbpartition.partitioners import StandaloneEnvironment, collect_partitions
from airflow_dbpartition.repository import JobRepository
from tests.databases import Database
from tests.docs.pages import ROOT
from tests.modules import import_file

EXAMPLES = ROOT / "docs" / "examples"
DAGS = sorted([*EXAMPLES.glob("*_dag.py"), *(ROOT / "dags").glob("*.py")])


def load(path: Path) -> ModuleType:
    return import_file(path, f"example_{path.stem}")


class Bench:
    """A directory with a job repository in SQLite, and the command line on it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = f"sqlite:///{directory}/jobs.sqlite"
        self.engine = create_engine(self.url)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("DBPARTITION_")},
            "PATH": os.pathsep.join([str(directory / "bin"), os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(ROOT)]),
            "DBPARTITION_DATABASE_URL": self.url,
            "OUTBOX": str(directory),
        }

    def run(self, *arguments: str) -> str:
        """A command in this process; returns what it printed."""
        with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as ended:
            cli.main([*arguments, "--database-url", self.url])
        assert ended.value.code == 0, f"{arguments}: {ended.value.code}\n{printed.getvalue()}"
        return printed.getvalue()

    def create_tables(self) -> None:
        migrations.upgrade(self.engine)

    def submit(self, step: str, contexts: Mapping[str, Mapping[str, Any]], *options: str) -> str:
        path = self.directory / "partitions.json"
        path.write_text(json.dumps(contexts))
        return self.run("submit", step, "--partitions", str(path), *options).strip()

    def start_worker(self, module: str, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "airflow_dbpartition.cli", "worker", "--import", module, *options],
            cwd=self.directory,
            env=self.environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    def work(self, module: str) -> None:
        """A real worker, until no work is left."""
        worker = self.start_worker(module, "--drain")
        _, log = worker.communicate(timeout=60)
        assert worker.returncode == 0, log

    def partitions(self, job_execution_id: str) -> dict[str, dict[str, Any]]:
        rows = json.loads(self.run("partitions", job_execution_id, "--json"))
        return {row["key"]: row for row in rows}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.engine.dispose()


def test_the_tutorials_first_job(bench: Bench) -> None:
    (bench.directory / "bin").mkdir()
    program = bench.directory / "bin" / "dbpartition"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m airflow_dbpartition.cli "$@"\n')
    program.chmod(0o755)
    (bench.directory / "greetings.py").write_text((EXAMPLES / "greetings.py").read_text(encoding="utf-8"))
    done = subprocess.run(
        [str(EXAMPLES / "first_job.sh")],
        cwd=bench.directory,
        env=bench.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert '"greeting": "Hello, Grace!"' in done.stdout
    ids = re.findall(r"^\d+$", done.stdout, re.MULTILINE)
    assert ids == ["1", "2", "2"], "the second submit with the same parameters found the first"


def test_orders_are_checked_from_the_dags_own_partitions(bench: Bench) -> None:
    orders = load(EXAMPLES / "orders.py")
    plan = load(EXAMPLES / "orders_dag.py").plan
    bench.create_tables()
    orders.metadata.create_all(bench.engine)
    with bench.engine.begin() as connection:
        rows = [{"id": number, "cents": -5 if number % 100 == 0 else 5} for number in range(1, 2501)]
        connection.execute(insert(orders.orders), rows)
    environment = StandaloneEnvironment(bench.engine)
    found = collect_partitions(plan.partitioner, grid_size=4, environment=environment)
    assert len(found) == 4
    job = bench.submit(plan.step, {partition.key: partition.context for partition in found})
    bench.work("orders")
    assert {row["status"] for row in bench.partitions(job).values()} == {"COMPLETED"}
    assert sum(row["result"]["read"] for row in bench.partitions(job).values()) == 2500
    with bench.engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(orders.findings)).scalar_one() == 25


def test_bad_lines_are_skipped_and_empty_ones_filtered(bench: Bench) -> None:
    chunks = load(EXAMPLES / "chunks.py")
    bench.create_tables()
    chunks.metadata.create_all(bench.engine)
    amounts = {3: "", 7: "three euros", 8: "?"}
    with bench.engine.begin() as connection:
        rows = [{"id": number, "amount": amounts.get(number, "1.25")} for number in range(1, 1201)]
        connection.execute(insert(chunks.lines), rows)
    job = bench.submit("book_lines", {"all": {"min_value": 1, "max_value": 1200}})
    bench.work("chunks")
    result = bench.partitions(job)["all"]["result"]
    assert (result["read"], result["write"], result["filter"], result["skip"]) == (1200, 1197, 1, 2)
    with bench.engine.connect() as connection:
        assert connection.execute(select(func.sum(chunks.booked.c.cents))).scalar_one() == 1197 * 125


def test_an_invoice_sent_again_is_the_same_file(bench: Bench) -> None:
    bench.create_tables()
    same = ("--job-name", "invoices", "--parameters", '{"month": "2026-11"}')
    contexts = {"acme": {"customer": "acme"}, "globex": {"customer": "globex"}}
    job = bench.submit("send_invoice", contexts, *same)
    assert bench.submit("send_invoice", contexts, *same) == job
    bench.work("outside")
    files = {row["result"]["file"] for row in bench.partitions(job).values()}
    assert {path.name for path in bench.directory.glob("*.txt")} == files
    assert len(files) == 2


def _until(check: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 20
    while not (found := check()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def test_a_stopped_step_goes_on_at_its_checkpoint(bench: Bench) -> None:
    bench.create_tables()
    repository = JobRepository.connect(DatabaseConfig(url=bench.url))
    job = bench.submit("count_slowly", {"all": {"until": 60, "pause": 0.05}})
    worker = bench.start_worker("outside", "--heartbeat", "0.2")
    try:
        _until(lambda: repository.reading.partitions(int(job))[0].checkpoint)
        bench.run("stop", job)
        _until(lambda: not repository.reading.execution(int(job)).status.is_active)
    finally:
        worker.terminate()
        _, log = worker.communicate(timeout=20)
    assert worker.returncode == 0, log
    stopped = bench.partitions(job)["all"]
    assert stopped["status"] == "STOPPED"
    assert 0 < stopped["checkpoint"]["done"] < 60
    again = bench.run("restart", job).strip()
    assert again != job
    bench.work("outside")
    assert bench.partitions(again)["all"]["result"] == 60
    repository.close()


@pytest.mark.resilience_long
def test_a_project_tests_its_dag(tmp_path: Path) -> None:
    (tmp_path / "dags").mkdir()
    copy(ROOT / "dags" / "tutorial_greetings.py", tmp_path / "dags")
    copy(EXAMPLES / "greetings.py", tmp_path)
    copytree(EXAMPLES / "dag_tests", tmp_path / "tests")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW_", "DBPARTITION_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests", "-q"],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("4 passed")


@pytest.mark.parametrize("path", DAGS, ids=lambda path: path.name)
def test_dags_import_without_a_database_or_a_worker(path: Path) -> None:
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(dag_folder=str(path), safe_mode=False)
    assert not bag.import_errors
    assert bag.dags
    assert all(dag.tasks for dag in bag.dags.values())


def statements() -> list[str]:
    text = re.sub(r"^-- .*$", "", (EXAMPLES / "looking.sql").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [statement.strip() for statement in text.split(";") if statement.strip()]


def test_the_queries_for_people_run(repository: JobRepository, database: Database) -> None:
    engine = database.plain_engine()
    with engine.connect() as connection:
        for statement in statements():
            connection.exec_driver_sql(statement)
    engine.dispose()


def test_the_roles_can_be_given_to_users(postgres_repository: JobRepository, postgres: Database) -> None:
    grants = migrations.print_sql("postgresql", postgres.schema)["grants.sql"]
    users = re.sub(r"^-- .*$", "", (EXAMPLES / "roles.sql").read_text(encoding="utf-8"), flags=re.MULTILINE)
    with postgres_repository.engine.connect() as connection:
        connection.exec_driver_sql(grants.replace("%", "%%"))
        connection.exec_driver_sql(users)
        connection.exec_driver_sql(f"SET LOCAL ROLE worker; SELECT * FROM {postgres.schema}.batch_cluster")
        connection.rollback()  # roles are the whole server's
