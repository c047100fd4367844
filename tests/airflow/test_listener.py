"""What a person's click stops where Airflow calls no on_kill."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_dbpartition import listener
from airflow_dbpartition.repository import JobRepository
from tests.airflow.test_tries import execute, operator, sensor
from tests.airflow.worlds import Try
from tests.scenarios import add_node


def instance(this: Try, task: Any, **rendered: Any) -> Any:
    """What the API server has of a task instance."""
    fields = SimpleNamespace(rendered_fields=rendered) if rendered else None
    return SimpleNamespace(id=this.id, task=task, rendered_task_instance_fields=fields)


def settled() -> None:
    """Wait for the listener's threads."""
    for thread in threading.enumerate():
        if thread.name == "dbpartition-listener":
            thread.join(30)


def status(repository: JobRepository, job_execution_id: int) -> str:
    return repository.reading.execution(job_execution_id).status.value


def test_a_task_that_is_marked_failed_stops_what_it_owns(connected: JobRepository) -> None:
    add_node(connected)
    this, other = Try(), Try(run_id="other")
    mine, others = execute(operator(), this), execute(operator(), other)
    listener.on_task_instance_failed(None, instance(this, operator()), "marked")
    settled()
    assert (status(connected, mine), status(connected, others)) == ("STOPPED", "STARTING")
    assert "marked failed" in str(connected.reading.execution(mine).exit_message)


@pytest.mark.parametrize("hook", [listener.on_task_instance_success, listener.on_task_instance_skipped])
def test_so_does_a_wait_that_is_marked_success_or_skipped(connected: JobRepository, hook: Any) -> None:
    add_node(connected)
    this = Try()
    planned = execute(operator(), this)
    hook(None, instance(this, operator(wait_for_completion=True)))
    settled()
    assert status(connected, planned) == "STOPPED"


def test_a_plan_that_nobody_waits_for_goes_on_when_it_is_marked_success(connected: JobRepository) -> None:
    add_node(connected)
    this = Try()
    planned = execute(operator(), this)
    listener.on_task_instance_success(None, instance(this, operator()))
    settled()
    assert status(connected, planned) == "STARTING"


def test_an_end_that_is_no_persons_click_stops_nothing(connected: JobRepository) -> None:
    add_node(connected)
    this = Try()
    planned = execute(operator(), this)
    listener.on_task_instance_failed("running", instance(this, operator()), "an error")
    listener.on_task_instance_success("running", instance(this, operator(wait_for_completion=True)))
    settled()
    assert status(connected, planned) == "STARTING"


def test_an_older_try_stops_nothing(connected: JobRepository) -> None:
    add_node(connected)
    this = Try(max_tries=1)
    planned = execute(operator(), this)
    execute(operator(), this.retried())
    listener.on_task_instance_failed(None, instance(this, operator()), "marked")
    settled()
    assert status(connected, planned) == "STARTING"


def test_a_connection_that_was_a_template_is_taken_as_it_was_rendered(connected: JobRepository) -> None:
    add_node(connected)
    this = Try()
    planned = execute(operator(), this)
    written = sensor(planned, repository_conn_id="{{ params.where }}")
    listener.on_task_instance_failed(None, instance(this, written, repository_conn_id="repo"), "marked")
    settled()
    assert status(connected, planned) == "STOPPED"


@pytest.mark.parametrize("task", [None, SimpleNamespace(), SimpleNamespace(template_fields=("bash_command",))])
def test_tasks_of_others_cost_nothing(task: Any) -> None:
    before = threading.active_count()
    for hook in (listener.on_task_instance_success, listener.on_task_instance_skipped):
        hook(None, instance(Try(), task))
    listener.on_task_instance_failed(None, instance(Try(), task), "marked")
    assert threading.active_count() == before


def test_a_database_that_is_away_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    listener.on_task_instance_failed(None, instance(Try(), operator(repository_conn_id="nowhere")), "marked")
    settled()
    assert "a job execution was not stopped" in caplog.text
