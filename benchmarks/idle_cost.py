"""What a fleet costs that has nothing to do: statements a second, connections, and the server's processor time.

One worker is a real one, started by the command line with its defaults. More are `idle_nodes`: real workers, 100 in a
process. All is measured when the nodes have been up for longer than `remove_after`, from when on they judge each
other: processor time first, and then, over as many seconds, what is said (see `statement_log`).

    python benchmarks/idle_cost.py [--quick] [--size SECONDS]
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import idle_nodes
from fleet import fleet
from options import Options, alone, say
from pgbouncer import PgBouncer, PgBouncerMissingError, pgbouncer
from processor_time import processor_s
from reporting import Machine, Report, Target
from servers import Server, rows, server
from sqlalchemy import make_url
from statement_log import Tally, counted_statements

from airflow_dbpartition import migrations
from airflow_dbpartition.config import DatabaseConfig, Timings
from airflow_dbpartition.repository import JobRepository

SIZES = (20, 200, 1000)
QUICK_SIZES = (5, 20)
POOL_SIZE = 20
OBSERVER = "benchmark"


@dataclass(frozen=True)
class Cost:
    """What nodes cost over a number of seconds.

    Attributes:
        sweeps: begun by all nodes together; None = not counted.
        connections: that the nodes hold, to the server or to the pooler.
        heard: nodes that were live at the end; if it is not all of them, the figures mean nothing.
        server_s, pooler_s, nodes_s: processor time of PostgreSQL, PgBouncer and the nodes' own processes.
    """

    case: str
    nodes: int
    seconds: float
    said: Tally
    sweeps: int | None
    connections: int
    heard: int
    server_s: float
    pooler_s: float
    nodes_s: float

    @property
    def statements(self) -> float:
        """A second and node."""
        return self.said.statements / self.seconds / self.nodes

    def percent(self, processor_time_s: float) -> float:
        """As a part of one core."""
        return 100 * processor_time_s / self.seconds


class Idlers:
    """The processes that hold many nodes."""

    def __init__(self, url: str, nodes: int, *, listen: bool) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for first in range(0, nodes, idle_nodes.MOST_NODES):
                self._start(url, first, min(idle_nodes.MOST_NODES, nodes - first), listen=listen)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def sweeps(self) -> int:
        """How many sweeps all nodes have begun so far."""
        return sum(int(self._ask(process)) for process in self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def _start(self, url: str, first: int, nodes: int, *, listen: bool) -> None:
        words = ["--url", url, "--first", first, "--nodes", nodes, "--listen" if listen else "--no-listen"]
        process = subprocess.Popen(
            [sys.executable, idle_nodes.__file__, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        self._answer(process)

    def _ask(self, process: subprocess.Popen[str]) -> str:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return self._answer(process)

    def _answer(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the fleet ended with {process.wait()}")
        return line


class Watch:
    """Measures what happens on one database."""

    def __init__(self, running: Server, url: str, *, settle_s: float, seconds: float) -> None:
        self._server = running
        self._url = url
        self._settle_s = settle_s
        self._seconds = seconds

    def measure(
        self, case: str, nodes: int, pids: list[int], *, idlers: Idlers | None = None, pooler: PgBouncer | None = None
    ) -> Cost:
        time.sleep(self._settle_s)
        server_pid = self._server.embedded.pid
        assert server_pid is not None
        roots = ([server_pid], [pooler.pid] if pooler else [], pids)
        sweeps = idlers.sweeps() if idlers else None
        begun = time.monotonic()
        before = [processor_s(some) for some in roots]
        time.sleep(self._seconds)
        server_s, pooler_s, nodes_s = (processor_s(some) - so_far for some, so_far in zip(roots, before, strict=True))
        seconds = time.monotonic() - begun
        swept = idlers.sweeps() - sweeps if idlers and sweeps is not None else None
        connections = pooler.clients() if pooler else self._connections()
        with counted_statements(self._server, str(make_url(self._url).database)) as said:
            time.sleep(seconds)
        return Cost(case, nodes, seconds, said, swept, connections, self._heard(), server_s, pooler_s, nodes_s)

    def _connections(self) -> int:
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
        ((number,),) = rows(self._server.embedded.url(), query, (make_url(self._url).database,))
        return int(number)

    def _heard(self) -> int:
        repository = JobRepository.connect(DatabaseConfig(url=self._url, pool_size=0))
        return len(repository.nodes.live(node_group="default", within_s=Timings().unreachable_after_s))


def one_worker(running: Server, settle_s: float, seconds: float) -> Cost:
    url = running.fresh_database("worker")
    with fleet(url) as arena:
        (worker,) = arena.start(1, executor="process", concurrency=1)
        arena.repository.close()  # its connection would be counted
        return Watch(running, url, settle_s=settle_s, seconds=seconds).measure("one worker", 1, [worker.pid])


def many_nodes(running: Server, nodes: int, settle_s: float, seconds: float, *, pooled: bool) -> Cost:
    url = running.fresh_database("fleet")
    _migrate(url)
    with ExitStack() as stack:
        # A node has two connections at rest, and may have more for a moment.
        pooler = stack.enter_context(pgbouncer(url, clients=4 * nodes + 50, pool_size=POOL_SIZE)) if pooled else None
        idlers = Idlers(pooler.url if pooler else url, nodes, listen=not pooled)
        stack.callback(idlers.kill)
        case = f"{nodes:,} nodes, PgBouncer" if pooled else f"{nodes:,} nodes"
        watch = Watch(running, url, settle_s=settle_s, seconds=seconds)
        return watch.measure(case, nodes, idlers.pids, idlers=idlers, pooler=pooler)


def _migrate(url: str) -> None:
    repository = JobRepository.connect(DatabaseConfig(url=url, pool_size=0))
    migrations.upgrade(repository.engine)
    repository.close()


def main(options: Options) -> list[Report]:
    sizes = QUICK_SIZES if options.quick else SIZES
    seconds = float(options.sized(60, 6))
    settle_s = 3.0 if options.quick else Timings().remove_after_s + 5.0
    settings = {"max_connections": str(2 * max(sizes) + 200)}
    costs = []
    with server(settings) as running:
        machine = Machine.now(running.version)
        say("  one worker")
        costs.append(one_worker(running, settle_s, seconds))
        for nodes in sizes:
            for pooled in (False, True):
                say(f"  {nodes:,} nodes{', PgBouncer' if pooled else ''}")
                try:
                    costs.append(many_nodes(running, nodes, settle_s, seconds, pooled=pooled))
                except PgBouncerMissingError as error:
                    say(f"  left out: {error}")
    return [_report(costs, machine)]


def _report(costs: list[Cost], machine: Machine) -> Report:
    report = Report(
        name="idle_cost",
        title="Idle cost",
        columns=(
            "case",
            "seconds",
            "nodes live at the end",
            "connections a node",
            "statements/s a node",
            "commands/s a node",
            "round trips/s a node",
            "sweeps/s of all",
            "server, % of a core",
            "PgBouncer, % of a core",
            "a node, % of a core",
        ),
        machine=machine,
        decimals=2,
        notes=(
            "Statements leave out BEGIN, COMMIT, ROLLBACK and SET, which commands count; one round trip may carry "
            "several.",
            "Statements are counted from the server's log in other seconds than those of which the processor time is.",
            f"One worker is a process of its own with one child. Others share processes, {idle_nodes.MOST_NODES} in "
            "each, and are otherwise the same. Behind PgBouncer (transaction mode, "
            f"{POOL_SIZE} connections to the server) they do not listen.",
        ),
    )
    for cost in costs:
        seconds = cost.seconds * cost.nodes
        report.rows.append(
            {
                "case": cost.case,
                "seconds": round(cost.seconds),
                "nodes live at the end": cost.heard,
                "connections a node": cost.connections / cost.nodes,
                "statements/s a node": cost.statements,
                "commands/s a node": cost.said.commands / seconds,
                "round trips/s a node": cost.said.round_trips / seconds,
                "sweeps/s of all": "" if cost.sweeps is None else cost.sweeps / cost.seconds,
                "server, % of a core": cost.percent(cost.server_s),
                "PgBouncer, % of a core": cost.percent(cost.pooler_s) if cost.pooler_s else "",
                "a node, % of a core": cost.percent(cost.nodes_s) / cost.nodes,
            }
        )
    report.targets += _targets(costs)
    return report


def _targets(costs: list[Cost]) -> Iterator[Target]:
    for cost in costs:
        yield Target(
            what=f"{cost.case}: statements/s a node",
            measured=cost.statements,
            limit=0.5,
            against="0.5",
            at_least=False,
        )
        yield Target(
            what=f"{cost.case}: connections a node",
            measured=cost.connections / cost.nodes,
            limit=2.0,
            against="2",
            at_least=False,
        )
    largest = max(cost.nodes for cost in costs)
    smallest = next(cost for cost in costs if cost.sweeps is not None)
    for cost in costs:
        if cost.nodes == largest:
            yield Target(
                what=f"{cost.case}: server, % of a core",
                measured=cost.percent(cost.server_s + cost.pooler_s),
                limit=25.0,
                against="25 %",
                at_least=False,
            )
            yield Target(
                what=f"{cost.case}: sweeps/s of all",
                measured=(cost.sweeps or 0) / cost.seconds,
                limit=(smallest.sweeps or 0) / smallest.seconds,
                against=f"those of {smallest.case}",
                factor=1.1,
                at_least=False,
            )


if __name__ == "__main__":
    alone(main, __doc__)
