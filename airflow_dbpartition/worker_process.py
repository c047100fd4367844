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

from airflow_dbpartition.config import DatabaseConfig, LogConfig, Timings, WorkerConfig
from airflow_dbpartition.errors import ConfigurationError, DbPartitionError


def become_worker(
    database: DatabaseConfig, config: WorkerConfig, *, logging: LogConfig, url_from: str, verbose: bool
) -> NoReturn:
    """Replace this process by a worker, under the same process id.

    Args:
        database: its URL is only checked there: what reads URLs takes longer to import than all that is needed here.
        url_from: what to say of where the URL came from, if it is of no use.
        verbose: show the traceback of what ends it.
    """
    told = {
        "database": asdict(database),
        "config": asdict(config),
        "logging": asdict(logging),
        "url_from": url_from,
        "verbose": verbose,
    }
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
    from airflow_dbpartition.dialects import normalise_url
    from airflow_dbpartition.worker.logs import configure_logging
    from airflow_dbpartition.worker.node import Worker

    try:
        normalise_url(database.url)
    except ConfigurationError as error:
        return _refuse(error, 2, told["url_from"], verbose=told["verbose"])
    configure_logging(**told["logging"])
    try:
        return Worker(database, config, logging=told["logging"]).run()
    except DbPartitionError as error:
        return _refuse(error, 1, verbose=told["verbose"])
    except KeyboardInterrupt:
        return 130


def _refuse(error: DbPartitionError, code: int, more: str = "", *, verbose: bool) -> int:
    """As the command line says it."""
    if verbose:
        traceback.print_exc()
    sys.stderr.write(f"error: {' '.join(str(error).split())}{more}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
