"""Makespan beside its lower bound where partitions, or nodes, are not alike: round robin, weights, stealing, balance.

python benchmarks/skew.py [--rounds 3] [--quick] [--size PARTITIONS]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import steps_of_skew
from fleet import Fleet, fleet
from makespans import began_at, makespan_s
from options import Options, alone, say
from reporting import Machine, Report, Rounds, Target
from servers import Server, rows, server

from airflow_dbpartition.domain import JobIdentity, JobSettings
from airflow_dbpartition.launching import Job, Launcher
from airflow_dbpartition.partitioners import ColumnRangePartitioner, QueryPartitioner

NODES = 4
PARTITIONS = 160
QUICK_PARTITIONS = 40
ROWS = 10  # of a partition
HEAVY_TIMES = 10
ROW_S = 0.04
SLOW_TIMES = 4
LATE_AFTER = 0.3  # of the lower bound of all nodes
TIMES_BOUND = 1.1

_WIDTH = ROWS * HEAVY_TIMES
# Every tenth value is there, but in the range in the middle each one is.
_FILL = f"""
CREATE TABLE {steps_of_skew.TABLE} AS
SELECT id FROM generate_series(0, %(partitions)s * {_WIDTH} - 1) id
WHERE id %% {HEAVY_TIMES} = 0 OR (%(heavy)s AND id / {_WIDTH} = %(partitions)s / 2);
ALTER TABLE {steps_of_skew.TABLE} ADD PRIMARY KEY (id);
ANALYZE {steps_of_skew.TABLE}
"""
_RANGES = f"""
SELECT id / {_WIDTH} AS number, min(id) AS min_value, max(id) AS max_value, count(*) AS found
FROM {steps_of_skew.TABLE} GROUP BY 1 ORDER BY 1
"""
_JOINED = "SELECT extract(epoch FROM created_time)::float8 FROM batch_nodes ORDER BY node_id"
_STOLEN = "SELECT count(*) FROM batch_partition_events WHERE event = 'stolen'"


@dataclass(frozen=True)
class Way:
    """How partitions are cut and given to nodes: a partitioner for a URL, and whether idle nodes may steal."""

    name: str
    partitioner: Callable[[str], Any]
    stealing: bool


@dataclass(frozen=True)
class Scenario:
    """What is not alike.

    Args:
        heavy: one partition, in the middle of the plan, has ten times the rows of any other.
        late: the last node is started when the others have worked for a while.
        slow: the last node takes several times as long for everything.
    """

    name: str
    heavy: bool = False
    late: bool = False
    slow: bool = False

    @property
    def speeds(self) -> list[float]:
        """Of each node, in the order in which they start."""
        return [*[1.0] * (NODES - 1), 1 / SLOW_TIMES if self.slow else 1.0]

    def rows(self, partitions: int) -> int:
        return partitions * ROWS + (ROWS * (HEAVY_TIMES - 1) if self.heavy else 0)

    def bound_s(self, partitions: int, joined_s: Sequence[float]) -> float:
        """No schedule is shorter: neither than all work at the speed of all nodes since they joined, nor than its
        longest partition on a node of full speed.
        """
        idle = sum(speed * joined for speed, joined in zip(self.speeds, joined_s, strict=True))
        together = (self.rows(partitions) * ROW_S + idle) / sum(self.speeds)
        return max(together, ROWS * ROW_S * (HEAVY_TIMES if self.heavy else 1))


UNIFORM = Scenario("uniform")
HEAVY = Scenario("one partition of ten times the work", heavy=True)
LATE = Scenario("a late node", late=True)
SLOW = Scenario("a slow node", slow=True)


def _bare(url: str) -> QueryPartitioner:
    return QueryPartitioner(_RANGES, url=url)


def _weighed(url: str) -> QueryPartitioner:
    return QueryPartitioner(_RANGES, weight="found", url=url)


def _balanced(url: str) -> ColumnRangePartitioner:
    return ColumnRangePartitioner(table=steps_of_skew.TABLE, column="id", balanced=True, url=url)


BEST = Way("weights and stealing", _weighed, stealing=True)
ROUND_ROBIN = Way("round robin", _bare, stealing=False)
# Where all partitions are alike, weights change nothing, and balanced=True cuts the same ranges.
ALIKE = (ROUND_ROBIN, BEST)
WAYS_OF = {
    UNIFORM: ALIKE,
    HEAVY: (
        ROUND_ROBIN,
        Way("weights", _weighed, stealing=False),
        Way("stealing", _bare, stealing=True),
        BEST,
        Way("balanced=True", _balanced, stealing=False),
        Way("balanced=True and stealing", _balanced, stealing=True),
    ),
    LATE: ALIKE,
    SLOW: ALIKE,
}


@dataclass(frozen=True)
class Run:
    """One job: seconds that it took, the fewest that it could have taken, and partitions that were stolen."""

    makespan_s: float
    bound_s: float
    stolen: int

    @property
    def times_bound(self) -> float:
        return self.makespan_s / self.bound_s


def main(options: Options) -> list[Report]:
    """Run every case once in each round, each on a fleet of its own."""
    partitions = options.sized(PARTITIONS, quick=QUICK_PARTITIONS)
    runs: dict[tuple[Scenario, Way], list[Run]] = {
        (scenario, way): [] for scenario, ways in WAYS_OF.items() for way in ways
    }
    with server() as running:
        machine = Machine.now(running.version)
        for number in range(1, options.rounds + 1):
            for (scenario, way), done in runs.items():
                done.append(_run(running, scenario, way, partitions))
                say(
                    f"  round {number}: {scenario.name}, {way.name}: {done[-1].makespan_s:.2f} s, "
                    f"{done[-1].times_bound:.2f} × the lower bound"
                )
    return [_report(runs, machine, partitions)]


def _run(running: Server, scenario: Scenario, way: Way, partitions: int) -> Run:
    url = running.fresh_database("skew")
    rows(url, _FILL, {"partitions": partitions, "heavy": scenario.heavy})
    with fleet(url) as nodes:
        _start(nodes, NODES - 1)
        if not scenario.late:
            _start(nodes, 1, row_s=ROW_S * (SLOW_TIMES if scenario.slow else 1))
        job_execution_id = _launch(nodes, way, partitions)
        if scenario.late:
            time.sleep(LATE_AFTER * scenario.bound_s(partitions, [0.0] * NODES))
            _start(nodes, 1)
        taken_s = makespan_s(url, job_execution_id)
        began = began_at(url, job_execution_id)
        joined_s = [max(0.0, joined - began) for (joined,) in rows(url, _JOINED)]
        ((stolen,),) = rows(url, _STOLEN)
    running.drop(url)
    return Run(taken_s, scenario.bound_s(partitions, joined_s), stolen)


def _start(nodes: Fleet, count: int, *, row_s: float = ROW_S) -> None:
    nodes.start(
        count,
        executor="process",
        concurrency=1,
        options={"--import": steps_of_skew.__file__},
        environment={steps_of_skew.ROW_SECONDS_VARIABLE: str(row_s)},
    )


def _launch(nodes: Fleet, way: Way, partitions: int) -> int:
    """As the operator does, with the default assignment."""
    job = Job(
        identity=JobIdentity("skew", {}),
        step_name="sleep_rows",
        partitioner=way.partitioner(nodes.url),
        partitions_per_node=-(-partitions // len(nodes.workers)),
        settings=JobSettings(stealing=way.stealing),
    )
    return Launcher(nodes.repository).launch(job).job_execution_id


def _report(runs: Mapping[tuple[Scenario, Way], list[Run]], machine: Machine, partitions: int) -> Report:
    report = Report(
        name="skew",
        title=f"Skew: {partitions} partitions on {NODES} nodes of one process each",
        columns=("what is not alike", "way", "makespan, s", "lower bound, s", "× lower bound", "stolen"),
        machine=machine,
        decimals=2,
        notes=(
            f"A partition has {ROWS} rows and sleeps {1000 * ROW_S:g} ms for each; the heavy one has "
            f"{ROWS * HEAVY_TIMES}, in the middle of the plan. The slow node takes {SLOW_TIMES} times as long. The "
            f"late node is started when {LATE_AFTER:.0%} of the lower bound have passed, and takes a second or more to "
            "start. Otherwise all is at its defaults.",
            "Makespan: from the writing of the plan to the end of the last partition, by the database's clock. Lower "
            "bound: the larger of the longest partition and of all work divided by the sum of the speeds, where a node "
            "counts from the moment at which it registered. A partition cannot be divided, so that not even a perfect "
            "plan reaches it everywhere.",
            "Round robin deals partitions of equal weight in turn, as in the article. With weights (the numbers of "
            "rows) the heaviest are dealt first, each to the node that has least. Where all partitions are alike, "
            "weights change nothing, and only stealing does. balanced=True cuts the same table so that all ranges have "
            "about as many rows.",
        ),
    )
    for (scenario, way), done in runs.items():
        report.rows.append(
            {
                "what is not alike": scenario.name,
                "way": way.name,
                "makespan, s": Rounds.of(run.makespan_s for run in done),
                "lower bound, s": Rounds.of(run.bound_s for run in done),
                "× lower bound": Rounds.of(run.times_bound for run in done),
                "stolen": int(Rounds.of(run.stolen for run in done).median),
            }
        )
        if way is BEST:
            report.targets.append(
                Target(
                    what=f"{scenario.name}, {way.name}: × lower bound",
                    measured=Rounds.of(run.times_bound for run in done).median,
                    limit=1.0,
                    against="the lower bound",
                    factor=TIMES_BOUND,
                    at_least=False,
                )
            )
    return report


if __name__ == "__main__":
    alone(main, __doc__)
