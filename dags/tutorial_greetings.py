"""The smallest partitioned job: the DAG of the tutorial (docs/tutorial).

It greets three people, one partition each. The step is in `docs/examples/greetings.py`; a worker runs it:
`dbpartition worker --import greetings`.
"""

from __future__ import annotations

from airflow.sdk import DAG

from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.partitioners import ListPartitioner

with DAG(dag_id="tutorial_greetings", schedule=None, catchup=False, tags=["dbpartition", "tutorial"], doc_md=__doc__):
    PartitionedStepOperator(
        task_id="greet",
        step="greet",
        partitioner=ListPartitioner(["Ada", "Grace", "Edsger"], context_name="person"),
        wait_for_completion=True,
        deferrable=True,
    )
