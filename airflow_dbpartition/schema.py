"""The tables of the job repository, written once; migrations and sql/ are held equal to it by tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import (
    DDL,
    BigInteger,
    CheckConstraint,
    Column,
    ColumnElement,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    UniqueConstraint,
    event,
    text,
)

from airflow_dbpartition.dialects import BigId, JsonValue, LongText, UtcDateTime
from airflow_dbpartition.domain import JOB_NAME_LENGTH

VERSION_TABLE = "dbpartition_alembic_version"
WORK_CHANNEL = "dbpartition_work"
DONE_CHANNEL = "dbpartition_done"

NODE_ID_LENGTH = 200
KEY_LENGTH = 200
NODE_GROUP_LENGTH = 100
STEP_NAME_LENGTH = 200

# Keys are compared byte for byte on every database, or two keys that differ in case would collide on MySQL.
_MYSQL: dict[str, Any] = {"mysql_engine": "InnoDB", "mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin"}
_MARIADB = {name.replace("mysql_", "mariadb_"): value for name, value in _MYSQL.items()}
_TABLE_OPTIONS: dict[str, Any] = {
    **_MYSQL,
    **_MARIADB,
    "sqlite_autoincrement": True,  # an id that was purged must not come back: stale claims and XComs still name it
}

_NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}


@dataclass(frozen=True)
class Tables:
    """The five tables of one schema."""

    metadata: MetaData
    nodes: Table
    instances: Table
    executions: Table
    partitions: Table
    events: Table

    @property
    def all(self) -> tuple[Table, ...]:
        """Parents before children."""
        return (self.nodes, self.instances, self.executions, self.partitions, self.events)


def _is_mysql(dialect: Dialect) -> bool:
    return dialect.name in ("mysql", "mariadb")


def _partial_index(name: str, *columns: ColumnElement[Any], where: str, mysql_first: ColumnElement[Any] | None) -> None:
    """An index of only the rows that match `where`; MySQL has none, there the deciding column comes first."""

    def only_mysql(*_: Any, dialect: Dialect, **__: Any) -> bool:
        return _is_mysql(dialect)

    def not_mysql(*_: Any, dialect: Dialect, **__: Any) -> bool:
        return not _is_mysql(dialect)

    Index(name, *columns, postgresql_where=text(where), sqlite_where=text(where)).ddl_if(callable_=not_mysql)
    if mysql_first is not None:
        Index(f"{name}_all", mysql_first, *columns).ddl_if(callable_=only_mysql)


@cache
def build_tables(schema: str | None = None) -> Tables:
    """The tables inside `schema` (None = the connection's own)."""
    metadata = MetaData(schema=schema, naming_convention=_NAMING)
    prefix = f"{schema}." if schema else ""

    nodes = Table(
        "batch_nodes",
        metadata,
        Column("node_id", String(NODE_ID_LENGTH), primary_key=True),
        Column("node_group", String(NODE_GROUP_LENGTH), nullable=False),
        Column("host", String(255), nullable=False),
        Column("pid", Integer, nullable=False),
        Column("version", String(50), nullable=False),
        Column("status", String(20), nullable=False),
        Column("capacity", Integer, nullable=False),
        Column("current_load", Integer, nullable=False),
        Column("steps", JsonValue, nullable=False),
        Column("created_time", UtcDateTime, nullable=False),
        Column("last_heartbeat", UtcDateTime, nullable=False),
        CheckConstraint("status IN ('ACTIVE', 'DRAINING', 'UNREACHABLE', 'REMOVED')", name="status"),
        **_TABLE_OPTIONS,
    )
    # Half-empty pages leave room for a heartbeat's new row version beside the old one (HOT), as long as no index is on
    # last_heartbeat or current_load, which change at each heartbeat.
    half_empty = DDL("ALTER TABLE %(fullname)s SET (fillfactor = 50)").execute_if(  # type: ignore[no-untyped-call]
        dialect="postgresql"
    )
    event.listen(nodes, "after_create", half_empty)
    Index("ix_batch_nodes_status", nodes.c.status, nodes.c.node_group)

    instances = Table(
        "batch_job_instances",
        metadata,
        Column("job_instance_id", BigId, primary_key=True, autoincrement=True),
        Column("job_name", String(JOB_NAME_LENGTH), nullable=False),
        Column("job_key", String(64), nullable=False),
        Column("generation", Integer, nullable=False),
        Column("parameters", JsonValue, nullable=False),
        Column("created_time", UtcDateTime, nullable=False),
        UniqueConstraint("job_name", "job_key", "generation", name="uq_batch_job_instances_identity"),
        **_TABLE_OPTIONS,
    )

    executions = Table(
        "batch_job_executions",
        metadata,
        Column("job_execution_id", BigId, primary_key=True, autoincrement=True),
        Column(
            "job_instance_id", BigInteger, ForeignKey(f"{prefix}batch_job_instances.job_instance_id"), nullable=False
        ),
        # Equal to job_instance_id while active, else NULL: at most one active execution of an instance.
        Column("active_instance_id", BigInteger, nullable=True),
        Column("step_name", String(STEP_NAME_LENGTH), nullable=False),
        Column("node_group", String(NODE_GROUP_LENGTH), nullable=False),
        Column("status", String(20), nullable=False),
        Column("manager", JsonValue, nullable=False),
        Column("settings", JsonValue, nullable=False),
        Column("stealing", SmallInteger, nullable=False),
        Column("partition_count", Integer, nullable=False),
        Column("owner_token", String(64), nullable=True),
        Column("deadline", UtcDateTime, nullable=True),
        Column("run_partition_key", String(250), nullable=True),
        Column("create_time", UtcDateTime, nullable=False),
        Column("start_time", UtcDateTime, nullable=True),
        Column("end_time", UtcDateTime, nullable=True),
        Column("last_updated", UtcDateTime, nullable=False),
        Column("stop_requested", SmallInteger, nullable=False),
        Column("exit_message", LongText, nullable=True),
        UniqueConstraint("active_instance_id", name="uq_batch_job_executions_active_instance_id"),
        CheckConstraint(
            "status IN ('STARTING', 'STARTED', 'STOPPING', 'COMPLETED', 'FAILED', 'STOPPED', 'ABANDONED')",
            name="status",
        ),
        CheckConstraint("stop_requested IN (0, 1)", name="stop_requested"),
        CheckConstraint(
            "(active_instance_id IS NOT NULL) = (status IN ('STARTING', 'STARTED', 'STOPPING'))", name="active"
        ),
        **_TABLE_OPTIONS,
    )
    Index("ix_batch_job_executions_job_instance_id", executions.c.job_instance_id)

    partitions = Table(
        "batch_partitions",
        metadata,
        Column("step_execution_id", BigId, primary_key=True, autoincrement=True),
        Column(
            "job_execution_id", BigInteger, ForeignKey(f"{prefix}batch_job_executions.job_execution_id"), nullable=False
        ),
        Column("job_instance_id", BigInteger, nullable=False),
        Column("partition_key", String(KEY_LENGTH), nullable=False),
        Column("step_name", String(STEP_NAME_LENGTH), nullable=False),
        Column("node_group", String(NODE_GROUP_LENGTH), nullable=False),
        Column("assigned_node", String(NODE_ID_LENGTH), nullable=True),
        Column("status", String(20), nullable=False),
        # Whether it may change hands now; the claim sets it to 0 where the policy is until_started.
        Column("is_transferable", SmallInteger, nullable=False),
        Column("transfer_policy", String(20), nullable=False),
        Column("version", Integer, nullable=False),
        Column("priority", Integer, nullable=False),
        Column("weight", Double, nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("node_losses", Integer, nullable=False),
        Column("available_at", UtcDateTime, nullable=False),
        Column("execution_context", JsonValue, nullable=False),
        Column("checkpoint", JsonValue, nullable=True),
        Column("result", JsonValue, nullable=True),
        Column("read_count", BigInteger, nullable=False, server_default="0"),
        Column("write_count", BigInteger, nullable=False, server_default="0"),
        Column("filter_count", BigInteger, nullable=False, server_default="0"),
        Column("skip_count", BigInteger, nullable=False, server_default="0"),
        Column("commit_count", BigInteger, nullable=False, server_default="0"),
        Column("rollback_count", BigInteger, nullable=False, server_default="0"),
        Column("create_time", UtcDateTime, nullable=False),
        Column("claim_time", UtcDateTime, nullable=True),
        Column("end_time", UtcDateTime, nullable=True),
        Column("last_updated", UtcDateTime, nullable=False),
        Column("exit_message", LongText, nullable=True),
        UniqueConstraint("job_execution_id", "partition_key", name="uq_batch_partitions_key"),
        CheckConstraint("status IN ('PENDING', 'CLAIMED', 'COMPLETED', 'FAILED', 'STOPPED')", name="status"),
        CheckConstraint("is_transferable IN (0, 1)", name="is_transferable"),
        CheckConstraint("transfer_policy IN ('always', 'until_started', 'never')", name="transfer_policy"),
        CheckConstraint("status <> 'CLAIMED' OR assigned_node IS NOT NULL", name="claimed_has_owner"),
        **_TABLE_OPTIONS,
    )
    column = partitions.c
    claim_order = (column.priority.desc(), column.step_execution_id)
    # A node's own work, in the order of the claim's ORDER BY.
    _partial_index(
        "ix_batch_partitions_own",
        column.assigned_node,
        *claim_order,
        where="status = 'PENDING' AND assigned_node IS NOT NULL",
        mysql_first=column.status,
    )
    # Nobody's work.
    _partial_index(
        "ix_batch_partitions_free",
        column.node_group,
        *claim_order,
        where="status = 'PENDING' AND assigned_node IS NULL",
        mysql_first=column.status,
    )
    # Work that may be stolen.
    _partial_index(
        "ix_batch_partitions_steal",
        column.node_group,
        *claim_order,
        where="status = 'PENDING' AND is_transferable = 1 AND assigned_node IS NOT NULL",
        mysql_first=column.is_transferable,
    )
    # What a node holds: read at each heartbeat (on MySQL ix_batch_partitions_own_all serves as well).
    _partial_index("ix_batch_partitions_held", column.assigned_node, where="status = 'CLAIMED'", mysql_first=None)
    # Whether an execution has anything left, and its counts.
    Index("ix_batch_partitions_execution_status", column.job_execution_id, column.status)

    events = Table(
        "batch_partition_events",
        metadata,
        Column("event_id", BigId, primary_key=True, autoincrement=True),
        Column("step_execution_id", BigInteger, nullable=False),
        Column("job_execution_id", BigInteger, nullable=False),
        Column("event", String(20), nullable=False),
        Column("node_id", String(NODE_ID_LENGTH), nullable=True),
        Column("version", Integer, nullable=False),
        Column("event_time", UtcDateTime, nullable=False),
        Column("message", LongText, nullable=True),
        **_TABLE_OPTIONS,
    )
    Index("ix_batch_partition_events_job_execution_id", events.c.job_execution_id)
    Index("ix_batch_partition_events_step_execution_id", events.c.step_execution_id)

    return Tables(
        metadata=metadata, nodes=nodes, instances=instances, executions=executions, partitions=partitions, events=events
    )
