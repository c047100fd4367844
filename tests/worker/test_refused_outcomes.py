"""Outcomes that no database stores end the partition with a text; the worker neither dies of them nor keeps them."""

from __future__ import annotations

import pytest

from airflow_dbpartition.domain import JobSettings
from tests.worker.processes import Fleet

WHOLE = "expected ctx.counters.write to be a whole number below 2**63, got "
MISCOUNTS = {
    "huge": WHOLE + "9223372036854775808",
    "nan": WHOLE + "nan",
    "none": WHOLE + "None",
    "text": WHOLE + "'many'",
    "fraction": WHOLE + "1.5",
    "replaced": "expected ctx.counters to be the Counters that the step was given, got None",
}


@pytest.mark.parametrize("executor", ["process", "thread"])
def test_counters_that_cannot_be_stored_fail_the_partition_and_the_worker_goes_on(fleet: Fleet, executor: str) -> None:
    node = fleet.start(executor=executor)
    jobs = {kind: fleet.submit(context={"do": "miscount", "kind": kind}) for kind in MISCOUNTS}
    hidden = fleet.submit(context={"do": "miscount", "kind": "nan", "fail": True})

    for kind, words in MISCOUNTS.items():
        assert jobs[kind].ends() == "FAILED"
        assert str(jobs[kind].partition().exit_message).endswith(words)
    assert hidden.ends() == "FAILED"
    assert str(hidden.partition().exit_message).endswith("LookupError: no such flight")
    assert fleet.submit().ends() == "COMPLETED"
    assert len(node.views()) == 1


def test_a_result_that_the_database_refuses_fails_the_partition(fleet: Fleet) -> None:
    fleet.start()
    settings = JobSettings(partition_retries=1, retry_delay_s=0.01)
    job = fleet.submit(context={"do": "return_nested", "levels": 40}, settings=settings)

    status = job.ends()
    if status == "COMPLETED":  # only MariaDB has a limit that is lower than ours
        assert str(job.partition().result).count("[") == 40
        return
    assert job.events() == ["retried", "failed"]
    assert str(job.partition().exit_message).startswith("the step ended well, but its outcome cannot be stored: ")
    assert fleet.submit().ends() == "COMPLETED"
