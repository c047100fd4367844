"""Many idle nodes in one process; idle_cost starts as many of these as it takes.

Each node is the product's own `Worker` with its own threads and connections, and so says to the database exactly what
a worker says that is alone in its process. It differs in two things: the nodes share an interpreter, and a step would
run in a thread. On standard input each line asks how many sweeps all of them have begun so far.
"""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any

from fleet import STEPS

from airflow_dbpartition.config import DatabaseConfig, WorkerConfig
from airflow_dbpartition.recovery import Recovery
from airflow_dbpartition.worker.logs import configure_logging
from airflow_dbpartition.worker.node import Worker

READY = "ready"
# select() takes descriptors below 1,024, and a node has about eight.
MOST_NODES = 100

_sweeps = 0
_sweeps_lock = threading.Lock()


def _count_sweeps() -> None:
    sweep = Recovery.sweep

    def counted(self: Recovery, **arguments: Any) -> Any:
        global _sweeps
        with _sweeps_lock:
            _sweeps += 1
        return sweep(self, **arguments)

    Recovery.sweep = counted  # type: ignore[method-assign]


def _start_node(number: int, url: str, *, listen: bool) -> None:
    config = WorkerConfig(imports=(str(STEPS),), executor="thread", listen=listen, node_prefix=f"idle{number:04}")
    worker = Worker(DatabaseConfig(url=url), config)
    thread = threading.Thread(target=worker.run, name=config.node_prefix, daemon=True)
    thread.start()
    while not worker.node_id:
        if not thread.is_alive():
            raise SystemExit(f"node {number} ended at once")
        time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run idle nodes until standard input ends.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--first", type=int, required=True, help="number of the first node")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--listen", action=argparse.BooleanOptionalAction, default=True)
    chosen = parser.parse_args()
    configure_logging(log_format="console", log_level="warning")
    _count_sweeps()
    for number in range(chosen.first, chosen.first + chosen.nodes):
        _start_node(number, chosen.url, listen=chosen.listen)
    print(READY, flush=True)
    while True:
        try:
            input()
        except EOFError:
            return
        print(_sweeps, flush=True)


if __name__ == "__main__":
    main()
