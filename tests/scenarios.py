"""What many tests begin with: nodes, submitted jobs, claims; and looks at what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import select, update

from airflow_dbpartition import assignment
from airflow_dbpartition.config import Timings
from airflow_dbpartition.dialects import db_later
from airflow_dbpartition.domain import (
    DEFAULT_NODE_GROUP,
    Claim,
    Counters,
    JobIdentity,
    JobSettings,
    NodeView,
    Partition,
    PartitionStatus,
)
from airflow_dbpartition.recovery import Recovery
from airflow_dbpartition.repository import JobRepository, Launched, NewExecution
from airflow_dbpartition.repository.reading import PartitionRow

STEP = "work"
OFTEN = JobSettings(transferable="always", max_node_losses=100)
QUICK = Timings(heartbeat_s=3, unreachable_after_s=10, remove_after_s=30)


def add_node(
    repository: JobRepository,
    node_id: str = "a",
    *,
    steps: Iterable[str] = (STEP,),
    node_group: str = DEFAULT_NODE_GROUP,
    capacity: int = 4,
) -> str:
    """Register a live node."""
    repository.nodes.register(
        node_id=node_id,
        node_group=node_group,
        host="here",
        pid=1,
        version="test",
        capacity=capacity,
        steps=tuple(steps),
    )
    return node_id


def plan(count: int, **partition: Any) -> list[Partition]:
    return [Partition(f"p{number}", {"number": number}, **partition) for number in range(count)]


def submit(
    repository: JobRepository,
    partitions: int | Sequence[Partition] = 1,
    *,
    job: str = "job",
    to: str | dict[str, str | None] | None = None,
    parameters: dict[str, Any] | None = None,
    settings: JobSettings | None = None,
    step: str = STEP,
    **new: Any,
) -> Launched:
    """Submit a job of so many partitions, given to nobody, to one node, or as a mapping says."""
    planned = plan(partitions) if isinstance(partitions, int) else list(partitions)
    placement = to if isinstance(to, dict) else {partition.key: to for partition in planned}
    return repository.executions.submit(
        NewExecution(
            identity=JobIdentity(job, parameters or {}),
            step_name=step,
            settings=settings or JobSettings(),
            **new,
        ),
        planned,
        placement,
    )


def claim(
    repository: JobRepository,
    node_id: str = "a",
    limit: int = 1,
    *,
    steps: Iterable[str] = (STEP,),
    node_group: str = DEFAULT_NODE_GROUP,
    steal_after_s: float | None = None,
) -> list[Claim]:
    return repository.claims.claim(
        node_id=node_id, node_group=node_group, steps=steps, limit=limit, steal_after_s=steal_after_s
    )


def claim_one(repository: JobRepository, node_id: str = "a", **options: Any) -> Claim:
    (taken,) = claim(repository, node_id, 1, **options)
    return taken


def complete(repository: JobRepository, taken: Claim, *, result: object = None, **counters: int) -> None:
    repository.settlements.complete(taken, counters=Counters(**counters), result=result)


def finish_all(repository: JobRepository, job_execution_id: int, node_id: str = "a") -> None:
    """Claim and complete everything, then end the execution."""
    while taken := claim(repository, node_id, 100):
        for one in taken:
            complete(repository, one)
    repository.executions.finalise(job_execution_id)


def fail_all(repository: JobRepository, job_execution_id: int, node_id: str = "a", message: str = "broken") -> None:
    while taken := claim(repository, node_id, 100):
        for one in taken:
            repository.settlements.fail(one, message=message)
    repository.executions.finalise(job_execution_id)


def remove(repository: JobRepository, node_id: str) -> None:
    """The cluster has decided that the node is gone; its work is still where it was."""
    repository.losses.deregister(node_id)


def silence(repository: JobRepository, node_id: str, seconds: float) -> None:
    """Let the node's last heartbeat be so old."""
    n = repository.tables.nodes
    with repository.engine.begin() as connection:
        connection.execute(update(n).where(n.c.node_id == node_id).values(last_heartbeat=db_later(-seconds)))


def age_partitions(repository: JobRepository, seconds: float) -> None:
    """Let every partition's last change be so old, so that it may be stolen."""
    p = repository.tables.partitions
    with repository.engine.begin() as connection:
        connection.execute(update(p).values(last_updated=db_later(-seconds)))


def sweep(repository: JobRepository, *, deep: bool = False) -> Any:
    return Recovery(repository, QUICK).sweep(may_judge=True, deep=deep)


def partition(repository: JobRepository, job_execution_id: int, key: str = "p0") -> PartitionRow:
    (row,) = [row for row in repository.reading.partitions(job_execution_id) if row.partition_key == key]
    return row


def statuses(repository: JobRepository, job_execution_id: int) -> dict[str, int]:
    """How many partitions are in which status."""
    return dict(Counter(str(row.status) for row in repository.reading.partitions(job_execution_id)))


def column(repository: JobRepository, job_execution_id: int, name: str) -> list[Any]:
    """One column of every partition, in the order of the plan."""
    p = repository.tables.partitions
    query = select(p.c[name]).where(p.c.job_execution_id == job_execution_id).order_by(p.c.step_execution_id)
    with repository.engine.connect() as connection:
        return list(connection.execute(query).scalars())


def event_names(repository: JobRepository, job_execution_id: int) -> list[str]:
    return [event.event for event in repository.reading.events(job_execution_id)]


def place_round_robin(nodes: Sequence[NodeView]) -> Any:
    """A `place` for `losses.rehome` over these nodes."""

    def place(_group: str, _step: str, _settings: JobSettings, work: Sequence[Partition]) -> dict[str, str | None]:
        return assignment.apply(assignment.RoundRobin(), work, nodes)

    return place


def to_nobody(work: Sequence[Partition]) -> dict[str, str | None]:
    """A `place` for `executions.restart` that leaves everything to whoever comes."""
    return {one.key: None for one in work}


TERMINAL = {str(status) for status in (PartitionStatus.COMPLETED, PartitionStatus.FAILED, PartitionStatus.STOPPED)}
