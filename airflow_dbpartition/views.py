"""The three views for people, written once and compiled for each database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, case, func, select
from sqlalchemy.engine import Dialect
from sqlalchemy.sql.elements import ColumnElement

from airflow_dbpartition.dialects import age_s, joined_texts
from airflow_dbpartition.domain import LIVE_PARTITIONS, NodeStatus, PartitionStatus
from airflow_dbpartition.schema import Tables

VIEW_NAMES = ("batch_job_coordination", "batch_job_progress", "batch_cluster")


def view_queries(tables: Tables) -> dict[str, Select[Any]]:
    """The query behind each view."""
    e, i, p, n = tables.executions.c, tables.instances.c, tables.partitions.c, tables.nodes.c

    coordination = select(
        e.job_execution_id,
        i.job_name,
        i.generation,
        e.manager,
        e.step_name.label("manager_step"),
        e.status,
        e.create_time.label("created_time"),
        e.start_time,
        e.end_time,
        e.last_updated,
    ).join_from(tables.executions, tables.instances, e.job_instance_id == i.job_instance_id)

    def count_of(status: PartitionStatus) -> ColumnElement[int]:
        return func.coalesce(func.sum(case((p.status == status.value, 1), else_=0)), 0)

    finished = [count_of(status) for status in PartitionStatus if status not in LIVE_PARTITIONS]
    total = func.count(p.step_execution_id)
    running_s = age_s(e.start_time) - func.coalesce(age_s(e.end_time), 0)
    progress = (
        select(
            e.job_execution_id,
            i.job_name,
            i.generation,
            e.step_name,
            e.node_group,
            e.status,
            total.label("partitions"),
            *(count_of(status).label(status.value.lower()) for status in PartitionStatus),
            case((total == 0, 100.0), else_=100.0 * sum(finished[1:], finished[0]) / func.nullif(total, 0)).label(
                "per_cent"
            ),
            func.coalesce(func.sum(p.read_count), 0).label("read_count"),
            func.coalesce(func.sum(p.write_count), 0).label("write_count"),
            func.coalesce(func.sum(p.skip_count), 0).label("skip_count"),
            (func.sum(p.write_count) / func.nullif(running_s, 0)).label("writes_per_second"),
            func.max(case((p.status == PartitionStatus.CLAIMED.value, age_s(p.claim_time)))).label("oldest_claim_s"),
            e.create_time,
            e.start_time,
            e.end_time,
        )
        .select_from(tables.executions)
        .join(tables.instances, e.job_instance_id == i.job_instance_id)
        .outerjoin(tables.partitions, p.job_execution_id == e.job_execution_id)
        .group_by(
            e.job_execution_id,
            i.job_name,
            i.generation,
            e.step_name,
            e.node_group,
            e.status,
            e.create_time,
            e.start_time,
            e.end_time,
        )
    )

    running = (
        select(
            p.assigned_node,
            func.count().label("running"),
            joined_texts(p.partition_key).label("running_partitions"),
        )
        .where(p.status == PartitionStatus.CLAIMED.value)
        .group_by(p.assigned_node)
        .subquery("running")
    )
    cluster = (
        select(
            n.node_id,
            n.node_group,
            n.host,
            n.pid,
            n.version,
            n.status,
            age_s(n.last_heartbeat).label("heartbeat_age_s"),
            n.capacity,
            n.current_load,
            func.coalesce(running.c.running, 0).label("running"),
            running.c.running_partitions,
            n.steps,
            n.created_time,
        )
        .select_from(tables.nodes)
        .outerjoin(running, running.c.assigned_node == n.node_id)
        .where(n.status != NodeStatus.REMOVED.value)
    )
    return dict(zip(VIEW_NAMES, (coordination, progress, cluster), strict=True))


def _qualified(name: str, tables: Tables, dialect: Dialect) -> str:
    schema = tables.metadata.schema
    prefix = f"{dialect.identifier_preparer.quote(schema)}." if schema else ""
    return prefix + name


def drop_views_sql(tables: Tables, dialect: Dialect) -> list[str]:
    return [f"DROP VIEW IF EXISTS {_qualified(name, tables, dialect)}" for name in reversed(VIEW_NAMES)]


def create_views_sql(tables: Tables, dialect: Dialect) -> list[str]:
    statements = []
    for name, query in view_queries(tables).items():
        body = query.compile(dialect=dialect, compile_kwargs={"literal_binds": True})
        # A literal per cent sign is doubled for drivers that format parameters; no parameter is left here.
        statements.append(f"CREATE VIEW {_qualified(name, tables, dialect)} AS {str(body).replace('%%', '%')}")
    return statements
