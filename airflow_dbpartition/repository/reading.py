"""Statements that only look: executions, progress, failures, results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row, Select, func, select
from sqlalchemy.engine import Connection

from airflow_dbpartition.dialects import age_s, db_now
from airflow_dbpartition.domain import (
    COUNTER_NAMES,
    Counters,
    ExecutionStatus,
    JobExecution,
    JobSettings,
    PartitionStatus,
    Progress,
)
from airflow_dbpartition.errors import JobExecutionNotFoundError
from airflow_dbpartition.repository.transactions import Transactions
from airflow_dbpartition.schema import Tables
from airflow_dbpartition.storable import JsonObject

RESULT_PAGE_ROWS = 1000


@dataclass(frozen=True)
class Failure:
    """One failed partition."""

    partition_key: str
    node_id: str | None
    attempt: int
    message: str


@dataclass(frozen=True)
class Summary:
    """What became of a job instance: its latest execution, with what earlier executions of it had completed."""

    job_execution_id: int
    job_name: str
    generation: int
    status: ExecutionStatus
    counts: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    nodes: int = 0
    duration_s: float | None = None

    def to_json(self) -> JsonObject:
        """Small enough for an XCom, whatever the number of partitions."""
        return {
            "job_execution_id": self.job_execution_id,
            "job_name": self.job_name,
            "generation": self.generation,
            "status": self.status.value,
            "partitions": self.counts,
            "counters": self.counters,
            "nodes": self.nodes,
            "duration_s": self.duration_s,
        }


@dataclass(frozen=True)
class PartitionRow:
    """A partition as people look at it."""

    step_execution_id: int
    job_execution_id: int
    partition_key: str
    status: PartitionStatus
    assigned_node: str | None
    attempt: int
    node_losses: int
    version: int
    weight: float
    context: JsonObject
    checkpoint: JsonObject | None
    result: Any
    counters: Counters
    exit_message: str | None


@dataclass(frozen=True)
class EventRow:
    """One entry of the history of what was not the happy path."""

    event_id: int
    step_execution_id: int
    partition_key: str
    event: str
    node_id: str | None
    version: int
    seconds_ago: float
    message: str | None


class Reading:
    """Queries for managers, people and tests."""

    def __init__(self, tables: Tables, transactions: Transactions) -> None:
        self._tables = tables
        self._transactions = transactions

    def execution(self, job_execution_id: int) -> JobExecution:
        """One execution.

        Raises:
            JobExecutionNotFoundError: there is none of that id.
        """
        found = self._executions(lambda e, _: e.job_execution_id == job_execution_id, limit=1)
        if not found:
            raise JobExecutionNotFoundError(f"there is no job execution {job_execution_id}")
        return found[0]

    def latest(self, job_name: str, job_key: str) -> JobExecution | None:
        """The latest execution of the latest generation of a job."""
        found = self._executions(
            lambda _, i: (i.job_name == job_name) & (i.job_key == job_key), limit=1, by_generation=True
        )
        return found[0] if found else None

    def latest_of_instance(self, job_execution_id: int) -> JobExecution:
        """The latest execution of the instance that an execution belongs to: itself, or its last restart.

        Raises:
            JobExecutionNotFoundError: there is none of that id.
        """
        e = self._tables.executions.c
        instance = select(e.job_instance_id).where(e.job_execution_id == job_execution_id).scalar_subquery()
        found = self._executions(lambda e, _: e.job_instance_id == instance, limit=1)
        if not found:
            raise JobExecutionNotFoundError(f"there is no job execution {job_execution_id}")
        return found[0]

    def age_s(self, job_execution_id: int) -> float:
        """Seconds since an execution was written, by the database's clock.

        Raises:
            JobExecutionNotFoundError: there is none of that id.
        """
        e = self._tables.executions.c
        query = select(age_s(e.create_time)).where(e.job_execution_id == job_execution_id)
        found = self._transactions.run(lambda connection: connection.execute(query).scalar())
        if found is None:
            raise JobExecutionNotFoundError(f"there is no job execution {job_execution_id}")
        return float(found)

    def recent(self, *, limit: int = 20, job_name: str | None = None, active: bool = False) -> list[JobExecution]:
        """Executions, newest first."""

        def condition(e: Any, i: Any) -> Any:
            wanted = e.job_execution_id > 0
            if job_name is not None:
                wanted &= i.job_name == job_name
            if active:
                wanted &= e.active_instance_id.is_not(None)
            return wanted

        return self._executions(condition, limit=limit)

    def owned_by(self, owner_token: str) -> list[int]:
        """The active executions that a try owns; one, as a rule."""

        def condition(e: Any, _i: Any) -> Any:
            return e.active_instance_id.is_not(None) & (e.owner_token == owner_token)

        return [execution.job_execution_id for execution in self._executions(condition, limit=100)]

    def _executions(self, condition: Any, *, limit: int, by_generation: bool = False) -> list[JobExecution]:
        e, i = self._tables.executions.c, self._tables.instances.c
        query = (
            select(self._tables.executions, i.job_name, i.job_key, i.generation)
            .join_from(self._tables.executions, self._tables.instances, e.job_instance_id == i.job_instance_id)
            .where(condition(e, i))
            .order_by(*([i.generation.desc()] if by_generation else []), e.job_execution_id.desc())
            .limit(limit)
        )
        return self._transactions.run(lambda connection: [_execution(row) for row in connection.execute(query)])

    def progress(self, job_execution_ids: Sequence[int]) -> dict[int, Progress]:
        """Counts by status of several executions, in one query; unknown ids are left out."""
        if not job_execution_ids:
            return {}

        def work(connection: Connection) -> dict[int, Progress]:
            e, p = self._tables.executions.c, self._tables.partitions.c
            query = (
                select(
                    e.job_execution_id,
                    e.status,
                    e.stop_requested,
                    (func.coalesce(e.deadline, db_now()) < db_now()).label("late"),
                    p.status.label("partition_status"),
                    func.count(p.step_execution_id).label("partitions"),
                )
                .select_from(self._tables.executions)
                .outerjoin(self._tables.partitions, p.job_execution_id == e.job_execution_id)
                .where(e.job_execution_id.in_(list(job_execution_ids)))
                .group_by(e.job_execution_id, e.status, e.stop_requested, e.deadline, p.status)
            )
            found: dict[int, Progress] = {}
            for row in connection.execute(query):
                progress = found.setdefault(
                    row.job_execution_id,
                    Progress(
                        row.job_execution_id,
                        ExecutionStatus(row.status),
                        bool(row.stop_requested),
                        {},
                        deadline_passed=bool(row.late),
                    ),
                )
                if row.partition_status is not None:
                    progress.counts[PartitionStatus(row.partition_status)] = row.partitions
            return found

        return self._transactions.run(work)

    def running_by_node(self, job_execution_id: int) -> dict[str, dict[PartitionStatus, int]]:
        """Counts by node and status of one execution; unassigned partitions under the empty name."""

        def work(connection: Connection) -> dict[str, dict[PartitionStatus, int]]:
            p = self._tables.partitions.c
            query = (
                select(p.assigned_node, p.status, func.count().label("partitions"))
                .where(p.job_execution_id == job_execution_id)
                .group_by(p.assigned_node, p.status)
            )
            found: dict[str, dict[PartitionStatus, int]] = {}
            for row in connection.execute(query):
                found.setdefault(row.assigned_node or "", {})[PartitionStatus(row.status)] = row.partitions
            return found

        return self._transactions.run(work)

    def summary(self, job_execution_id: int) -> Summary:
        """Counts and summed counters of the whole instance, as its latest execution leaves it.

        Raises:
            JobExecutionNotFoundError: there is none of that id.
        """
        latest = self.latest_of_instance(job_execution_id)

        def work(connection: Connection) -> Summary:
            p = self._tables.partitions.c
            sums = [func.coalesce(func.sum(p[f"{name}_count"]), 0).label(name) for name in COUNTER_NAMES]
            query = select(p.status, func.count().label("partitions"), *sums).group_by(p.status)
            counts = {status.value.lower(): 0 for status in PartitionStatus}
            counters = dict.fromkeys(COUNTER_NAMES, 0)
            for row in connection.execute(query.where(self._current_rows(latest))):
                counts[row.status.lower()] = row.partitions
                for name in COUNTER_NAMES:
                    counters[name] += int(row._mapping[name])
            nodes = connection.execute(
                select(func.count(p.assigned_node.distinct())).where(self._current_rows(latest))
            ).scalar_one()
            took = None
            if latest.end_time is not None:
                took = round((latest.end_time - (latest.start_time or latest.create_time)).total_seconds(), 3)
            return Summary(
                job_execution_id=latest.job_execution_id,
                job_name=latest.job_name,
                generation=latest.generation,
                status=latest.status,
                counts={"total": sum(counts.values()), **counts},
                counters=counters,
                nodes=int(nodes),
                duration_s=took,
            )

        return self._transactions.run(work)

    def _current_rows(self, latest: JobExecution) -> Any:
        """The latest execution's rows, and what earlier executions of the instance completed."""
        e, p = self._tables.executions.c, self._tables.partitions.c
        siblings = select(e.job_execution_id).where(e.job_instance_id == latest.job_instance_id)
        completed = p.status == PartitionStatus.COMPLETED.value
        return p.job_execution_id.in_(siblings) & ((p.job_execution_id == latest.job_execution_id) | completed)

    def failures(self, job_execution_id: int, *, limit: int = 10) -> list[Failure]:
        """The first failed partitions of an execution, in the order of the plan."""

        def work(connection: Connection) -> list[Failure]:
            p = self._tables.partitions.c
            query = (
                select(p.partition_key, p.assigned_node, p.attempt, p.exit_message)
                .where(p.job_execution_id == job_execution_id, p.status == PartitionStatus.FAILED.value)
                .order_by(p.step_execution_id)
                .limit(limit)
            )
            return [
                Failure(row.partition_key, row.assigned_node, row.attempt, row.exit_message or "")
                for row in connection.execute(query)
            ]

        return self._transactions.run(work)

    def partitions(
        self,
        job_execution_id: int,
        *,
        statuses: Sequence[PartitionStatus] = (),
        limit: int | None = None,
        after: int = 0,
    ) -> list[PartitionRow]:
        """Partitions of one execution by id, `limit` of them after step_execution_id `after`."""

        def work(connection: Connection) -> list[PartitionRow]:
            p = self._tables.partitions.c
            query = (
                select(self._tables.partitions)
                .where(p.job_execution_id == job_execution_id, p.step_execution_id > after)
                .order_by(p.step_execution_id)
                .limit(limit)
            )
            if statuses:
                query = query.where(p.status.in_([status.value for status in statuses]))
            return [_partition(row) for row in connection.execute(query)]

        return self._transactions.run(work)

    def iter_results(self, job_execution_id: int) -> Iterator[tuple[str, Any]]:
        """(partition key, result) of every completed partition of the instance, read page by page."""
        latest = self.latest_of_instance(job_execution_id)
        p = self._tables.partitions.c
        after = 0
        while True:
            query: Select[Any] = (
                select(p.step_execution_id, p.partition_key, p.result)
                .where(
                    self._current_rows(latest),
                    p.status == PartitionStatus.COMPLETED.value,
                    p.step_execution_id > after,
                )
                .order_by(p.step_execution_id)
                .limit(RESULT_PAGE_ROWS)
            )
            rows = self._rows(query)
            for row in rows:
                yield row.partition_key, row.result
            if len(rows) < RESULT_PAGE_ROWS:
                return
            after = rows[-1].step_execution_id

    def _rows(self, query: Select[Any]) -> Sequence[Row[Any]]:
        return self._transactions.run(lambda connection: connection.execute(query).all())

    def events(self, job_execution_id: int, *, after: int = 0, limit: int = 1000) -> list[EventRow]:
        """The history of an execution, oldest first, after event id `after`."""

        def work(connection: Connection) -> list[EventRow]:
            v, p = self._tables.events.c, self._tables.partitions.c
            query = (
                select(self._tables.events, p.partition_key, age_s(v.event_time).label("seconds_ago"))
                .join_from(self._tables.events, self._tables.partitions, v.step_execution_id == p.step_execution_id)
                .where(v.job_execution_id == job_execution_id, v.event_id > after)
                .order_by(v.event_id)
                .limit(limit)
            )
            return [
                EventRow(
                    row.event_id,
                    row.step_execution_id,
                    row.partition_key,
                    row.event,
                    row.node_id,
                    row.version,
                    float(row.seconds_ago),
                    row.message,
                )
                for row in connection.execute(query)
            ]

        return self._transactions.run(work)


