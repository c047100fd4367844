"""What a person's click stops where Airflow calls no on_kill."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.models.renderedtifields import RenderedTaskInstanceFields
from sqlalchemy.exc import InvalidRequestError

from airflow_dbpartition import listener
from airflow_dbpartition.repository import JobRepository
from tests.airflow.test_tries import execute, operator, sensor
from tests.airflow.worlds import Try
from tests.scenarios import add_node


def instance(this: Try, task: Any, **rendered: Any) -> Any:
    """What the API server has of a task instance: its row, without the task, and what was rendered for it."""
    fields = {name: getattr(task, name) for name in getattr(task, "template_fields", ())}
    stored = SimpleNamespace(rendered_fields={**fields, **rendered})
    return SimpleNamespace(id=this.id, task=None, rendered_task_instance_fields=stored)


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


class NotLoaded:
    """A row whose relationship Airflow has not loaded; of a run that was marked, for instance."""

    def __init__(self, this: Try) -> None:
        self.id = this.id

    @property
    def rendered_task_instance_fields(self) -> Any:
        raise InvalidRequestError("lazy='raise'")


def test_what_airflow_has_not_loaded_is_read(connected: JobRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    add_node(connected)
    this = Try()
    planned = execute(operator(), this)
    fields = instance(this, operator()).rendered_task_instance_fields.rendered_fields
    monkeypatch.setattr(RenderedTaskInstanceFields, "get_templated_fields", lambda _ti, session: fields)
    monkeypatch.setattr("sqlalchemy.orm.object_session", lambda _ti: None)
    listener.on_task_instance_failed(None, NotLoaded(this), "marked")
    settled()
    assert status(connected, planned) == "STOPPED"


@pytest.mark.parametrize(
    "stored",
    [None, SimpleNamespace(rendered_fields={}), SimpleNamespace(rendered_fields={"repository_conn_id": "anothers"})],
)
def test_tasks_of_others_cost_nothing(stored: Any) -> None:
    before = threading.active_count()
    others = SimpleNamespace(id=Try().id, task=None, rendered_task_instance_fields=stored)
    for hook in (listener.on_task_instance_success, listener.on_task_instance_skipped):
        hook(None, others)
    listener.on_task_instance_failed(None, others, "marked")
    assert threading.active_count() == before


def test_a_database_that_is_away_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    listener.on_task_instance_failed(None, instance(Try(), operator(repository_conn_id="nowhere")), "marked")
    settled()
    assert "a job execution was not stopped" in caplog.text
