"""Statements about nodes: registration, heartbeats, who is alive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Row,
    Select,
    Update,
    and_,
    case,
    exists,
    func,
    insert,
    not_,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.engine import Connection

from airflow_dbpartition.dialects import age_s, db_later, db_now
from airflow_dbpartition.domain import LIVING_NODES, NodeStatus, NodeView, PartitionStatus
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
        is_work_active: whether any job execution, of any group, has not ended.
        is_any_silent: whether any node that is not removed was not heard for too long.
    """

    status: NodeStatus | None
    held: dict[int, int]
    stopping: frozenset[int]
    rank: int = 0
    fleet_size: int = 1
    db_epoch_s: float = 0.0
    is_work_active: bool = True
    is_any_silent: bool = False


_LIVING = tuple(status.value for status in LIVING_NODES)


def _reply(answer: Row[Any], status: str | None, held: Iterable[Sequence[int]]) -> HeartbeatReply:
    """The reply of what the database answered; `held` = (step_execution_id, version, stop_requested) of each row."""
    if status is None:
        return HeartbeatReply(status=None, held={}, stopping=frozenset())
    rows = list(held)
    return HeartbeatReply(
        status=NodeStatus(status),
        held={step_execution_id: version for step_execution_id, version, _ in rows},
        stopping=frozenset(step_execution_id for step_execution_id, _, stop_requested in rows if stop_requested),
        rank=int(answer.rank),
        fleet_size=int(answer.fleet_size),
        db_epoch_s=answer.now.timestamp(),
        is_work_active=bool(answer.is_work_active),
        is_any_silent=answer.silent > 0,
    )


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

        On PostgreSQL it is one statement, which reads what was committed when it began.

        Args:
            heard_within_s: who was not heard for so long takes no turn at sweeping; None = whoever is not removed.
        """

        def work(connection: Connection) -> HeartbeatReply:
            beat = self._beat(node_id, current_load=current_load, draining=draining)
            fleet = self._fleet(node_id, heard_within_s)
            held = self._held(node_id)
            n = self._tables.nodes.c
            if connection.dialect.name == "postgresql":
                beaten = beat.returning(n.status).cte("beaten")
                triples = func.jsonb_agg(func.jsonb_build_array(*held.selected_columns))
                answer = connection.execute(
                    fleet.add_columns(
                        select(beaten.c.status).scalar_subquery().label("status"),
                        held.with_only_columns(triples, maintain_column_froms=True).scalar_subquery().label("held"),
                    )
                ).one()
                return _reply(answer, answer.status, answer.held or ())
            connection.execute(beat)
            status = select(n.status).where(n.node_id == node_id, n.status != NodeStatus.REMOVED.value)
            answer = connection.execute(fleet.add_columns(status.scalar_subquery().label("status"))).one()
            return _reply(answer, answer.status, connection.execute(held).all())

        return self._transactions.run(work, atomic=False)

    def _beat(self, node_id: str, *, current_load: int, draining: bool) -> Update:
        n = self._tables.nodes.c
        alive = NodeStatus.DRAINING if draining else NodeStatus.ACTIVE
        return (
            update(self._tables.nodes)
            .where(n.node_id == node_id, n.status != NodeStatus.REMOVED.value)
            .values(
                last_heartbeat=db_now(),
                current_load=current_load,
                # A person may have set DRAINING; only a suspicion is taken back.
                status=case((n.status == NodeStatus.DRAINING.value, n.status), else_=alive.value),
            )
        )

    def _fleet(self, node_id: str, heard_within_s: float | None) -> Select[Any]:
        n, e = self._tables.nodes.c, self._tables.executions.c
        heard: ColumnElement[bool] = true()
        if heard_within_s is not None:  # whoever asks is heard, though its own beat may not be seen here yet
            heard = or_(n.last_heartbeat >= db_later(-heard_within_s), n.node_id == node_id)

        def number_of(*which: ColumnElement[bool]) -> ColumnElement[int]:
            return func.coalesce(func.sum(case((and_(*which), 1), else_=0)), 0)

        columns: list[ColumnElement[Any]] = [
            number_of(heard).label("fleet_size"),
            number_of(heard, n.node_id < node_id).label("rank"),
            number_of(not_(heard)).label("silent"),
            exists().where(e.active_instance_id.is_not(None)).label("is_work_active"),
            db_now().label("now"),
        ]
        return select(*columns).where(n.status.in_(_LIVING))

    def _held(self, node_id: str) -> Select[Any]:
        p, e = self._tables.partitions.c, self._tables.executions.c
        return (
            select(p.step_execution_id, p.version, e.stop_requested)
            .join_from(self._tables.partitions, self._tables.executions, p.job_execution_id == e.job_execution_id)
            .where(p.assigned_node == node_id, p.status == PartitionStatus.CLAIMED.value)
        )

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
            statement = (
                update(self._tables.nodes)
                .where(n.node_id == node_id, n.status.in_(_LIVING))
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
