"""The first schema: five tables.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context, op

from airflow_dbpartition.dialects import BigId, JsonValue, LongText, UtcDateTime

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_TABLE_OPTIONS: dict[str, Any] = {
    "sqlite_autoincrement": True,
    **{
        f"{dialect}_{name}": value
        for dialect in ("mysql", "mariadb")
        for name, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
    },
}


def upgrade(schema: str | None = None) -> None:
    """Create the tables inside `schema` (None = the connection's own)."""
    on_mysql = context.get_context().dialect.name in ("mysql", "mariadb")
    prefix = f"{schema}." if schema else ""
    op.create_table(
        "batch_job_instances",
        sa.Column("job_instance_id", BigId, autoincrement=True, nullable=False),
        sa.Column("job_name", sa.String(length=250), nullable=False),
        sa.Column("job_key", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("parameters", JsonValue, nullable=False),
        sa.Column("created_time", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("job_instance_id", name=op.f("pk_batch_job_instances")),
        sa.UniqueConstraint("job_name", "job_key", "generation", name="uq_batch_job_instances_identity"),
        schema=schema,
        **_TABLE_OPTIONS,
    )
    op.create_table(
        "batch_nodes",
        sa.Column("node_id", sa.String(length=200), nullable=False),
        sa.Column("node_group", sa.String(length=100), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("version", sa.String(length=50), nullable=False),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("capacity", sa.Integer(), nullable=False),
        sa.Column("current_load", sa.Integer(), nullable=False),
        sa.Column("steps", JsonValue, nullable=False),
        sa.Column("created_time", UtcDateTime(), nullable=False),
        sa.Column("last_heartbeat", UtcDateTime(), nullable=False),
        sa.CheckConstraint(
            "status IN ('ACTIVE', 'DRAINING', 'UNREACHABLE', 'REMOVED')", name=op.f("ck_batch_nodes_status")
        ),
        sa.PrimaryKeyConstraint("node_id", name=op.f("pk_batch_nodes")),
        schema=schema,
        **_TABLE_OPTIONS,
    )
    if context.get_context().dialect.name == "postgresql":
        quote = context.get_context().dialect.identifier_preparer.quote
        table = f"{quote(schema)}.batch_nodes" if schema else "batch_nodes"
        op.execute(f"ALTER TABLE {table} SET (fillfactor = 50)")
    op.create_index("ix_batch_nodes_status", "batch_nodes", ["status", "node_group"], unique=False, schema=schema)
    op.create_table(
        "batch_partition_events",
        sa.Column("event_id", BigId, autoincrement=True, nullable=False),
        sa.Column("step_execution_id", sa.BigInteger(), nullable=False),
        sa.Column("job_execution_id", sa.BigInteger(), nullable=False),
        sa.Column("event", sa.String(length=20), nullable=False),
        sa.Column("node_id", sa.String(length=200), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("event_time", UtcDateTime(), nullable=False),
        sa.Column("message", LongText, nullable=True),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_batch_partition_events")),
        schema=schema,
        **_TABLE_OPTIONS,
    )
    op.create_index(
        "ix_batch_partition_events_job_execution_id",
        "batch_partition_events",
        ["job_execution_id"],
        unique=False,
        schema=schema,
    )
    op.create_index(
        "ix_batch_partition_events_step_execution_id",
        "batch_partition_events",
        ["step_execution_id"],
        unique=False,
        schema=schema,
    )
    op.create_table(
        "batch_job_executions",
        sa.Column("job_execution_id", BigId, autoincrement=True, nullable=False),
        sa.Column("job_instance_id", sa.BigInteger(), nullable=False),
        sa.Column("active_instance_id", sa.BigInteger(), nullable=True),
        sa.Column("step_name", sa.String(length=200), nullable=False),
        sa.Column("node_group", sa.String(length=100), nullable=False),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("manager", JsonValue, nullable=False),
        sa.Column("settings", JsonValue, nullable=False),
        sa.Column("stealing", sa.SmallInteger(), nullable=False),
        sa.Column("partition_count", sa.Integer(), nullable=False),
        sa.Column("owner_token", sa.String(length=64), nullable=True),
        sa.Column("deadline", UtcDateTime(), nullable=True),
        sa.Column("run_partition_key", sa.String(length=250), nullable=True),
        sa.Column("create_time", UtcDateTime(), nullable=False),
        sa.Column("start_time", UtcDateTime(), nullable=True),
        sa.Column("end_time", UtcDateTime(), nullable=True),
        sa.Column("last_updated", UtcDateTime(), nullable=False),
        sa.Column("stop_requested", sa.SmallInteger(), nullable=False),
        sa.Column("exit_message", LongText, nullable=True),
        sa.CheckConstraint(
            "(active_instance_id IS NOT NULL) = (status IN ('STARTING', 'STARTED', 'STOPPING'))",
            name=op.f("ck_batch_job_executions_active"),
        ),
        sa.CheckConstraint(
            "status IN ('STARTING', 'STARTED', 'STOPPING', 'COMPLETED', 'FAILED', 'STOPPED', 'ABANDONED')",
            name=op.f("ck_batch_job_executions_status"),
        ),
        sa.CheckConstraint("stop_requested IN (0, 1)", name=op.f("ck_batch_job_executions_stop_requested")),
        sa.ForeignKeyConstraint(
            ["job_instance_id"],
            [f"{prefix}batch_job_instances.job_instance_id"],
            name=op.f("fk_batch_job_executions_job_instance_id"),
        ),
        sa.PrimaryKeyConstraint("job_execution_id", name=op.f("pk_batch_job_executions")),
        sa.UniqueConstraint("active_instance_id", name="uq_batch_job_executions_active_instance_id"),
        schema=schema,
        **_TABLE_OPTIONS,
    )
    op.create_index(
        "ix_batch_job_executions_job_instance_id",
        "batch_job_executions",
        ["job_instance_id"],
        unique=False,
        schema=schema,
    )
    op.create_table(
        "batch_partitions",
        sa.Column("step_execution_id", BigId, autoincrement=True, nullable=False),
        sa.Column("job_execution_id", sa.BigInteger(), nullable=False),
        sa.Column("job_instance_id", sa.BigInteger(), nullable=False),
        sa.Column("partition_key", sa.String(length=200), nullable=False),
        sa.Column("step_name", sa.String(length=200), nullable=False),
        sa.Column("node_group", sa.String(length=100), nullable=False),
        sa.Column("assigned_node", sa.String(length=200), nullable=True),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("is_transferable", sa.SmallInteger(), nullable=False),
        sa.Column("transfer_policy", sa.String(length=20), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("node_losses", sa.Integer(), nullable=False),
        sa.Column("available_at", UtcDateTime(), nullable=False),
        sa.Column("execution_context", JsonValue, nullable=False),
        sa.Column("checkpoint", JsonValue, nullable=True),
        sa.Column("result", JsonValue, nullable=True),
        sa.Column("read_count", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("write_count", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("filter_count", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("skip_count", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("commit_count", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("rollback_count", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("create_time", UtcDateTime(), nullable=False),
        sa.Column("claim_time", UtcDateTime(), nullable=True),
        sa.Column("end_time", UtcDateTime(), nullable=True),
        sa.Column("last_updated", UtcDateTime(), nullable=False),
        sa.Column("exit_message", LongText, nullable=True),
        sa.CheckConstraint(
            "status <> 'CLAIMED' OR assigned_node IS NOT NULL", name=op.f("ck_batch_partitions_claimed_has_owner")
        ),
        sa.CheckConstraint(
            "status IN ('PENDING', 'CLAIMED', 'COMPLETED', 'FAILED', 'STOPPED')",
            name=op.f("ck_batch_partitions_status"),
        ),
        sa.CheckConstraint(
            "transfer_policy IN ('always', 'until_started', 'never')", name=op.f("ck_batch_partitions_transfer_policy")
        ),
        sa.CheckConstraint("is_transferable IN (0, 1)", name=op.f("ck_batch_partitions_is_transferable")),
        sa.ForeignKeyConstraint(
            ["job_execution_id"],
            [f"{prefix}batch_job_executions.job_execution_id"],
            name=op.f("fk_batch_partitions_job_execution_id"),
        ),
        sa.PrimaryKeyConstraint("step_execution_id", name=op.f("pk_batch_partitions")),
        sa.UniqueConstraint("job_execution_id", "partition_key", name="uq_batch_partitions_key"),
        schema=schema,
        **_TABLE_OPTIONS,
    )
    op.create_index(
        "ix_batch_partitions_execution_status",
        "batch_partitions",
        ["job_execution_id", "status"],
        unique=False,
        schema=schema,
    )
    if not on_mysql:
        op.create_index(
            "ix_batch_partitions_free",
            "batch_partitions",
            ["node_group", sa.literal_column("priority DESC"), "step_execution_id"],
            unique=False,
            schema=schema,
            postgresql_where=sa.text("status = 'PENDING' AND assigned_node IS NULL"),
            sqlite_where=sa.text("status = 'PENDING' AND assigned_node IS NULL"),
        )
    if on_mysql:
        op.create_index(
            "ix_batch_partitions_free_all",
            "batch_partitions",
            ["status", "node_group", sa.literal_column("priority DESC"), "step_execution_id"],
            unique=False,
            schema=schema,
        )
    if not on_mysql:
        op.create_index(
            "ix_batch_partitions_held",
            "batch_partitions",
            ["assigned_node"],
            unique=False,
            schema=schema,
            postgresql_where=sa.text("status = 'CLAIMED'"),
            sqlite_where=sa.text("status = 'CLAIMED'"),
        )
    if not on_mysql:
        op.create_index(
            "ix_batch_partitions_own",
            "batch_partitions",
            ["assigned_node", sa.literal_column("priority DESC"), "step_execution_id"],
            unique=False,
            schema=schema,
            postgresql_where=sa.text("status = 'PENDING' AND assigned_node IS NOT NULL"),
            sqlite_where=sa.text("status = 'PENDING' AND assigned_node IS NOT NULL"),
        )
    if on_mysql:
        op.create_index(
            "ix_batch_partitions_own_all",
            "batch_partitions",
            ["status", "assigned_node", sa.literal_column("priority DESC"), "step_execution_id"],
            unique=False,
            schema=schema,
        )
    if not on_mysql:
        op.create_index(
            "ix_batch_partitions_steal",
            "batch_partitions",
            ["node_group", sa.literal_column("priority DESC"), "step_execution_id"],
            unique=False,
            schema=schema,
            postgresql_where=sa.text("status = 'PENDING' AND is_transferable = 1 AND assigned_node IS NOT NULL"),
            sqlite_where=sa.text("status = 'PENDING' AND is_transferable = 1 AND assigned_node IS NOT NULL"),
        )
    if on_mysql:
        op.create_index(
            "ix_batch_partitions_steal_all",
            "batch_partitions",
            ["is_transferable", "node_group", sa.literal_column("priority DESC"), "step_execution_id"],
            unique=False,
            schema=schema,
        )
