"""What Airflow's own kill does not reach: a task that is marked while it defers or waits to be rescheduled.

Airflow calls `on_kill` only in a running process or trigger. A task that waits for its trigger, whose triggerer is
down, or that is up for reschedule has neither; but the API server, where the person clicked, tells its listeners.

What the API server has of a task instance is its row, without the task. So the arguments are read where Airflow stores
them as they were rendered, which it does for the newest runs of a DAG (`[core] num_dag_runs_to_retain_rendered_fields`,
30): of older ones only a task that is running or deferred can be stopped by a click.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from airflow.listeners import hookimpl

log = logging.getLogger(__name__)

_CONNECTION = "repository_conn_id"
_OURS = {_CONNECTION, "on_sigterm"}


@hookimpl
def on_task_instance_failed(previous_state: Any, task_instance: Any, error: Any) -> None:  # noqa: ARG001
    """Marked failed by a person: whatever the task was doing is to stop."""
    if previous_state is None:
        _stop(task_instance, "failed")


@hookimpl
def on_task_instance_success(previous_state: Any, task_instance: Any) -> None:
    """Marked success by a person: what the task was waiting for is to stop; a plan that nobody waits for goes on."""
    if previous_state is None:
        _stop(task_instance, "success", only_waiting=True)


@hookimpl
def on_task_instance_skipped(previous_state: Any, task_instance: Any) -> None:
    """Marked skipped by a person."""
    if previous_state is None:
        _stop(task_instance, "skipped")


def _stop(ti: Any, state: str, *, only_waiting: bool = False) -> None:
    """In a thread: the person's click does not wait for our database. Fenced by the try's own token, and never raises.

    Only a person's click comes without a previous state; processes and the scheduler name theirs.
    """
    try:
        arguments = _arguments(ti)
        if not arguments.keys() >= _OURS or (only_waiting and not _waits(arguments)):
            return
        target = (str(arguments[_CONNECTION]), str(ti.id), f"the task was marked {state} in Airflow")
    except Exception:
        log.exception("a listener of dbpartition failed")
        return
    threading.Thread(target=_stop_owned, args=target, name="dbpartition-listener", daemon=True).start()


def _stop_owned(conn_id: str, owner_token: str, reason: str) -> None:
    try:
        from airflow_dbpartition.hooks import JobRepositoryHook

        with JobRepositoryHook(conn_id).repository(pool_size=0) as repository:
            for job_execution_id in repository.reading.owned_by(owner_token):
                status = repository.executions.stop(job_execution_id, owner_token=owner_token, reason=reason)
                log.info("job execution %s is %s: %s", job_execution_id, status, reason)
    except Exception as error:  # noqa: BLE001 - nobody is there to catch it
        log.warning("a job execution was not stopped (%s): %s", reason, error)


def _waits(arguments: Mapping[str, Any]) -> bool:
    """Whether the task waits for what it owns: a sensor, or an operator with `wait_for_completion`."""
    return arguments.get("wait_for_completion", True) not in (False, "False", "false")


def _arguments(ti: Any) -> Mapping[str, Any]:
    """The arguments of the task as they were rendered; empty where it has not begun yet, or Airflow has forgotten."""
    from sqlalchemy.exc import InvalidRequestError

    try:
        rendered = ti.rendered_task_instance_fields
    except InvalidRequestError:  # Airflow has not loaded them, and forbids that attributes do
        from airflow.models.renderedtifields import RenderedTaskInstanceFields
        from sqlalchemy.orm import object_session

        session: Any = object_session(ti)
        return RenderedTaskInstanceFields.get_templated_fields(ti, session=session) or {}
    return {} if rendered is None else rendered.rendered_fields