def _execution(row: Row[Any]) -> JobExecution:
    return JobExecution(
        job_execution_id=row.job_execution_id,
        job_instance_id=row.job_instance_id,
        job_name=row.job_name,
        job_key=row.job_key,
        generation=row.generation,
        step_name=row.step_name,
        node_group=row.node_group,
        status=ExecutionStatus(row.status),
        partition_count=row.partition_count,
        manager=row.manager,
        settings=JobSettings.from_json(row.settings),
        owner_token=row.owner_token,
        stop_requested=bool(row.stop_requested),
        exit_message=row.exit_message,
        create_time=row.create_time,
        start_time=row.start_time,
        end_time=row.end_time,
        deadline=row.deadline,
        run_partition_key=row.run_partition_key,
    )


def _partition(row: Row[Any]) -> PartitionRow:
    return PartitionRow(
        step_execution_id=row.step_execution_id,
        job_execution_id=row.job_execution_id,
        partition_key=row.partition_key,
        status=PartitionStatus(row.status),
        assigned_node=row.assigned_node,
        attempt=row.attempt,
        node_losses=row.node_losses,
        version=row.version,
        weight=row.weight,
        context=row.execution_context,
        checkpoint=row.checkpoint,
        result=row.result,
        counters=Counters.from_columns(row._asdict()),
        exit_message=row.exit_message,
    )
