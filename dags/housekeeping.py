"""Delete the history of partitioned jobs that ended long ago, every night.

Keep it for longer than anybody may want to clear an old run: what is deleted cannot be restarted, and is not known to
have been done. The connection's user needs the rights of `dbpartition_retention`.
"""

from __future__ import annotations

from airflow.sdk import DAG, Param

from airflow_dbpartition.operators import PurgeJobRepositoryOperator

with DAG(
    dag_id="housekeeping",
    description="Delete finished partitioned jobs and removed nodes that are older than 90 days",
    schedule="@daily",
    catchup=False,
    max_active_runs=1,
    params={"days": Param(90, type="integer", minimum=1, description="how long history is kept")},
    tags=["dbpartition", "example"],
    doc_md=__doc__,
):
    PurgeJobRepositoryOperator(task_id="purge", older_than="{{ params.days * 86400 }}", retries=2)
