"""The six ways in which a task has to do with an execution, and how a run comes to wait in each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tests.airflow.deployment import Deployment, Run, gated, wait_until

WORK = "work"  # the task that is clicked on, in every DAG


@dataclass(frozen=True)
class Way:
    """One column of the table.

    Args:
        name: in the ids of DAGs and tests.
        title: on the page, after what it is `of`.
        of: what the task is.
        waits_in: where it is while it waits; "nothing": it ends once the plan is written.
    """

    name: str
    title: str
    of: Literal["operator", "sensor"]
    waits_in: Literal["process", "triggerer", "schedule", "nothing"]


BLOCKING = Way("blocking", "blocking", "operator", "process")
DEFERRING = Way("deferring", "deferred", "operator", "triggerer")
PLANNING = Way("planning", "not waiting", "operator", "nothing")
POKING = Way("poking", "poke", "sensor", "process")
RESCHEDULING = Way("rescheduling", "reschedule", "sensor", "schedule")
WATCHING = Way("watching", "deferred", "sensor", "triggerer")

WAYS = (BLOCKING, DEFERRING, PLANNING, POKING, RESCHEDULING, WATCHING)
OPERATORS = (BLOCKING, DEFERRING, PLANNING)
SENSORS = (POKING, RESCHEDULING, WATCHING)
WAITING = (BLOCKING, DEFERRING, POKING, RESCHEDULING, WATCHING)
IN_PROCESS = (BLOCKING, POKING)
IN_TRIGGERER = (DEFERRING, WATCHING)


def launch(
    deployment: Deployment, way: Way, label: str, partitions: object = None, *, variant: str = "plain", **conf: Any
) -> Run:
    """Start a run of the DAG `{variant}_{way}`; by default its two partitions wait for `Run.open`."""
    given = gated(2) if partitions is None else partitions
    return deployment.run(f"{variant}_{way.name}", f"{label}_{way.name}", given, **conf)


def launch_and_wait(deployment: Deployment, way: Way, label: str, *, variant: str = "plain") -> Run:
    """Start a run with two partitions, and return when both are being worked on and the task waits for them."""
    run = launch(deployment, way, label, variant=variant)
    until_it_waits(run, way)
    return run


def until_it_waits(run: Run, way: Way, *, try_number: int = 1) -> None:
    """Return when this try waits, both partitions are begun, and so a click finds it in the middle of it all."""
    run.wait_for_claims(2)
    if way.waits_in == "process":
        run.wait_for(WORK, "running", try_number=try_number)
        run.wait_for_log(WORK, "2 running", try_number=try_number)
    elif way.waits_in == "triggerer":
        run.wait_for_trigger(WORK, try_number=try_number)
    elif way.waits_in == "schedule":
        run.wait_for(WORK, "up_for_reschedule", try_number=try_number)
    else:
        run.wait_for(WORK, "success", try_number=try_number)
        assert run.ends() == "success"  # Airflow forgets a task that is cleared while it ends the run


def until_all_is_done(run: Run, way: Way) -> None:
    """Open the gate, and return when the run has succeeded and its execution has completed."""
    run.open()
    assert run.ends() == "success"
    run.wait_for_status("COMPLETED")  # where nobody waits, the run ends before the work
    if way.waits_in != "nothing":
        assert run.xcom(WORK)["partitions"]["completed"] == 2


def assert_done_once_by_one_execution(run: Run) -> None:
    assert run.execution().status.value == "COMPLETED"
    assert run.begun() == run.done() == {"p0": 1, "p1": 1}


def until_lingering(run: Run) -> None:
    """Wait until the first try has told of its execution, and is kept there."""
    wait_until(lambda: run.marks("lingering") >= 1, f"{run.run_id} lingers", every_s=0.2)


def until_planning(run: Run, *, times: int = 1) -> None:
    """Wait until a partitioner runs (again); the test's `Run.let_plan` lets it go on."""
    wait_until(lambda: run.marks("planning") >= times, f"{run.run_id} plans", every_s=0.2)
