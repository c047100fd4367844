"""A worker whose statements may not take long; its arguments are URL, SCHEMA, STEPS and LOCK_TIMEOUT."""

from __future__ import annotations

import sys

from airflow_dbpartition.config import DatabaseConfig, Timings, WorkerConfig
from airflow_dbpartition.worker.logs import configure_logging
from airflow_dbpartition.worker.node import Worker

# Heartbeats have half of unreachable_after for a statement.
PATIENT = Timings(
    heartbeat_s=0.5, unreachable_after_s=4.0, remove_after_s=120.0, sweep_s=0.3, poll_s=0.2, steal_after_s=0.3
)
NAME, SLOTS = "hurried", 2

if __name__ == "__main__":
    url, schema, steps, lock_timeout_s = sys.argv[1:]
    configure_logging(log_format="console", log_level="info")
    worker = Worker(
        DatabaseConfig(url=url, schema=schema or None, statement_timeout_s=0.5, lock_timeout_s=float(lock_timeout_s)),
        WorkerConfig(imports=(steps,), concurrency=SLOTS, node_prefix=NAME, timings=PATIENT),
        logging={"log_format": "console", "log_level": "info"},
    )
    sys.exit(worker.run())
