"""Workers at work: what they take, what they leave to others, and how they end when nothing is left."""

from __future__ import annotations

import pytest

from tests.worker.processes import Fleet


@pytest.mark.parametrize("executor", ["process", "thread"])
def test_a_job_runs_to_its_end(fleet: Fleet, executor: str) -> None:
    node = fleet.start(concurrency=2, executor=executor)
    job = fleet.submit(6)

    assert job.ends() == "COMPLETED"
    assert job.counts() == {"COMPLETED": 6}
    results = [row.result for row in job.partitions().values()]
    assert [result["number"] for result in results] == list(range(6))
    in_the_supervisor = {result["pid"] == node.pid for result in results}
    assert in_the_supervisor == {executor == "thread"}
    assert job.events() == []
