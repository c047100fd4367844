"""Two ledgers that the work under test writes, one in the job repository's database and one outside, and the verdict.

What is written through `ctx.transaction()` must be there exactly once. What is written anywhere else is there at least
once where the work may run again, and at most once where it may not.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import select, text

from airflow_dbpartition.domain import Partition, PartitionStatus, TransferPolicy
from airflow_dbpartition.repository import JobRepository

HERE = Path(__file__).resolve().parent
STEPS = HERE / "steps_of_ledgers.py"
STEP = "ledger"


class Entry(NamedTuple):
    """One line of the ledger outside the database."""

    what: str
    key: str
    attempt: int
    node_id: str
    pid: int


class Row(NamedTuple):
    """One partition at the end."""

    job_execution_id: int
    partition_key: str
    entry_key: str
    status: str
    policy: TransferPolicy
    attempt: int
    units: int
    planned_units: int
    assigned_node: str | None
    exit_message: str


class Ledgers:
    """Both ledgers of one test, and what becomes of the partitions that write them.

    Args:
        repository: of the jobs; the ledger in the database is a table beside theirs.
        directory: where the ledger outside is.
    """

    def __init__(self, repository: JobRepository, directory: Path) -> None:
        self._repository = repository
        schema = f'"{repository.schema}".' if repository.schema else ""
        self.table = f"{schema}ledger"
        self.outside_path = directory / "outside"
        with repository.engine.begin() as connection:  # without a unique key: what is written twice is to be counted
            connection.execute(
                text(f"CREATE TABLE {self.table} (entry_key varchar(64), unit integer, node_id varchar(200))")
            )

    def plan(
        self,
        count: int,
        *,
        transferable: bool | str,
        prefix: str = "p",
        units: int = 1,
        pause_s: float = 0.0,
        **context: Any,
    ) -> list[Partition]:
        """So many partitions that write both ledgers."""
        wanted = {"table": self.table, "outside": str(self.outside_path), "units": units, "pause_s": pause_s}
        return [
            Partition(f"{prefix}{number}", {**wanted, **context}, transferable=transferable) for number in range(count)
        ]

    # --- looking -----------------------------------------------------------------------------------------------

    def inside(self) -> Counter[tuple[str, int]]:
        """How often each unit of each partition stands in the database."""
        with self._repository.engine.connect() as connection:
            rows = connection.execute(text(f"SELECT entry_key, unit, count(*) FROM {self.table} GROUP BY 1, 2"))
            return Counter({(row[0], row[1]): row[2] for row in rows})

    def outside(self) -> list[Entry]:
        if not self.outside_path.exists():
            return []
        words = [line.split() for line in self.outside_path.read_text().splitlines()]
        return [Entry(what, key, int(attempt), node_id, int(pid)) for what, key, attempt, node_id, pid in words]

    def partitions(self, job_execution_ids: Sequence[int]) -> list[Row]:
        return [row for job_id in job_execution_ids for row in self._partitions_of(job_id)]

    def _partitions_of(self, job_execution_id: int) -> list[Row]:
        execution = self._repository.reading.execution(job_execution_id)
        p = self._repository.tables.partitions
        with self._repository.engine.connect() as connection:
            rows = connection.execute(select(p).where(p.c.job_execution_id == job_execution_id)).all()
        return [
            Row(
                job_execution_id=job_execution_id,
                partition_key=row.partition_key,
                entry_key=entry_key(execution.job_name, execution.job_key, execution.generation, row.partition_key),
                status=row.status,
                policy=TransferPolicy(row.transfer_policy),
                attempt=row.attempt,
                units=(row.checkpoint or {}).get("units", 0),
                planned_units=row.execution_context["units"],
                assigned_node=row.assigned_node,
                exit_message=row.exit_message or "",
            )
            for row in rows
        ]

    def verdict(self, job_execution_ids: Sequence[int], *, attempts: Mapping[int, int] | None = None) -> Verdict:
        """Count both ledgers for executions that have ended.

        Args:
            attempts: by execution, how often a partition that may not move may be entered, where it is retried.
        """
        return judge(self.partitions(job_execution_ids), self.inside(), self.outside(), attempts=attempts or {})


def entry_key(job_name: str, job_key: str, generation: int, partition_key: str) -> str:
    """What a partition signs its entries with: its idempotency key, reckoned here once more."""
    words = "\x1f".join((job_name, job_key, str(generation), partition_key))
    return hashlib.sha256(words.encode()).hexdigest()[:32]


@dataclass
class Verdict:
    """What the two ledgers say; `faults` is empty where every promise was kept."""

    faults: list[str] = field(default_factory=list)
    statuses: dict[str, dict[str, int]] = field(default_factory=dict)
    entries_inside: int = 0
    entered: int = 0
    entered_again: int = 0

    def __str__(self) -> str:
        by_policy = "; ".join(f"{policy} {counts}" for policy, counts in sorted(self.statuses.items()))
        return (
            f"{by_policy}; {self.entries_inside} entries in the database, "
            f"{self.entered} entries into the step, {self.entered_again} of them again"
        )


def judge(
    rows: Sequence[Row],
    inside: Mapping[tuple[str, int], int],
    outside: Sequence[Entry],
    *,
    attempts: Mapping[int, int] | None = None,
) -> Verdict:
    """Compare what the partitions say of themselves with both ledgers."""
    verdict = Verdict(entries_inside=sum(inside.values()))
    entered = Counter(entry.key for entry in outside if entry.what == "entered")
    done = Counter(entry.key for entry in outside if entry.what == "done")
    verdict.entered = sum(entered.values())
    verdict.entered_again = verdict.entered - len(entered)
    known = {row.entry_key for row in rows}
    verdict.faults += [f"entries of an unknown partition {key}" for key in {key for key, _ in inside} - known]
    written: dict[str, dict[int, int]] = {}
    for (key, unit), times in inside.items():
        written.setdefault(key, {})[unit] = times
    for row in rows:
        counts = verdict.statuses.setdefault(str(row.policy), {})
        counts[row.status] = counts.get(row.status, 0) + 1
        units = written.get(row.entry_key, {})
        faults = []
        if row.status in (PartitionStatus.PENDING, PartitionStatus.CLAIMED):
            faults.append("is not at its end")
        if units != dict.fromkeys(range(row.units), 1):
            faults.append(f"says {row.units} units, but the database has {units}")
        if row.status == PartitionStatus.COMPLETED:
            if row.units != row.planned_units:
                faults.append(f"is COMPLETED with {row.units} of {row.planned_units} units")
            if not entered[row.entry_key] or not done[row.entry_key]:
                faults.append("is COMPLETED but the ledger outside does not know it")
        allowed = (attempts or {}).get(row.job_execution_id, 1)
        if row.policy is not TransferPolicy.ALWAYS and entered[row.entry_key] > allowed:
            faults.append(f"was entered {entered[row.entry_key]} times")
        verdict.faults += [
            f"{row.policy} partition {row.partition_key} of {row.job_execution_id} ({row.status}) {fault}"
            for fault in faults
        ]
    return verdict
