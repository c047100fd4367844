"""Statements about nodes: registration, heartbeats, who is alive."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import case, func, insert, select, update
from sqlalchemy.engine import Connection

from airflow_dbpartition.dialects import age_s, db_later, db_now
from airflow_dbpartition.domain import NodeStatus, NodeView, PartitionStatus
from airflow_dbpartition.repository.transactions import Transactions
from airflow_dbpartition.schema import Tables


@dataclass(frozen=True)
class HeartbeatReply:
    """What a node learns from its heartbeat.

    Args:
        status: the node's own status; None = it has been removed, and everything it held with it.
        held: version by step_execution_id of every row that says CLAIMED by this node.
        stopping: the step_execution_ids among them whose execution is asked to stop.
        rank, fleet_size: this node's place among the nodes that take turns at sweeping.
        db_epoch_s: the database's clock, seconds since 1970; what the turns are counted by.
    """

    status: NodeStatus | None
    held: dict[int, int]
    stopping: frozenset[int]
    rank: int = 0
    fleet_size: int = 1
    db_epoch_s: float = 0.0


class Nodes:
    """Registration, heartbeats and the view of the fleet."""

    def __init__(self, tables: Tables, transactions: Transactions) -> None:
        self._tables = tables
        self._transactions = transactions

    def register(
        self,
        *,
        node_id: str,
        node_group: str,
        host: str,
        pid: int,
        version: str,
        capacity: int,
        steps: tuple[str, ...],
    ) -> None:
        """Insert the node as ACTIVE. The id is new at every start, so a row of that id is this very call, repeated."""

        def work(connection: Connection) -> None:
            nodes = self._tables.nodes
            known = connection.execute(select(nodes.c.node_id).where(nodes.c.node_id == node_id)).first()
            if known is None:
                connection.execute(
                    insert(nodes).values(
                        node_id=node_id,
                        node_group=node_group,
                        host=host[:255],
                        pid=pid,
                        version=version,
                        status=NodeStatus.ACTIVE.value,
                        capacity=capacity,
                        current_load=0,
                        steps=sorted(steps),
                        created_time=db_now(),
                        last_heartbeat=db_now(),
                    )
                )

        self._transactions.run(work)

    def heartbeat(
        self, node_id: str, *, current_load: int, draining: bool = False, heard_within_s: float | None = None
    ) -> HeartbeatReply:
        """Say "I am alive" and learn, in the same transaction, what is still ours and what is asked to stop.

        Args:
            heard_within_s: who was not heard for so long takes no turn at sweeping; None = whoever is not removed.
        """

        def work(connection: Connection) -> HeartbeatReply:
            n, p, e = self._tables.nodes.c, self._tables.partitions.c, self._tables.executions.c
            alive = NodeStatus.DRAINING if draining else NodeStatus.ACTIVE
            beat = (
                update(self._tables.nodes)
                .where(n.node_id == node_id, n.status != NodeStatus.REMOVED.value)
                .values(
                    last_heartbeat=db_now(),
                    current_load=current_load,
                    # A person may have set DRAINING; only a suspicion is taken back.
                    status=case((n.status == NodeStatus.DRAINING.value, n.status), else_=alive.value),
                )
            )
            if connection.execute(beat).rowcount == 0:
                return HeartbeatReply(status=None, held={}, stopping=frozenset())
            in_turn = [n.status != NodeStatus.REMOVED.value]
            if heard_within_s is not None:
                in_turn.append(n.last_heartbeat >= db_later(-heard_within_s))
            fleet = connection.execute(
                select(
                    func.count(),
                    func.coalesce(func.sum(case((n.node_id < node_id, 1), else_=0)), 0),
                    func.max(case((n.node_id == node_id, n.status))),
                    db_now().label("now"),
                ).where(*in_turn)
            ).one()
            rows = connection.execute(
                select(p.step_execution_id, p.version, e.stop_requested)
                .join_from(self._tables.partitions, self._tables.executions, p.job_execution_id == e.job_execution_id)
                .where(p.assigned_node == node_id, p.status == PartitionStatus.CLAIMED.value)
            ).all()
            return HeartbeatReply(
                status=NodeStatus(fleet[2]),
                held={row.step_execution_id: row.version for row in rows},
                stopping=frozenset(row.step_execution_id for row in rows if row.stop_requested),
                rank=int(fleet[1]),
                fleet_size=int(fleet[0]),
                db_epoch_s=fleet.now.timestamp(),
            )

        return self._transactions.run(work)

    def clock(self) -> datetime:
        """The database's clock, UTC."""

        def work(connection: Connection) -> datetime:
            now: datetime = connection.execute(select(db_now())).scalar_one()
            return now

        return self._transactions.run(work)

    def drain(self, node_id: str) -> bool:
        """Ask a node to take no more work and leave; False where it is not there (any more)."""

        def work(connection: Connection) -> bool:
            n = self._tables.nodes.c
            living = (NodeStatus.ACTIVE.value, NodeStatus.DRAINING.value, NodeStatus.UNREACHABLE.value)
            statement = (
                update(self._tables.nodes)
                .where(n.node_id == node_id, n.status.in_(living))
                .values(status=NodeStatus.DRAINING.value)
            )
            return connection.execute(statement).rowcount > 0

        return self._transactions.run(work)

    def all(self, *, node_group: str | None = None, include_removed: bool = False) -> list[NodeView]:
        """Every node, by name, with the age of its heartbeat."""

        def work(connection: Connection) -> list[NodeView]:
            n = self._tables.nodes.c
            query = select(self._tables.nodes, age_s(n.last_heartbeat).label("heartbeat_age_s")).order_by(n.node_id)
            if node_group is not None:
                query = query.where(n.node_group == node_group)
            if not include_removed:
                query = query.where(n.status != NodeStatus.REMOVED.value)
            return [
                NodeView(
                    node_id=row.node_id,
                    node_group=row.node_group,
                    status=NodeStatus(row.status),
                    capacity=row.capacity,
                    current_load=row.current_load,
                    steps=tuple(row.steps),
                    heartbeat_age_s=float(row.heartbeat_age_s),
                    host=row.host,
                    pid=row.pid,
                    version=row.version,
                )
                for row in connection.execute(query)
            ]

        return self._transactions.run(work)

    def live(self, *, node_group: str, within_s: float, step: str | None = None) -> list[NodeView]:
        """Nodes of the group that may be given work (of `step`, if named); see `NodeView.may_be_given`."""
        return [
            node
            for node in self.all(node_group=node_group)
            if node.may_be_given(step, node_group=node_group, within_s=within_s)
        ]
