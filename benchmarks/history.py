"""How long a claim takes when the tables hold a long history, and when an old transaction keeps dead rows in them.

A steady load goes on while it is measured: jobs are planned, and their partitions claimed and completed at a fixed
rate. The tables are empty but for the load; or hold a million finished partitions; or those, while a transaction of
another application stays open. By its last tenth the tables are as full of dead row versions as they get.

python benchmarks/history.py [--rounds 3] [--quick] [--size SECONDS]
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import psycopg2
from options import Options, alone, say
from reporting import Machine, Report, Rounds, Target, percentile
from servers import Server, libpq_url, rows, server
from sqlalchemy import Table

from airflow_dbpartition import migrations
from airflow_dbpartition.config import DatabaseConfig
from airflow_dbpartition.domain import Claim, Counters, JobIdentity, Partition
from airflow_dbpartition.repository import JobRepository, NewExecution
from airflow_dbpartition.repository.settlements import Completed

HISTORY_ROWS = 1_000_000
QUICK_HISTORY_ROWS = 100_000
HELD_S = 600
UNDISTURBED_S = 60
BATCH = 10
TURNS_PER_S = 20
HEARTBEAT_TURNS = 60
JOB_TURNS = 50
PAUSE_TURNS = 20
STEP = "noop"
NODE = "busy"
IDLE_NODE = "idle"
GROUP = "default"
TIMES_EMPTY = 2.0
EMPTY, FULL, HELD = "empty", "history", "history, held"
CLAIMS = FINDS_WORK, IN_VAIN = "finds work", "finds nothing"


@dataclass
class Load:
    """A steady load on one database, and how long each of its claims took, in order.

    Attributes:
        found: seconds of claims that moved a batch.
        in_vain: seconds of claims that found nothing.
        late_s: how far the load was behind its rate when it ended.
    """

    repository: JobRepository
    found: list[float] = field(default_factory=list)
    in_vain: list[float] = field(default_factory=list)
    late_s: float = 0.0

    def run(self, seconds: float) -> None:
        """Jobs of nobody's partitions and jobs of the node's own in turn, with a pause after each."""
        self.register()
        begun = time.monotonic()
        for number in range(int(seconds * TURNS_PER_S)):
            due = begun + number / TURNS_PER_S
            time.sleep(max(0.0, due - time.monotonic()))
            if number % HEARTBEAT_TURNS == 0:
                for node_id in (NODE, IDLE_NODE):
                    self.repository.nodes.heartbeat(node_id, current_load=0)
            job, turn = divmod(number, JOB_TURNS + PAUSE_TURNS)
            if turn == 0:
                self.plan(f"job-{job}", owner=NODE if job % 2 else None)
            if turn < JOB_TURNS:
                self.complete(self.timed_claim(NODE, self.found, expected=BATCH))
            else:
                self.timed_claim(IDLE_NODE, self.in_vain, expected=0)
            self.late_s = time.monotonic() - due

    def register(self) -> None:
        for node_id in (NODE, IDLE_NODE):
            self.repository.nodes.register(
                node_id=node_id, node_group=GROUP, host="", pid=0, version="", capacity=BATCH, steps=(STEP,)
            )

    def plan(self, name: str, *, owner: str | None) -> None:
        partitions = [Partition(f"p{place}", {"number": place}) for place in range(JOB_TURNS * BATCH)]
        self.repository.executions.submit(
            NewExecution(identity=JobIdentity(name, {}), step_name=STEP),
            partitions,
            {partition.key: owner for partition in partitions},
        )

    def timed_claim(self, node_id: str, times: list[float], *, expected: int) -> list[Claim]:
        begun = time.perf_counter()
        claims = self.repository.claims.claim(
            node_id=node_id, node_group=GROUP, steps=(STEP,), limit=BATCH, steal_after_s=1.0
        )
        times.append(time.perf_counter() - begun)
        if len(claims) != expected:
            raise SystemExit(f"{len(claims)} partitions were claimed, expected {expected}")
        return claims

    def complete(self, claims: list[Claim]) -> None:
        lost = self.repository.settlements.complete_all([Completed(claim, Counters()) for claim in claims])
        if lost:
            raise SystemExit(f"{len(lost)} claims were lost to nobody")
        self.repository.executions.finalise(claims[0].job_execution_id)


def write_history(repository: JobRepository, url: str, partitions: int) -> None:
    """One job is done, and all its rows are copied under other ids until there are so many."""
    past = Load(repository)
    past.register()
    past.plan("past", owner=NODE)
    for _ in range(JOB_TURNS):
        past.complete(past.timed_claim(NODE, past.found, expected=BATCH))
    tables = repository.tables
    numbers = {"first": 1, "last": partitions // (JOB_TURNS * BATCH)}
    instance, execution = "-number", "-number"
    _copy(url, tables.instances, numbers, job_instance_id=instance, job_name="job_name || number")
    _copy(url, tables.executions, numbers, job_execution_id=execution, job_instance_id=instance)
    _copy(
        url,
        tables.partitions,
        numbers,
        step_execution_id="-(number * 1000000::bigint + step_execution_id)",
        job_execution_id=execution,
        job_instance_id=instance,
    )
    rows(url, "VACUUM ANALYZE")


def _copy(url: str, table: Table, numbers: dict[str, int], **changed: str) -> None:
    names = [column.name for column in table.columns]
    values = ", ".join(changed.get(name, name) for name in names)
    rows(
        url,
        f"INSERT INTO {table.name} ({', '.join(names)}) "
        f"SELECT {values} FROM {table.name}, generate_series(%(first)s, %(last)s) number",
        numbers,
    )


@contextmanager
def _held_transaction(url: str) -> Iterator[None]:
    """As a long report of another application holds it: in no table of ours, and still nothing dead may go."""
    connection = psycopg2.connect(libpq_url(url))
    try:
        connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_class")
        yield
    finally:
        connection.close()


def measure(running: Server, *, history: int, held: bool, seconds: float) -> Load:
    """Run the load on a fresh database."""
    url = running.fresh_database("history")
    repository = JobRepository.connect(DatabaseConfig(url=url))
    load = Load(repository)
    try:
        migrations.upgrade(repository.engine)
        if history:
            write_history(repository, url, history)
        running.checkpoint()
        with _held_transaction(url) if held else nullcontext():
            load.run(seconds)
    finally:
        repository.close()
        running.drop(url)
    return load


def main(options: Options) -> list[Report]:
    """Measure each case once in each round; the one that takes long only once."""
    history = QUICK_HISTORY_ROWS if options.quick else HISTORY_ROWS
    held_s = options.sized(HELD_S, quick=12)
    undisturbed_s = min(held_s, UNDISTURBED_S)
    loads: dict[str, list[Load]] = {EMPTY: [], FULL: [], HELD: []}
    with server() as running:
        machine = Machine.now(running.version)
        for number in range(1, options.rounds + 1):
            say(f"  round {number}")
            loads[EMPTY].append(measure(running, history=0, held=False, seconds=undisturbed_s))
            loads[FULL].append(measure(running, history=history, held=False, seconds=undisturbed_s))
        say(f"  with a transaction held open for {held_s} s")
        loads[HELD].append(measure(running, history=history, held=True, seconds=held_s))
    return [_report(loads, machine, history, held_s)]


@dataclass(frozen=True)
class _Times:
    """Milliseconds of some claims of each round."""

    rounds: list[list[float]]

    def at(self, part: float) -> Rounds:
        return Rounds.of(1000 * percentile(times, part) for times in self.rounds)

    def last_tenth(self) -> _Times:
        return _Times([times[-max(1, len(times) // 10) :] for times in self.rounds])


def _report(loads: dict[str, list[Load]], machine: Machine, history: int, held_s: int) -> Report:
    report = Report(
        name="history",
        title=f"Claims beside {history:,} finished partitions",
        columns=("tables", "claim", "p50, ms", "p99, ms", "claims", "load late by, s"),
        machine=machine,
        decimals=2,
        notes=(
            f"A load of {TURNS_PER_S * BATCH} partitions a second, claimed and completed {BATCH} at a time; the claims "
            "of the load itself are timed. Of a claim that finds work, half find nobody's, half the node's own; one "
            "that finds nothing is made when all is done, and looks for all three kinds.",
            f'"{HELD}": a REPEATABLE READ transaction of another application stays open for {held_s} s, and so no dead '
            "row version can be removed.",
        ),
    )
    for claim in CLAIMS:
        empty = _times(loads[EMPTY], claim)
        for tables, found in loads.items():
            times = _times(found, claim)
            shown = {tables: times, f"{tables}, last tenth": times.last_tenth()} if tables == HELD else {tables: times}
            for name, some in shown.items():
                report.rows.append(
                    {
                        "tables": name,
                        "claim": claim,
                        "p50, ms": some.at(0.5),
                        "p99, ms": some.at(0.99),
                        "claims": sum(map(len, some.rounds)),
                        "load late by, s": max(load.late_s for load in found),
                    }
                )
                if tables != EMPTY:
                    report.targets.append(
                        Target(
                            what=f"{claim}, {name}: p99, ms",
                            measured=some.at(0.99).median,
                            limit=empty.at(0.99).median,
                            against="that of empty tables",
                            factor=TIMES_EMPTY,
                            at_least=False,
                        )
                    )
    return report


def _times(loads: list[Load], claim: str) -> _Times:
    return _Times([load.found if claim == FINDS_WORK else load.in_vain for load in loads])


if __name__ == "__main__":
    alone(main, __doc__)
