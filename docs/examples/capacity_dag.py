"""Wait for workers before the job is cut to their number; wait for another DAG's job; stop one."""

from __future__ import annotations

# [start dag]
from airflow.sdk import DAG

from airflow_dbpartition.operators import PartitionedStepOperator, StopJobExecutionOperator
from airflow_dbpartition.partitioners import ColumnRangePartitioner
from airflow_dbpartition.sensors import LiveNodesSensor, PartitionCompletionSensor

with DAG("after_the_day_is_closed", schedule=None, catchup=False):
    capacity = LiveNodesSensor(task_id="capacity", min_nodes=4, step="check_orders", deferrable=True, timeout=900)
    closed = PartitionCompletionSensor(  # of another DAG: it need not even be launched yet
        task_id="closed",
        job_name="close_the_day",
        job_parameters={"business_date": "{{ dag_run.partition_key or '2026-11-30' }}"},
        deferrable=True,
    )
    check = PartitionedStepOperator(
        task_id="check", step="check_orders", partitioner=ColumnRangePartitioner(table="orders", column="id")
    )
    stop = StopJobExecutionOperator(task_id="stop", job_execution_id=check.output, trigger_rule="one_failed")
    [capacity, closed] >> check >> stop
# [end dag]
