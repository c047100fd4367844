"""Statements about nodes that fell silent or left, and about the work that they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, and_, exists, or_, select, union, update
from sqlalchemy.engine import Connection

from airflow_dbpartition.dialects import db_later, db_now
from airflow_dbpartition.domain import (
    LIVE_PARTITIONS,
    LIVING_NODES,
    JobSettings,
    NodeStatus,
    Partition,
    PartitionEvent,
    PartitionStatus,
    Transitions,
)
from airflow_dbpartition.repository.executions import UPDATE_BATCH_ROWS, Placement
from airflow_dbpartition.repository.moves import move, record, restored_transferability
from airflow_dbpartition.repository.transactions import Transactions, notify
from airflow_dbpartition.schema import WORK_CHANNEL, Tables

# What waits and what runs have partial indexes of their own: queries by node ask for one status at a time.
_LIVE = tuple(status.value for status in LIVE_PARTITIONS)
# Gives a node to each partition, or None for anybody; knows the execution's group, step and settings.
PlaceAgain = Callable[[str, str, JobSettings, Sequence[Partition]], Placement]


@dataclass(frozen=True)
class Rehomed:
    """What became of one execution's work on a lost node."""

    job_execution_id: int
    reassigned: int
    failed: int
    stopped: int


class Losses:
    """Suspecting nodes, removing them, and giving their work to others."""

    def __init__(self, tables: Tables, transactions: Transactions) -> None:
        self._tables = tables
        self._transactions = transactions

    def suspect(self, *, silent_for_s: float, until: datetime | None = None) -> list[str]:
        """ACTIVE and silent → UNREACHABLE; returns the ids.

        Args:
            until: past this moment of the database's clock nobody is marked; None = no limit.
        """
        return self._mark((NodeStatus.ACTIVE,), NodeStatus.UNREACHABLE, self._is_silent(silent_for_s), until)

    def suspect_vanished(self, node_ids: Sequence[str], *, seen: datetime) -> list[str]:
        """ACTIVE and not heard since → UNREACHABLE; returns the ids.

        Args:
            node_ids: whose sessions had ended.
            seen: when that was seen, by the database's clock.
        """
        n = self._tables.nodes.c
        unheard = n.node_id.in_(node_ids) & (n.last_heartbeat < seen)
        return self._mark((NodeStatus.ACTIVE,), NodeStatus.UNREACHABLE, unheard, None)

    def remove_silent(self, *, silent_for_s: float, until: datetime | None = None) -> list[str]:
        """Silent for too long → REMOVED; returns the ids. Their work is found by `nodes_with_orphans`.

        Args:
            until: as for `suspect`.
        """
        return self._mark(LIVING_NODES, NodeStatus.REMOVED, self._is_silent(silent_for_s), until)

    def _is_silent(self, silent_for_s: float) -> ColumnElement[bool]:
        return self._tables.nodes.c.last_heartbeat < db_later(-silent_for_s)

    def deregister(self, node_id: str) -> None:
        """A node leaves by itself; a heartbeat or claim of its own that is still under way is waited for."""

        def work(connection: Connection) -> None:
            n = self._tables.nodes.c
            connection.execute(
                update(self._tables.nodes)
                .where(n.node_id == node_id, n.status != NodeStatus.REMOVED.value)
                .values(status=NodeStatus.REMOVED.value)
            )

        self._transactions.run(work)

    def _mark(
        self,
        sources: tuple[NodeStatus, ...],
        target: NodeStatus,
        which: ColumnElement[bool],
        until: datetime | None,
    ) -> list[str]:
        def work(connection: Connection) -> list[str]:
            n = self._tables.nodes.c
            condition = and_(n.status.in_([status.value for status in sources]), which)
            if until is not None:
                condition = and_(condition, db_now() <= until)
            # Locked first and judged again by the UPDATE: a heartbeat that came between saves the node.
            # Who is locked is being heard, or judged by another sweep: not waited for.
            query = select(n.node_id).where(condition).order_by(n.node_id).with_for_update(skip_locked=True)
            ids = list(connection.execute(query).scalars())
            marked = []
            for node_id in ids:
                statement = (
                    update(self._tables.nodes).where(n.node_id == node_id, condition).values(status=target.value)
                )
                if connection.execute(statement).rowcount:
                    marked.append(node_id)
            return marked

        return self._transactions.run(work)

    def nodes_with_orphans(self) -> list[str]:
        """Nodes that are REMOVED, or whose row is gone, but on whom live partitions still wait."""

        def work(connection: Connection) -> list[str]:
            n, p = self._tables.nodes.c, self._tables.partitions.c
            waiting = exists().where(p.assigned_node == n.node_id, p.status == PartitionStatus.PENDING.value)
            held = exists().where(p.assigned_node == n.node_id, p.status == PartitionStatus.CLAIMED.value)
            removed = select(n.node_id).where(n.status == NodeStatus.REMOVED.value, or_(waiting, held))
            return list(connection.execute(removed.order_by(n.node_id)).scalars())

        return self._transactions.run(work)

    def unknown_owners(self) -> list[str]:
        """Owners of live partitions that have no node row at all (somebody deleted it); reads all live rows."""

        def work(connection: Connection) -> list[str]:
            n, p = self._tables.nodes.c, self._tables.partitions.c
            unknown = p.assigned_node.is_not(None), ~exists().where(n.node_id == p.assigned_node)
            query = union(*(select(p.assigned_node).where(p.status == status, *unknown) for status in _LIVE))
            return [owner for owner in connection.execute(query).scalars() if owner is not None]

        return self._transactions.run(work)

    def executions_on(self, node_id: str) -> list[int]:
        """Executions of which live partitions are assigned to the node."""

        def work(connection: Connection) -> list[int]:
            p = self._tables.partitions.c
            on_it = p.assigned_node == node_id
            query = union(*(select(p.job_execution_id).where(p.status == status, on_it) for status in _LIVE))
            return sorted(connection.execute(query).scalars())

        return self._transactions.run(work)

    def rehome(
        self, node_id: str, job_execution_id: int, *, place: PlaceAgain, why: str, leaving: bool = False
    ) -> Rehomed:
        """Give a lost node's partitions of one execution to others, or fail what may not move.

        With `leaving` the node itself calls while it drains: only what is PENDING and may move is given away.

        What was running counts a loss; at the execution's limit a partition is poison and fails. Nothing happens
        where the node turns out to be alive. The lock order is execution, node, then partitions by id.
        """

        def work(connection: Connection) -> Rehomed:
            e, n, p = self._tables.executions.c, self._tables.nodes.c, self._tables.partitions.c
            execution = connection.execute(
                select(e.settings, e.node_group, e.step_name, e.stop_requested)
                .where(e.job_execution_id == job_execution_id)
                .with_for_update(read=True)
            ).first()
            nothing = Rehomed(job_execution_id, 0, 0, 0)
            status = connection.execute(select(n.status).where(n.node_id == node_id)).scalar()
            if execution is None or not (leaving or status in (None, NodeStatus.REMOVED.value)):
                return nothing
            of_it = and_(p.job_execution_id == job_execution_id, p.assigned_node == node_id)
            if leaving:
                of_it = and_(of_it, p.status == PartitionStatus.PENDING.value, p.is_transferable == 1)
            rows = connection.execute(
                select(
                    p.step_execution_id,
                    p.partition_key,
                    p.status,
                    p.is_transferable,
                    p.node_losses,
                    p.attempt,
                    p.weight,
                )
                .where(of_it, p.status.in_(_LIVE))
                .order_by(p.step_execution_id)
                .with_for_update(skip_locked=True)
            ).all()
            settings = JobSettings.from_json(execution.settings)
            poison: list[int] = []
            fixed: list[int] = []
            unstarted: list[int] = []
            between: list[int] = []
            movable: dict[str, tuple[int, float, bool]] = {}
            for row in rows:
                running = row.status == PartitionStatus.CLAIMED.value
                if not row.is_transferable:
                    (fixed if running else between if row.attempt else unstarted).append(row.step_execution_id)
                elif running and row.node_losses + 1 >= settings.max_node_losses:
                    poison.append(row.step_execution_id)
                else:
                    movable[row.partition_key] = (row.step_execution_id, row.weight, running)
            self._abandon(
                connection, fixed, f"{why} while this partition ran on it; not transferable, so not run again"
            )
            self._abandon(
                connection,
                unstarted,
                f"{why} before this partition ran; not transferable, so nobody else may run it",
                running=False,
            )
            self._abandon(
                connection,
                between,
                f"{why} while this partition waited for its next attempt; not transferable, so nobody else may run it",
                running=False,
            )
            self._abandon(
                connection,
                poison,
                f"{why} while this partition ran on it, which makes {settings.max_node_losses} lost nodes: it seems to "
                "kill its workers (memory, a crash in native code); see max_node_losses",
            )
            failed = len(fixed) + len(unstarted) + len(between) + len(poison)
            if execution.stop_requested:
                self._stop(connection, [step_id for step_id, _, _ in movable.values()], why)
                return Rehomed(job_execution_id, 0, failed, len(movable))
            partitions = [Partition(key, weight=weight) for key, (_, weight, _) in movable.items()]
            placement = place(execution.node_group, execution.step_name, settings, partitions) if partitions else {}
            self._reassign(connection, movable, placement, why)
            if movable:
                notify(connection, WORK_CHANNEL, execution.node_group)
            return Rehomed(job_execution_id, len(movable), failed, 0)

        return self._transactions.run(work)

    def _abandon(self, connection: Connection, ids: list[int], message: str, *, running: bool = True) -> None:
        p = self._tables.partitions.c
        for chunk in _chunks(ids):
            chosen = p.step_execution_id.in_(chunk)
            if running:
                record(connection, self._tables, PartitionEvent.LOST, chosen, message=message)
            values = {p.exit_message: message, p.node_losses: p.node_losses + int(running)}
            move(connection, self._tables, Transitions.ABANDON, chosen, values=values)
            record(connection, self._tables, PartitionEvent.FAILED, chosen, message=message)

    def _stop(self, connection: Connection, ids: list[int], why: str) -> None:
        """The execution is stopping: what would be re-placed ends STOPPED instead."""
        p = self._tables.partitions.c
        for chunk in _chunks(ids):
            chosen = p.step_execution_id.in_(chunk)
            values = {p.exit_message: f"{why}; the execution was asked to stop"}
            for transition in (Transitions.STOP_PENDING, Transitions.STOP_CLAIMED):
                move(connection, self._tables, transition, chosen, values=values)
            record(connection, self._tables, PartitionEvent.STOPPED, chosen, message=why)

    def _reassign(
        self, connection: Connection, movable: dict[str, tuple[int, float, bool]], placement: Placement, why: str
    ) -> None:
        p = self._tables.partitions.c
        ids_of: dict[tuple[str | None, bool], list[int]] = {}
        for key, (step_id, _, running) in movable.items():
            ids_of.setdefault((placement.get(key), running), []).append(step_id)
        for (target, running), ids in ids_of.items():
            for chunk in _chunks(ids):
                chosen = p.step_execution_id.in_(chunk)
                if running:
                    record(connection, self._tables, PartitionEvent.LOST, chosen, message=why)
                values = {
                    p.assigned_node: target,
                    p.node_losses: p.node_losses + int(running),
                    p.available_at: db_now(),
                    p.is_transferable: restored_transferability(self._tables),
                }
                move(connection, self._tables, Transitions.REASSIGN, chosen, values=values)
                record(
                    connection,
                    self._tables,
                    PartitionEvent.REASSIGNED,
                    chosen,
                    message=f"{why}; now {target or 'anybody'}'s",
                )


def _chunks(ids: list[int]) -> list[list[int]]:
    return [ids[start : start + UPDATE_BATCH_ROWS] for start in range(0, len(ids), UPDATE_BATCH_ROWS)]
