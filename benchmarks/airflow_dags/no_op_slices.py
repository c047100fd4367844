"""The same number of slices that do nothing, by dynamic task mapping and as partitions: two DAGs for each size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from airflow.sdk import DAG, task

from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.sensors import PartitionCompletionSensor

SIZES_VARIABLE = "BENCHMARK_SLICES"
AT_ONCE_VARIABLE = "BENCHMARK_TASKS_AT_ONCE"


def contexts(size: int, _grid_size: int) -> Iterator[dict[str, int]]:
    return ({"number": number} for number in range(size))


for size in map(int, os.environ.get(SIZES_VARIABLE, "5").split(",")):
    at_once = int(os.environ.get(AT_ONCE_VARIABLE, "16"))
    with DAG(f"mapped_{size}", schedule=None, is_paused_upon_creation=False, max_active_tasks=at_once) as globals()[
        f"mapped_{size}"
    ]:

        @task
        def noop(number: int) -> None:
            """Do nothing."""

        noop.expand(number=list(range(size)))

    with DAG(f"partitioned_{size}", schedule=None, is_paused_upon_creation=False) as globals()[f"partitioned_{size}"]:
        plan = PartitionedStepOperator(task_id="plan", step="noop", partitioner=partial(contexts, size))
        done = PartitionCompletionSensor(task_id="done", job_execution_id=plan.output, deferrable=True)
        plan >> done
