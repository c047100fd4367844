"""Every statement that this package sends to the database, one file a concern."""

from __future__ import annotations

from sqlalchemy.engine import Engine

from airflow_dbpartition.config import DatabaseConfig
from airflow_dbpartition.dialects import make_engine
from airflow_dbpartition.repository.claims import Claims
from airflow_dbpartition.repository.executions import Executions, Launched, NewExecution
from airflow_dbpartition.repository.losses import Losses
from airflow_dbpartition.repository.nodes import HeartbeatReply, Nodes
from airflow_dbpartition.repository.reading import Reading
from airflow_dbpartition.repository.retention import Retention
from airflow_dbpartition.repository.sessions import Sessions
from airflow_dbpartition.repository.settlements import Settlements
from airflow_dbpartition.repository.transactions import Transactions
from airflow_dbpartition.schema import build_tables

__all__ = ["HeartbeatReply", "JobRepository", "Launched", "NewExecution"]


class JobRepository:
    """The job repository: the database as the rest of the package sees it.

    Args:
        engine: from `make_engine`, so that isolation and timeouts are set.
        schema: the database schema of the tables; None = the connection's own.
        deadline_s: seconds after which a transaction's connection is cut, even if the server never answers.
    """

    def __init__(self, engine: Engine, schema: str | None = None, *, deadline_s: float = 600.0) -> None:
        self.engine = engine
        self.schema = schema
        self.tables = build_tables(schema)
        self.transactions = Transactions(engine, deadline_s=deadline_s)
        self.nodes = Nodes(self.tables, self.transactions)
        self.executions = Executions(self.tables, self.transactions)
        self.claims = Claims(self.tables, self.transactions)
        self.settlements = Settlements(self.tables, self.transactions)
        self.losses = Losses(self.tables, self.transactions)
        self.reading = Reading(self.tables, self.transactions)
        self.retention = Retention(self.tables, self.transactions)
        self.sessions = Sessions(self.transactions)

    @classmethod
    def connect(cls, config: DatabaseConfig, *, deadline_s: float = 600.0) -> JobRepository:
        """A repository on an engine of its own; nothing is sent yet."""
        return cls(make_engine(config), config.schema, deadline_s=deadline_s)

    def close(self) -> None:
        """Close every pooled connection."""
        self.engine.dispose()
