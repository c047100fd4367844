"""A claim to try things on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from airflow_dbpartition.domain import Claim, Counters, JobSettings, TransferPolicy


def a_claim(**changes: Any) -> Claim:
    """A claim in which only what is named matters."""
    claim = Claim(
        step_execution_id=1,
        job_execution_id=2,
        job_instance_id=3,
        node_id="a",
        version=4,
        partition_key="k",
        step_name="work",
        attempt=1,
        context={},
        checkpoint=None,
        counters=Counters(),
        settings=JobSettings(partition_retries=2),
        transfer_policy=TransferPolicy.ALWAYS,
        job_name="job",
        job_key="key",
        generation=1,
    )
    return replace(claim, **changes)
