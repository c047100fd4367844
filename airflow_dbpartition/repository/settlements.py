"""Statements by which an owner settles what it claimed. Each is fenced by node *and* version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from sqlalchemy import ColumnElement, Update, and_, bindparam, case, column, func, select
from sqlalchemy.engine import Connection

from airflow_dbpartition.dialects import db_later, db_now, end_if_silent
from airflow_dbpartition.domain import (
    Counters,
    PartitionEvent,
    PartitionStatus,
    TransferPolicy,
    Transition,
    Transitions,
)
from airflow_dbpartition.errors import ClaimLostError
from airflow_dbpartition.masking import mask_secrets
from airflow_dbpartition.repository.moves import move, moving, record, restored_transferability
from airflow_dbpartition.repository.transactions import Transactions, notify
from airflow_dbpartition.schema import WORK_CHANNEL, Tables
from airflow_dbpartition.storable import JsonObject, storable_text


class Held(Protocol):
    """What fences a settle; a `Claim` has it."""

    @property
    def step_execution_id(self) -> int: ...
    @property
    def job_execution_id(self) -> int: ...
    @property
    def node_id(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def partition_key(self) -> str: ...


@dataclass(frozen=True)
class _Held:
    step_execution_id: int
    job_execution_id: int
    node_id: str
    version: int
    partition_key: str


@dataclass(frozen=True)
class Completed:
    """A claim whose step has returned.

    Args:
        result: JSON.
    """

    claim: Held
    counters: Counters
    result: object = None

    @property
    def values(self) -> dict[str, Any]:
        """What is stored, by column."""
        return {"result": self.result, "exit_message": None, **self.counters.as_columns()}


_SETTLED_BY_COMPLETION = ("result", "exit_message", *Counters().as_columns())
_ROWS, _NODE_ID = "rows", "node"  # the parameters of a completion's statement


class Settlements:
    """Complete, fail, retry, release, stop and checkpoint. Zero rows moved is ClaimLostError: drop the work."""

    def __init__(self, tables: Tables, transactions: Transactions) -> None:
        self._tables = tables
        self._transactions = transactions

    def complete(self, claim: Held, *, counters: Counters, result: object = None) -> None:
        """CLAIMED → COMPLETED with the result and the final counters.

        Raises:
            ClaimLostError: the partition is not ours any more; nothing was written.
        """
        for lost in self.complete_all([Completed(claim, counters, result)]):
            raise lost_claim(lost)

    def complete_all(self, completed: Sequence[Completed]) -> list[Held]:
        """`complete` for several claims, in one transaction.

        Args:
            completed: of one node.

        Returns:
            The claims that were lost; of those nothing was written.
        """

        def work(connection: Connection) -> list[Held]:
            if connection.dialect.name == "postgresql":
                moved = self._complete_at_once(connection, completed)
            else:
                moved = sum(self._complete_one(connection, one) for one in completed)
            if moved == len(completed):
                return []
            target = PartitionStatus.COMPLETED
            return [one.claim for one in completed if not self._stands(connection, one.claim, target)]

        return self._transactions.run(work, atomic=False)

    def _complete_one(self, connection: Connection, one: Completed) -> int:
        values = self._by_column(one.values)
        return move(connection, self._tables, Transitions.COMPLETE, self._fence(one.claim), values=values)

    def _complete_at_once(self, connection: Connection, completed: Sequence[Completed]) -> int:
        """One statement for all: a row of a JSON array each, so that its text is the same for any number of them."""
        p = self._tables.partitions.c
        rows = [
            {p.step_execution_id.name: one.claim.step_execution_id, p.version.name: one.claim.version, **one.values}
            for one in completed
        ]
        parameters = {_ROWS: rows, _NODE_ID: completed[0].claim.node_id}
        return connection.execute(self._completing, parameters).rowcount

    @cached_property
    def _completing(self) -> Update:
        p = self._tables.partitions.c
        settled = [p[name] for name in _SETTLED_BY_COMPLETION]
        columns = [column(one.name, one.type) for one in (p.step_execution_id, p.version, *settled)]
        given = (
            func.jsonb_to_recordset(bindparam(_ROWS, type_=p.result.type))
            .table_valued(*columns, name="given")
            .render_derived(with_types=True)
        )
        fence = (
            p.step_execution_id == given.c.step_execution_id,
            p.assigned_node == bindparam(_NODE_ID, type_=p.assigned_node.type),
            p.version == given.c.version,
        )
        values = {one: given.c[one.name] for one in settled}
        return moving("postgresql", self._tables, Transitions.COMPLETE, *fence, values=values, by_id=True)

    def fail(self, claim: Held, *, message: str, lost: bool = False) -> None:
        """CLAIMED → FAILED. `lost` = interrupted in the middle of work that may not run twice."""
        message = _told(message)
        p = self._tables.partitions.c
        values: dict[str, Any] = {"exit_message": message, "rollback_count": p.rollback_count + 1}
        if lost:
            values["node_losses"] = p.node_losses + 1
        self._settle(claim, Transitions.FAIL, values, PartitionEvent.FAILED, message)

    def stop(self, claim: Held, *, message: str = "stopped on request") -> None:
        """CLAIMED → STOPPED, by the owner that was asked to stop."""
        values = {"exit_message": storable_text(message)}
        self._settle(claim, Transitions.STOP_CLAIMED, values, PartitionEvent.STOPPED, message)

    def retry(self, claim: Held, *, message: str, delay_s: float) -> None:
        """CLAIMED → PENDING, to be tried again by this node (or, where transferable, any) after `delay_s`."""
        message = _told(message)
        p = self._tables.partitions.c
        values = {
            "available_at": db_later(delay_s),
            "exit_message": message,
            "rollback_count": p.rollback_count + 1,
        }
        self._back_to_pending(claim, Transitions.RETRY, values, PartitionEvent.RETRIED, message)

    def release(self, claim: Held, *, message: str) -> None:
        """CLAIMED → PENDING and anybody's (its own node's, where it may never move), with the attempt given back.

        Only for work that never started, or that may run twice; the caller knows which.
        """
        p = self._tables.partitions.c
        values = {
            "assigned_node": case((p.transfer_policy == TransferPolicy.NEVER.value, p.assigned_node), else_=None),
            "available_at": db_now(),
            "attempt": p.attempt - 1,
            "is_transferable": restored_transferability(self._tables),
        }
        self._back_to_pending(claim, Transitions.RELEASE, values, PartitionEvent.RELEASED, message)

    def release_unheld(self, *, node_id: str, step_execution_id: int, version: int) -> None:
        """Give back a row that says CLAIMED by us but that we do not hold: a claim whose answer was lost.

        The caller must have made sure that no one in this process will run it.

        Raises:
            ClaimLostError: it is not ours any more.
        """
        row = self._transactions.run(
            lambda connection: connection.execute(
                select(self._tables.partitions.c.job_execution_id, self._tables.partitions.c.partition_key).where(
                    self._tables.partitions.c.step_execution_id == step_execution_id
                )
            ).first()
        )
        if row is not None:
            held = _Held(step_execution_id, row.job_execution_id, node_id, version, row.partition_key)
            self.release(held, message=f"claimed by {node_id}, but the answer was lost; it never started")

    def checkpoint(self, connection: Connection, claim: Held, *, checkpoint: JsonObject, counters: Counters) -> None:
        """Store progress inside the caller's transaction; the row lock it takes is the fence of that transaction.

        The caller commits at once: the server ends a transaction that is silent for `COMMIT_WITHIN_S` from here on.

        Raises:
            ClaimLostError: not ours any more; the caller must roll back.
        """
        values = self._by_column({"checkpoint": checkpoint, **counters.as_columns()})
        guards = (self._fence(claim), end_if_silent(connection))
        if move(connection, self._tables, Transitions.CHECKPOINT, *guards, values=values) == 0:
            raise lost_claim(claim)

    def _fence(self, claim: Held) -> ColumnElement[bool]:
        p = self._tables.partitions.c
        return and_(
            p.step_execution_id == claim.step_execution_id,
            p.assigned_node == claim.node_id,
            p.version == claim.version,
        )

    def _by_column(self, values: Mapping[str, Any]) -> dict[Any, Any]:
        return {self._tables.partitions.c[name]: value for name, value in values.items()}

    def _settle(
        self,
        claim: Held,
        transition: Transition,
        values: Mapping[str, Any],
        event: PartitionEvent,
        message: str,
    ) -> None:
        def work(connection: Connection) -> None:
            moved = move(connection, self._tables, transition, self._fence(claim), values=self._by_column(values))
            if moved == 0:
                self._accept_or_lose(connection, claim, transition.target)
            else:
                self._record(connection, claim, event, message)

        self._transactions.run(work)

    def _back_to_pending(
        self, claim: Held, transition: Transition, values: Mapping[str, Any], event: PartitionEvent, message: str
    ) -> None:
        def work(connection: Connection) -> None:
            # Lock the execution first: a stop that is asked meanwhile must find this row, PENDING or CLAIMED.
            e = self._tables.executions.c
            query = select(e.stop_requested).where(e.job_execution_id == claim.job_execution_id)
            stopping = connection.execute(query.with_for_update(read=True)).scalar()
            if stopping:
                changes = {"exit_message": storable_text(message)}
                moved = move(
                    connection,
                    self._tables,
                    Transitions.STOP_CLAIMED,
                    self._fence(claim),
                    values=self._by_column(changes),
                )
                if moved == 0:
                    self._accept_or_lose(connection, claim, PartitionStatus.STOPPED)
                else:
                    self._record(connection, claim, PartitionEvent.STOPPED, message)
                return
            moved = move(connection, self._tables, transition, self._fence(claim), values=self._by_column(values))
            if moved == 0:
                self._accept_or_lose(connection, claim, PartitionStatus.PENDING)
                return
            self._record(connection, claim, event, message)
            if event is PartitionEvent.RELEASED:
                notify(connection, WORK_CHANNEL, "released")

        self._transactions.run(work)

    def _record(self, connection: Connection, claim: Held, event: PartitionEvent, message: str | None) -> None:
        mine = self._tables.partitions.c.step_execution_id == claim.step_execution_id
        record(connection, self._tables, event, mine, message=message, node_id=claim.node_id)

    def _accept_or_lose(self, connection: Connection, claim: Held, target: PartitionStatus) -> None:
        """Nothing moved: either our own settle of before, whose answer was lost, or the claim is gone.

        A version belongs to one claim; so a row at our version that already stands where we want it was put there by
        us, or is what we gave back and a person has stopped since. Nothing is to be written either way.
        """
        if not self._stands(connection, claim, target):
            raise lost_claim(claim)

    def _stands(self, connection: Connection, claim: Held, target: PartitionStatus) -> bool:
        """Whether the claim was settled as `target`."""
        p = self._tables.partitions.c
        row = connection.execute(
            select(p.status, p.version, p.assigned_node).where(p.step_execution_id == claim.step_execution_id)
        ).first()
        if row is None or row.version != claim.version or row.assigned_node not in (claim.node_id, None):
            return False
        return bool(row.status == target.value)


def _told(message: str) -> str:
    """What user code says of its failure, storable and without the passwords that it may quote."""
    return mask_secrets(storable_text(message))


def lost_claim(claim: Held) -> ClaimLostError:
    """The error for work that has changed hands."""
    return ClaimLostError(
        f"partition {claim.partition_key!r} (step execution {claim.step_execution_id}, version {claim.version}) "
        f"is no longer held by {claim.node_id}: its work is dropped"
    )
