"""The DAGs of the table of clicks: `{variant}_{way}`. What is clicked on is always the task `work`.

Of an operator, `work` is the operator itself; of a sensor, it waits for the task `plan`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from airflow.sdk import DAG, get_current_context, task

from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.sensors import PartitionCompletionSensor

PARTITIONS = "{{ dag_run.conf['partitions'] }}"
RETRIES: dict[str, Any] = {"retries": 1, "retry_delay": timedelta(seconds=1)}
# Airflow spends a try every few seconds while tasks cannot reach its API server, which a slow machine starts slowly.
MANY_RETRIES: dict[str, Any] = {**RETRIES, "retries": 20}
TIMEOUT_S = 5
EXECUTION_TIMEOUT = timedelta(seconds=8)

OPERATORS: dict[str, dict[str, Any]] = {
    "blocking": {"wait_for_completion": True, "deferrable": False, "poll_interval": 1},
    "deferring": {"wait_for_completion": True, "deferrable": True, "poll_interval": 1},
    "planning": {},
}
SENSORS: dict[str, dict[str, Any]] = {
    "poking": {"mode": "poke", "deferrable": False, "poke_interval": 1},
    "rescheduling": {"mode": "reschedule", "deferrable": False, "poke_interval": 8},
    "watching": {"deferrable": True, "poke_interval": 1},
}


def gate(name: str) -> Path:
    return Path(os.environ["STORY_GATES"]) / name


def hold_until(is_over: Callable[[], bool], here: str) -> None:
    """Say that a process is here, and keep it."""
    gate(f"{here}.{uuid4()}").touch()
    while not is_over():
        time.sleep(0.05)


class HeldPartitioner:
    """Plans once the test lets it."""

    template_fields = ("partitions", "run_id")

    def __init__(self) -> None:
        self.partitions: Any = PARTITIONS
        self.run_id = "{{ run_id }}"

    def partition(self, grid_size: int) -> Any:
        hold_until(gate(f"{self.run_id}.plan").exists, f"{self.run_id}.planning")
        return self.partitions


class Lingers:
    """A run's first process stays where it has told of its execution, but has not begun to wait."""

    def _show(self: Any, context: Any, job_execution_id: int, **state: Any) -> None:
        super()._show(context, job_execution_id, **state)  # type: ignore[misc]
        here = f"{context['run_id']}.lingering"
        if not any(gate("").glob(f"{here}.*")):
            hold_until(lambda: self._sigterm, here)


class LingeringOperator(Lingers, PartitionedStepOperator):
    pass


class LingeringSensor(Lingers, PartitionCompletionSensor):
    pass


class HeldOperator(PartitionedStepOperator):
    """Of a mapping that is expanded again, the second plans once the test lets it."""

    def execute(self, context: Any) -> Any:
        ti = context["ti"]
        if ti.map_index == 1 and ti.try_number > 1:
            hold_until(gate(f"{ti.run_id}.plan").exists, f"{ti.run_id}.planning")
        return super().execute(context)


def dag(dag_id: str) -> DAG:
    return DAG(dag_id, schedule=None, catchup=False, render_template_as_native_obj=True)


def plan(task_id: str, kind: Any = PartitionedStepOperator, **options: Any) -> Any:
    return kind(**{"task_id": task_id, "step": "act", "partitioner": PARTITIONS, **options})


def sensor(planned: Any, task_id: str = "work", kind: Any = PartitionCompletionSensor, **options: Any) -> None:
    planned >> kind(task_id=task_id, job_execution_id=planned.output, **options)


def written_down(what: str) -> Any:
    """By the test, for this run."""
    return json.loads(gate(f"{get_current_context()['run_id']}.{what}").read_text())


@task
def slices() -> list[dict[str, dict[str, Any]]]:
    return list(written_down("slices"))


@task
def chosen(launched: Any) -> list[int]:
    """Job executions of the mapped operators with the indexes that the test has written down."""
    return [launched[map_index] for map_index in written_down("chosen")]


for way, waits in OPERATORS.items():
    with dag(f"plain_{way}"):
        plan("work", **waits)
    with dag(f"retrying_{way}"):
        plan("work", **waits, **RETRIES)
    with dag(f"paused_{way}"):
        plan("work", **waits)
    with dag(f"held_{way}"):
        plan("work", partitioner=HeldPartitioner(), **waits, **RETRIES)
    with dag(f"lingering_{way}"):
        plan("work", LingeringOperator, **waits, **RETRIES)
    with dag(f"timed_{way}"):
        held = {"partitioner": HeldPartitioner()} if way == "planning" else {}
        plan("work", execution_timeout=EXECUTION_TIMEOUT, **waits, **held)
    with dag(f"persistent_{way}"):
        plan("work", **waits, **held, **MANY_RETRIES)
    with dag(f"impatient_{way}"):
        work = plan("work", timeout=TIMEOUT_S, **waits, **RETRIES)
        if way == "planning":
            sensor(work, "wait", poke_interval=1)
    with dag(f"mapped_{way}"):
        PartitionedStepOperator.partial(task_id="work", step="act", **waits).expand(partitioner=slices())

for way, waits in SENSORS.items():
    with dag(f"plain_{way}"):
        sensor(plan("plan"), **waits)
    with dag(f"retrying_{way}"):
        sensor(plan("plan"), **waits, **RETRIES)
    with dag(f"persistent_{way}"):
        sensor(plan("plan"), **waits, **MANY_RETRIES)
    with dag(f"paused_{way}"):
        sensor(plan("plan"), **waits)
    with dag(f"lingering_{way}"):
        sensor(plan("plan"), kind=LingeringSensor, **waits, **RETRIES)
    with dag(f"timed_{way}"):
        sensor(plan("plan"), execution_timeout=EXECUTION_TIMEOUT, **waits)
    with dag(f"impatient_{way}"):
        sensor(plan("plan"), timeout=TIMEOUT_S, **waits, **RETRIES)
    with dag(f"soft_{way}"):
        sensor(plan("plan"), soft_fail=True, **waits)
    with dag(f"impatient_soft_{way}"):
        sensor(plan("plan"), soft_fail=True, timeout=TIMEOUT_S, **waits)
    with dag(f"mapped_{way}"):
        cut = PartitionedStepOperator.partial(task_id="plan", step="act").expand(partitioner=slices())
        PartitionCompletionSensor.partial(task_id="work", **waits).expand(job_execution_id=cut.output)
    with dag(f"mapped_held_{way}"):
        cut = HeldOperator.partial(task_id="plan", step="act").expand(partitioner=slices())
        PartitionCompletionSensor.partial(task_id="work", **waits).expand(job_execution_id=cut.output)
    with dag(f"chosen_{way}"):
        cut = PartitionedStepOperator.partial(task_id="plan", step="act").expand(partitioner=slices())
        PartitionCompletionSensor.partial(task_id="work", **waits).expand(job_execution_id=chosen(cut.output))
