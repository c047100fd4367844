"""Statements that delete what is over: finished instances and removed nodes, never anything active."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import delete, exists, func, or_, select
from sqlalchemy.engine import Connection

from airflow_dbpartition.dialects import db_later
from airflow_dbpartition.domain import LIVE_PARTITIONS, NodeStatus
from airflow_dbpartition.repository.transactions import Transactions
from airflow_dbpartition.schema import Tables

INSTANCES_PER_TRANSACTION = 100


@dataclass(frozen=True)
class Purged:
    """How many rows were deleted."""

    instances: int = 0
    executions: int = 0
    partitions: int = 0
    nodes: int = 0


class Retention:
    """Deleting old history in small transactions."""

    def __init__(self, tables: Tables, transactions: Transactions) -> None:
        self._tables = tables
        self._transactions = transactions

    def purge(self, *, older_than_s: float) -> Purged:
        """Delete every instance, whole, whose executions all ended more than `older_than_s` seconds ago."""
        total = Purged()
        while True:
            done = self._transactions.run(lambda connection: self._purge_some(connection, older_than_s))
            total = Purged(
                total.instances + done.instances,
                total.executions + done.executions,
                total.partitions + done.partitions,
                total.nodes,
            )
            if done.instances < INSTANCES_PER_TRANSACTION:
                break
        nodes = self._transactions.run(lambda connection: self._purge_nodes(connection, older_than_s))
        return Purged(total.instances, total.executions, total.partitions, nodes)

    def _purge_some(self, connection: Connection, older_than_s: float) -> Purged:
        i, e, p, v = (
            self._tables.instances.c,
            self._tables.executions.c,
            self._tables.partitions.c,
            self._tables.events.c,
        )
        young = exists().where(
            e.job_instance_id == i.job_instance_id,
            e.active_instance_id.is_not(None) | (func.coalesce(e.end_time, e.last_updated) >= db_later(-older_than_s)),
        )
        old = select(i.job_instance_id).where(~young, i.created_time < db_later(-older_than_s))
        ids = list(connection.execute(old.order_by(i.job_instance_id).limit(INSTANCES_PER_TRANSACTION)).scalars())
        if not ids:
            return Purged()
        rows = connection.execute(
            select(e.job_execution_id, e.job_instance_id)
            .where(e.job_instance_id.in_(ids))
            .order_by(e.job_execution_id)
            .with_for_update()
        ).all()
        # Locked, and looked at again by a statement of its own: while this one waited for the locks, a restart may
        # have written an execution that it does not see. From now on none can: restarts lock what they restart.
        gone = list(connection.execute(old.where(i.job_instance_id.in_(ids))).scalars())
        executions = [row.job_execution_id for row in rows if row.job_instance_id in gone]
        partitions = 0
        if executions:
            connection.execute(delete(self._tables.events).where(v.job_execution_id.in_(executions)))
            partitions = connection.execute(
                delete(self._tables.partitions).where(p.job_execution_id.in_(executions))
            ).rowcount
            connection.execute(delete(self._tables.executions).where(e.job_execution_id.in_(executions)))
        if gone:
            connection.execute(delete(self._tables.instances).where(i.job_instance_id.in_(gone)))
        return Purged(len(gone), len(executions), partitions)

    def _purge_nodes(self, connection: Connection, older_than_s: float) -> int:
        n, p = self._tables.nodes.c, self._tables.partitions.c
        used = [exists().where(p.assigned_node == n.node_id, p.status == status.value) for status in LIVE_PARTITIONS]
        statement = delete(self._tables.nodes).where(
            n.status == NodeStatus.REMOVED.value, n.last_heartbeat < db_later(-older_than_s), ~or_(*used)
        )
        return connection.execute(statement).rowcount
