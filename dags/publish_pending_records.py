"""Publish the pending records of a date to Amazon SNS: the nightly batch, split over the worker nodes that are alive.

Each partition is a range of record ids. Workers outside Airflow (`dbpartition worker --import
airflow_dbpartition.demo.publishing`) validate its records, publish them in chunks, and mark each as PUBLISHED, INVALID
or REFUSED in the same transaction as the checkpoint. What is to be done once is the **reference date**: two runs for
the same date are one job.

The table `records` is in the job repository's database. The topic's ARN is the Airflow variable `records_topic_arn`.
"""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

from airflow.sdk import DAG, CronPartitionTimetable, Param
from airflow.sdk.exceptions import AirflowFailException

from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.partitioners import ColumnRangePartitioner


# [start dag]
def reference_date(params: Any, dag_run: Any) -> str:
    """The date whose records are published: what the person who triggers says, else the run's partition key.

    Never from the logical date, which a run need not have, and never guessed from the clock.
    """
    given = params["reference_date"] or dag_run.partition_key
    try:
        return date.fromisoformat(given or "").isoformat()  # nothing but a date gets into the statement below
    except ValueError:
        raise AirflowFailException(
            f"expected a reference date such as 2026-11-02, got {given!r}: trigger with the parameter reference_date, "
            "or with a partition key"
        ) from None


REFERENCE_DATE = "{{ reference_date(params, dag_run) }}"

with DAG(
    dag_id="publish_pending_records",
    description="Validate the pending records of a date and publish them to SNS, on workers outside Airflow",
    # At 02:00 the records of the day before; its date is the run's partition key.
    schedule=CronPartitionTimetable("0 2 * * *", timezone="UTC", run_offset=-1, key_format="%Y-%m-%d"),
    catchup=False,
    params={
        "reference_date": Param(
            None, type=["null", "string"], format="date", description="publish the records of this date"
        )
    },
    user_defined_macros={"reference_date": reference_date},
    tags=["dbpartition", "example"],
    doc_md=__doc__,
):
    PartitionedStepOperator(
        task_id="publish",
        step="publish_pending_records",
        job_parameters={"reference_date": REFERENCE_DATE},
        partitioner=ColumnRangePartitioner(
            table="records",
            column="id",
            where=f"status = 'PENDING' AND reference_date = '{REFERENCE_DATE}'",
            balanced=True,
            context={
                "reference_date": REFERENCE_DATE,
                "topic_arn": "{{ var.value.records_topic_arn }}",
                "chunk_size": 100,  # also what a killed worker publishes twice, at the most
            },
        ),
        partitions_per_node=4,
        transferable=True,  # published at least once, with an id by which a repetition is known
        partition_retries=10,  # some 25 minutes of an SNS that is not well
        partition_retry_delay=timedelta(seconds=5),
        partition_retry_max_delay=timedelta(minutes=5),
        wait_for_completion=True,
        deferrable=True,
        retries=3,  # each restarts the partitions that failed
        retry_delay=timedelta(minutes=15),
    )
# [end dag]
