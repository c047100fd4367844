"""The one statement that writes a partition's status, and the one that records why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Update, case, insert, literal, select, update
from sqlalchemy.engine import Connection

from airflow_dbpartition.dialects import db_now
from airflow_dbpartition.domain import LIVE_PARTITIONS, PartitionEvent, TransferPolicy, Transition
from airflow_dbpartition.schema import Tables
from airflow_dbpartition.storable import storable_text


def move(
    connection: Connection,
    tables: Tables,
    transition: Transition,
    *guards: ColumnElement[bool],
    values: Mapping[Any, Any] | None = None,
    by_id: bool = False,
) -> int:
    """Move every partition that the guards select, and whose status allows it; returns how many moved."""
    statement = moving(connection.dialect.name, tables, transition, *guards, values=values, by_id=by_id)
    return connection.execute(statement).rowcount


def moving(
    dialect: str,
    tables: Tables,
    transition: Transition,
    *guards: ColumnElement[bool],
    values: Mapping[Any, Any] | None = None,
    by_id: bool = False,
) -> Update:
    """The statement of `move`. To make one takes longer than to run it: what runs often keeps it.

    Args:
        by_id: the guards name partitions by their ids, so the status is only to be checked. In a table that has just
            been filled a planner knows nothing of statuses, and would look for a handful of ids by theirs.
    """
    column = tables.partitions.c
    changes: dict[Any, Any] = {column.status: transition.target.value, column.last_updated: db_now()}
    if transition.changes_hands:
        changes[column.version] = column.version + 1
    if transition.target not in LIVE_PARTITIONS:
        changes[column.end_time] = db_now()
    changes.update(values or {})
    # An expression, so that no index on the status is thought of.
    status = column.status.concat("") if by_id and dialect == "postgresql" else column.status
    allowed = status.in_([source.value for source in transition.sources])
    statement = update(tables.partitions).where(allowed, *guards).values(changes)
    if by_id and dialect in ("mysql", "mariadb"):
        # By any other index InnoDB locks rows of other ids on its way, and waits for whoever holds one of those.
        statement = statement.with_hint("FORCE INDEX (PRIMARY)", dialect_name=dialect)
    return statement


def restored_transferability(tables: Tables) -> ColumnElement[int]:
    """What is_transferable is for a partition that no node has started."""
    return case((tables.partitions.c.transfer_policy == TransferPolicy.NEVER.value, 0), else_=1)


def started_transferability(tables: Tables) -> ColumnElement[int]:
    """What is_transferable is for a partition that a node has claimed."""
    return case((tables.partitions.c.transfer_policy == TransferPolicy.ALWAYS.value, 1), else_=0)


def record(
    connection: Connection,
    tables: Tables,
    event: PartitionEvent,
    *guards: ColumnElement[bool],
    message: str | None,
    node_id: ColumnElement[Any] | str | None = None,
) -> None:
    """Write one event for each partition that the guards select, as it stands now."""
    p, e = tables.partitions.c, tables.events.c
    node = p.assigned_node if node_id is None else node_id
    rows = select(
        p.step_execution_id,
        p.job_execution_id,
        literal(event.value),
        literal(node) if isinstance(node, str) else node,
        p.version,
        db_now(),
        literal(None if message is None else storable_text(message), tables.events.c.message.type),
    ).where(*guards)
    columns = [
        e.step_execution_id,
        e.job_execution_id,
        e.event,
        e.node_id,
        e.version,
        e.event_time,
        e.message,
    ]
    connection.execute(insert(tables.events).from_select([column.name for column in columns], rows))
