"""The tasks that purge and stop."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException

from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.operators import PurgeJobRepositoryOperator, StopJobExecutionOperator
from airflow_dbpartition.repository import JobRepository
from tests.airflow.test_tries import execute, operator
from tests.airflow.worlds import Try
from tests.scenarios import add_node, finish_all, statuses


def purge(**options: Any) -> PurgeJobRepositoryOperator:
    return PurgeJobRepositoryOperator(
        **{"task_id": "purge", "older_than": timedelta(days=30), "repository_conn_id": "repo", **options}
    )


def stop(**options: Any) -> StopJobExecutionOperator:
    return StopJobExecutionOperator(
        **{"task_id": "stop", "reason": "the source was wrong", "repository_conn_id": "repo", **options}
    )


# --- purge ---------------------------------------------------------------------------------------------------------


def test_a_purge_deletes_what_is_over_and_old_and_nothing_that_is_active(connected: JobRepository) -> None:
    add_node(connected)
    over = execute(operator(), Try())
    finish_all(connected, over)
    active = execute(operator(), Try(run_id="other"))
    assert execute(purge(), Try()) == {"instances": 0, "executions": 0, "partitions": 0, "nodes": 0}
    purged = execute(purge(older_than="0.000001"), Try())
    assert purged == {"instances": 1, "executions": 1, "partitions": 2, "nodes": 0}
    assert [found.job_execution_id for found in connected.reading.recent()] == [active]


@pytest.mark.parametrize("older_than", [0, -1, "soon", timedelta(0), True])
def test_an_age_that_is_none_is_refused_when_the_dag_is_read(older_than: Any) -> None:
    with pytest.raises(ConfigurationError, match="task 'purge': expected older_than to be a timedelta or a positive"):
        purge(older_than=older_than)


# --- stop ----------------------------------------------------------------------------------------------------------


def test_a_job_is_stopped_by_its_id_or_its_name_whoever_owns_it(connected: JobRepository) -> None:
    add_node(connected)
    first = execute(operator(), Try())
    assert execute(stop(job_execution_id=first), Try(run_id="other")) == "STOPPED"
    assert statuses(connected, first) == {"STOPPED": 2}
    assert connected.reading.execution(first).exit_message == "the source was wrong"

    named = {"job_name": "daily", "job_parameters": {"day": "Monday"}}
    second = execute(operator(**named), Try())
    assert execute(stop(**named), Try(run_id="other")) == "STOPPED"
    assert statuses(connected, second) == {"STOPPED": 2}


def test_what_has_ended_or_was_never_launched_is_left_as_it_is(connected: JobRepository) -> None:
    add_node(connected)
    over = execute(operator(), Try())
    finish_all(connected, over)
    assert execute(stop(job_execution_id=over), Try()) == "COMPLETED"
    assert execute(stop(job_name="never"), Try()) is None


def test_an_execution_that_is_not_there_is_named(connected: JobRepository) -> None:
    with pytest.raises(AirflowException, match="99"):
        execute(stop(job_execution_id=99), Try())


def test_a_stop_wants_an_id_or_a_name() -> None:
    for options in ({}, {"job_execution_id": 1, "job_name": "daily"}):
        with pytest.raises(ConfigurationError, match="expected job_execution_id, or job_name"):
            stop(**options)
