"""The steps of one release after the other: each release knows one step more than the one before.

DBPARTITION_TEST_RELEASE says which release a process is; release 0 knows `ledger` alone.
"""

from __future__ import annotations

import os
from typing import Any

from airflow_dbpartition.worker import PartitionContext, step
from tests.resilience.steps_of_ledgers import ledger


def new_in_release(ctx: PartitionContext) -> Any:
    return {**ledger(ctx), "step": ctx.step_name}


for _number in range(1, int(os.environ.get("DBPARTITION_TEST_RELEASE", "0")) + 1):
    step(f"ledger of release {_number}")(new_in_release)
