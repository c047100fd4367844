"""How a task of ours ends in Airflow: by our errors, or by a SIGTERM, and in no case by a false success.

Airflow 3.3 calls `on_kill` in the signal's handler and then lets the task go on. The handler runs in the middle of
anything, a query or a message to the supervisor included, so it only raises a flag; the wait sees it and raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from airflow_dbpartition.errors import (
    ConfigurationError,
    DatabaseError,
    DbPartitionError,
    JobAbandonedError,
    LostPartitionsError,
    SchemaError,
    UnknownStepError,
    WaitTimeoutError,
)

RUNNING = "running"
_SLICE_S = 0.25


class InterruptedTaskError(AirflowException):
    """The task's process was asked to end while the work goes on elsewhere; Airflow may retry the task."""


def as_airflow_error(error: DbPartitionError) -> AirflowException:
    """Airflow's error for one of ours: retries are only spent on what another try may mend.

    A wrong argument, a missed deadline or a decision that a person has to take fails the task at once.
    """
    hopeless = isinstance(error, (LostPartitionsError, JobAbandonedError, WaitTimeoutError)) or (
        isinstance(error, ConfigurationError) and not isinstance(error, UnknownStepError)
    )
    return (AirflowFailException if hopeless else AirflowException)(str(error))


@contextmanager
def airflow_errors() -> Iterator[None]:
    """Turn our errors into Airflow's; the cause is kept where it is the author's own.

    A driver's error is not: its text is in ours already, in one line, with its secrets masked.
    """
    try:
        yield
    except (DatabaseError, SchemaError) as error:
        raise as_airflow_error(error) from None
    except DbPartitionError as error:
        raise as_airflow_error(error) from error.__cause__


class Interruptible:
    """What an operator that waits has on top of BaseOperator."""

    _sigterm = False

    def on_kill(self) -> None:
        """Note the signal, and nothing else."""
        self._sigterm = True

    def _pause(self, seconds: float) -> None:
        """Sleep, but not through a SIGTERM."""
        end = time.monotonic() + seconds
        while not self._sigterm and (left := end - time.monotonic()) > 0:
            time.sleep(min(_SLICE_S, left))

    def _heed_sigterm_before_launch(self) -> None:
        """As a wait does, where there is nothing to stop or to leave alone."""
        if self._sigterm:
            raise InterruptedTaskError("the task's process was asked to end (SIGTERM): nothing had been launched")

    def _interrupted(
        self, ti: Any, job_execution_id: int, *, on_sigterm: str, stop: Callable[[str], str], is_leaving: bool
    ) -> None:
        """Stop the execution or leave it alone, and raise.

        Args:
            ti: the running task instance.
            on_sigterm: "detach" leaves it running when a pod is drained, "stop" does not. A person's kill stops it.
            stop: stops it, fenced by the owner's token, and says what happened.
            is_leaving: the task is about to give its slot back anyhow; a drain that leaves the execution running then
                raises nothing, and costs no retry.
        """
        was_killed, state = _state_of(ti)
        if was_killed:
            what = stop(f"the task was killed in Airflow (its state: {state})")
        elif on_sigterm == "stop":
            what = stop("the task's process was terminated")
        elif is_leaving:
            return
        else:
            what = f"job execution {job_execution_id} goes on without this task; a retry attaches to it"
        raise InterruptedTaskError(f"the task's process was asked to end (SIGTERM): {what}")


def _state_of(ti: Any) -> tuple[bool, str]:
    """Whether a person took the running state away from the task, and which state it has now."""
    try:
        states = ti.get_task_states(
            dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=ti.map_index
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, we do not know; a drain may have cut the network
        return False, f"unknown: {error}"
    found = states.get(ti.run_id, {})
    if not found:
        return False, "unknown"
    state = next(iter(found.values()))
    return state != RUNNING, str(state or "cleared")
