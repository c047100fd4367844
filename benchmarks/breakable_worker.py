"""The command line, but SIGUSR1 raises an error in the supervisor's main thread that nothing of it expects."""

from __future__ import annotations

import signal
import sys

from airflow_dbpartition.cli import main


def _break(_signum: int, _frame: object) -> None:
    raise RuntimeError("broken by SIGUSR1")


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _break)
    main(sys.argv[1:])  # in this process, where the handler is
