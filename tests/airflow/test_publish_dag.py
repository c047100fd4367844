"""The DAG publish_pending_records: its date, its templates, its job, and its task with real workers and moto."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import date, datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pendulum
import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk.exceptions import AirflowFailException
from sqlalchemy import func, select
from sqlalchemy.engine import make_url

pytest.importorskip("moto")

from airflow_dbpartition.demo.processes import Guard
from airflow_dbpartition.demo.records import make_records, records
from airflow_dbpartition.demo.stage import dags_folder
from airflow_dbpartition.repository import JobRepository
from tests.airflow.worlds import Try, connection_to, define
from tests.databases import Database
from tests.worker.processes import QUICK, Fleet
from tests.worker.sns import CREDENTIALS, moto_server

ARN = "arn:aws:sns:eu-central-1:123456789012:records"
STEPS = "airflow_dbpartition.demo.publishing"


def read_dag() -> Any:
    bag = DagBag(dag_folder=str(dags_folder() / "publish_pending_records.py"))
    assert not bag.import_errors
    return bag.dags["publish_pending_records"]


dag = read_dag()


def run(param: str | None = None, partition_key: str | None = None, *, topic_arn: str = ARN) -> dict[str, Any]:
    """What Airflow gives the task of a run that has no logical date."""
    return {
        "params": {"reference_date": param},
        "dag_run": SimpleNamespace(partition_key=partition_key),
        "var": {"value": SimpleNamespace(records_topic_arn=topic_arn)},
    }


def rendered(context: dict[str, Any]) -> Any:
    """The task as it stands when it runs, apart from all other runs."""
    task = copy.copy(dag.get_task("publish"))
    task.render_template_fields(context)
    return task


# --- the date ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "day"),
    [
        (run("2026-11-02"), "2026-11-02"),
        (run(None, "2026-11-03"), "2026-11-03"),
        (run("2026-11-02", "2026-11-03"), "2026-11-02"),
    ],
)
def test_the_date_is_what_was_asked_for_else_the_runs_partition(context: dict[str, Any], day: str) -> None:
    task = rendered(context)
    assert task.job_parameters == {"reference_date": day}
    assert task.partitioner.where == f"status = 'PENDING' AND reference_date = '{day}'"
    assert task.partitioner.context == {"reference_date": day, "topic_arn": ARN, "chunk_size": 100}


@pytest.mark.parametrize(
    ("context", "words"),
    [
        (run(), "got None"),
        (run("yesterday"), "got 'yesterday'"),
        (run(None, "eu"), "got 'eu'"),
        (run("2026-11-02' OR '1' = '1"), "got \"2026-11-02' OR"),
    ],
)
def test_what_is_no_date_fails_the_task_and_gets_into_no_statement(context: dict[str, Any], words: str) -> None:
    with pytest.raises(AirflowFailException, match="expected a reference date such as 2026-11-02") as caught:
        rendered(context)
    assert words in str(caught.value)


def test_a_run_of_the_schedule_is_for_the_day_before_and_has_no_logical_date() -> None:
    from airflow.serialization.serialized_objects import DagSerialization
    from airflow.timetables.base import TimeRestriction

    timetable = DagSerialization.from_dict(DagSerialization.to_dict(dag)).timetable
    since = pendulum.datetime(2026, 11, 2, 12)
    info: Any = timetable.next_dagrun_info_v2(
        last_dagrun_info=None, restriction=TimeRestriction(earliest=since, latest=None, catchup=True)
    )
    assert (info.run_after, info.partition_key) == (datetime(2026, 11, 3, 2, tzinfo=timezone.utc), "2026-11-02")
    assert info.logical_date is None


# --- the job -------------------------------------------------------------------------------------------------------


@pytest.fixture
def database(postgres: Database) -> Database:
    """PostgreSQL, where the records are found by their plain name."""
    url = make_url(postgres.url).update_query_dict({"options": f"-csearch_path={postgres.schema}"})
    return Database(postgres.name, url.render_as_string(hide_password=False), postgres.schema)


@pytest.fixture
def repository(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobRepository]:
    define(monkeypatch, "dbpartition_default", connection_to(database, options=f"-csearch_path={database.schema}"))
    repository = database.migrated()
    yield repository
    repository.close()


def marks(repository: JobRepository) -> dict[tuple[date, str], int]:
    query = select(records.c.reference_date, records.c.status, func.count()).group_by(
        *records.c["reference_date", "status"]
    )
    with repository.engine.connect() as connection:
        return {(day, status): count for day, status, count in connection.execute(query)}


@pytest.mark.slow
def test_the_task_publishes_each_date_once_however_many_runs_ask_for_it(
    database: Database, repository: JobRepository, tmp_path: Path
) -> None:
    days = date(2026, 11, 2), date(2026, 11, 3)
    for day in days:
        make_records(repository.engine, day, 30, changes={7: {"cents": 0}})
    guard = Guard()
    try:
        with moto_server(tmp_path, guard) as moto, Fleet(database, repository, tmp_path, guard, QUICK) as fleet:
            topic = moto.topic("records")
            fleet.start(imports=STEPS, environment={**CREDENTIALS, "AWS_ENDPOINT_URL_SNS": moto.url})

            def execute(day: date, this: Try) -> Any:
                context = run(partition_key=day.isoformat(), topic_arn=topic.arn)
                task = rendered(context)
                task.deferrable, task.poll_interval = False, 0.1
                return task.execute({**this.context(), **context})

            first = Try(dag_id=dag.dag_id, run_id="scheduled", task_id="publish")
            summary = execute(days[0], first)
            assert (summary["status"], summary["partitions"]["completed"]) == ("COMPLETED", 4)
            assert (summary["counters"]["write"], summary["counters"]["skip"]) == (29, 1)
            assert marks(repository) == {
                (days[0], "PUBLISHED"): 29,
                (days[0], "INVALID"): 1,
                (days[1], "PENDING"): 30,
            }
            make_records(repository.engine, days[0], 5)  # they came late
            again = execute(days[0], Try(dag_id=dag.dag_id, run_id="manual", task_id="publish"))
            assert again["job_execution_id"] == summary["job_execution_id"]
            other = execute(days[1], Try(dag_id=dag.dag_id, run_id="next", task_id="publish"))
            assert other["job_execution_id"] != summary["job_execution_id"]
            assert len(topic.receive()) == 58

            cleared = execute(days[0], first.cleared(retries=3))
            assert (cleared["counters"]["write"], cleared["counters"]["skip"]) == (5, 0)
            assert len(topic.receive()) == 5
            assert marks(repository) == {
                (days[0], "PUBLISHED"): 34,
                (days[0], "INVALID"): 1,
                (days[1], "PUBLISHED"): 29,
                (days[1], "INVALID"): 1,
            }
    finally:
        guard.close()
