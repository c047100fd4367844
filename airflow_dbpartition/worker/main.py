"""The process that a worker's supervisor is: `dbpartition worker` becomes it when it has read its options.

What reads options (typer, rich) is of no use to a worker that then runs for weeks, and cannot be forgotten by the
process that has imported it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict
from typing import Any, NoReturn

from airflow_dbpartition.config import DatabaseConfig, Timings, WorkerConfig
from airflow_dbpartition.errors import DbPartitionError

Logging = dict[str, str]


def become_worker(database: DatabaseConfig, config: WorkerConfig, *, logging: Logging, verbose: bool) -> NoReturn:
    """Replace this process by a worker, under the same process id.

    Args:
        logging: arguments of `configure_logging`.
        verbose: show the traceback of what ends it.
    """
    told = {"database": asdict(database), "config": asdict(config), "logging": logging, "verbose": verbose}
    reading, writing = os.pipe()  # neither `ps` nor a child's environment shows the password
    os.write(writing, json.dumps(told).encode())
    os.close(writing)
    os.set_inheritable(reading, True)
    sys.stdout.flush()
    sys.stderr.flush()
    # The name that it was started under goes on: it is what people look for in `ps`.
    os.execv(sys.executable, [sys.executable, "-m", __name__, str(reading), "dbpartition", *sys.argv[1:]])


def _told(descriptor: int) -> dict[str, Any]:
    with open(descriptor, encoding="utf-8") as pipe:
        told: dict[str, Any] = json.load(pipe)
    return told


def main() -> int:
    told = _told(int(sys.argv[1]))
    database = DatabaseConfig(**told["database"])
    config = told["config"]
    config = WorkerConfig(
        **{**config, "imports": tuple(config["imports"]), "timings": Timings(**config["timings"])},
    )
    from airflow_dbpartition.worker.logs import configure_logging
    from airflow_dbpartition.worker.node import Worker

    configure_logging(**told["logging"])
    try:
        return Worker(database, config, logging=told["logging"]).run()
    except DbPartitionError as error:
        if told["verbose"]:
            traceback.print_exc()
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
