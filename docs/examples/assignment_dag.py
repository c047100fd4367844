"""A strategy of one's own for giving partitions to nodes."""

from __future__ import annotations

# [start strategy]
from collections.abc import Mapping, Sequence

from airflow.sdk import DAG

from airflow_dbpartition.domain import NodeView, Partition
from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.partitioners import ListPartitioner


class BigOnesToBigNodes:
    """Partitions of weight 10 and more go to the node with the most slots; the rest to whoever asks first."""

    def assign(self, partitions: Sequence[Partition], nodes: Sequence[NodeView]) -> Mapping[str, str | None]:
        largest = max(nodes, key=lambda node: node.capacity)
        return {partition.key: largest.node_id for partition in partitions if partition.weight >= 10}


# [end strategy]

with DAG("own_assignment", schedule=None, catchup=False):
    # [start use]
    PartitionedStepOperator(
        task_id="bill",
        step="bill_tenant",
        partitioner=ListPartitioner(["acme", "globex"], context_name="tenant"),
        assignment=BigOnesToBigNodes(),
    )
    # [end use]
