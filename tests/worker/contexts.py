"""Contexts of real claims, and a user's tables beside those of the job repository."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Column, Integer, MetaData, String, Table, insert, select

from airflow_dbpartition.domain import Claim
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.worker import PartitionContext
from tests.scenarios import claim_one


def context_of(claim: Claim, repository: JobRepository, *, stopping: bool = False) -> PartitionContext:
    return PartitionContext(claim, repository, lambda: stopping)


def claimed_context(repository: JobRepository, node_id: str = "a") -> PartitionContext:
    """Claim the next partition, and see it as its step does."""
    return context_of(claim_one(repository, node_id), repository)


class Flights:
    """A user's two tables: what is read, and what is written."""

    def __init__(self, repository: JobRepository, ids: Iterable[int] = ()) -> None:
        self._engine = repository.engine
        metadata = MetaData(schema=repository.schema)
        self.source = Table(
            "flights",
            metadata,
            Column("row", Integer, primary_key=True),
            Column("id", Integer, index=True),
            Column("carrier", String(20)),
        )
        self.target = Table("totals", metadata, Column("id", Integer), Column("by", String(50)))
        metadata.create_all(self._engine)
        rows = [{"id": number, "carrier": f"carrier {number}"} for number in ids]
        if rows:
            with self._engine.begin() as connection:
                connection.execute(insert(self.source), rows)

    def write(self, connection: Any, number: int, by: str = "") -> None:
        connection.execute(insert(self.target).values(id=number, by=by))

    def written(self) -> list[tuple[int, str]]:
        """What is committed, in the order of the ids."""
        with self._engine.connect() as connection:
            query = select(self.target.c.id, self.target.c.by).order_by(self.target.c.id, self.target.c.by)
            return [(row[0], row[1]) for row in connection.execute(query)]

    def written_ids(self) -> list[int]:
        return [number for number, _ in self.written()]
