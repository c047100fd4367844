"""Several claims of one node that are completed in one transaction: each is fenced as if it were alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from airflow_dbpartition.domain import Claim, Counters, PartitionStatus
from airflow_dbpartition.recovery import Recovery
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.repository.settlements import Completed
from airflow_dbpartition.worker.metrics import Metrics
from airflow_dbpartition.worker.runner import COMPLETED, Outcome
from airflow_dbpartition.worker.settling import Settling
from tests.scenarios import (
    OFTEN,
    QUICK,
    add_node,
    claim,
    claim_one,
    column,
    complete,
    event_names,
    partition,
    remove,
    statuses,
    submit,
    sweep,
)

RESULTS: list[Any] = [
    None,
    0,
    False,
    "",
    "\U0001f6eb 'quoted\" \\ %s :colon",
    1.5,
    2**62,
    [],
    {},
    {"nested": [{"n": None}]},
]


def test_each_gets_its_own_result_and_counters(repository: JobRepository) -> None:
    add_node(repository)
    job = submit(repository, len(RESULTS)).job_execution_id
    taken = claim(repository, limit=len(RESULTS))
    completed = [
        Completed(one, Counters(number, number + 1, 2, 3, 4, 5), result)
        for number, (one, result) in enumerate(zip(taken, RESULTS, strict=True))
    ]
    assert repository.settlements.complete_all(completed) == []

    for number, one in enumerate(taken):
        row = partition(repository, job, one.partition_key)
        assert (row.status, row.version, row.exit_message) == (PartitionStatus.COMPLETED, one.version, None)
        assert (row.result, type(row.result)) == (RESULTS[number], type(RESULTS[number]))
        assert row.counters == Counters(number, number + 1, 2, 3, 4, 5)
    assert None not in column(repository, job, "end_time")
    assert event_names(repository, job) == []
    assert repository.executions.finalise(job) == "COMPLETED"


def test_what_is_lost_is_named_and_the_others_stand(repository: JobRepository) -> None:
    for node in "ab":
        add_node(repository, node)
    job = submit(repository, 5, settings=OFTEN, to="a").job_execution_id
    own, said_before, of_another, of_an_old_claim, own_too = claim(repository, limit=5)
    complete(repository, said_before)
    forged = replace(of_another, version=of_another.version + 1)
    zombie = replace(of_an_old_claim, version=of_an_old_claim.version - 1)
    before = [partition(repository, job, one.partition_key) for one in (forged, zombie, said_before)]

    claims = [own, said_before, forged, zombie, own_too]
    lost = repository.settlements.complete_all([Completed(one, Counters()) for one in claims])

    assert lost == [forged, zombie]
    assert [partition(repository, job, one.partition_key) for one in (forged, zombie, said_before)] == before
    assert {partition(repository, job, one.partition_key).status for one in (own, own_too)} == {"COMPLETED"}


def test_a_zombie_completes_nothing_that_others_have_by_now(repository: JobRepository) -> None:
    for node in "ab":
        add_node(repository, node)
    job = submit(repository, 3, settings=OFTEN, to="a").job_execution_id
    zombies = claim(repository, limit=3)
    remove(repository, "a")
    sweep(repository)
    taken: list[Claim] = [claim_one(repository, "b") for _ in zombies]

    lost = repository.settlements.complete_all([Completed(one, Counters(), "late") for one in zombies])

    assert lost == zombies
    rows = [partition(repository, job, one.partition_key) for one in taken]
    assert {(row.status, row.assigned_node, row.result) for row in rows} == {("CLAIMED", "b", None)}


def test_one_that_the_database_refuses_does_not_take_the_others_with_it(repository: JobRepository) -> None:
    add_node(repository)
    job = submit(repository, 5).job_execution_id
    taken = claim(repository, limit=5)
    too_deep: list[object] = []
    for _ in range(40):  # only MariaDB has a limit that is lower than ours
        too_deep = [too_deep]
    settling = Settling(repository, Recovery(repository, QUICK), Metrics())
    for number, one in enumerate(taken):
        settling.settle(one, Outcome(COMPLETED, result=too_deep if number == 2 else number), stop_requested=False)
    settling.flush()
    settling.flush()

    assert settling.is_idle
    refused = partition(repository, job, taken[2].partition_key)
    others = [partition(repository, job, one.partition_key) for one in taken if one is not taken[2]]
    assert [(row.status, row.result) for row in others] == [("COMPLETED", number) for number in (0, 1, 3, 4)]
    if refused.status != "COMPLETED":
        assert refused.status == "FAILED"
        assert "its outcome cannot be stored" in str(refused.exit_message)
    assert str(repository.reading.execution(job).status) == str(refused.status)


def test_an_execution_is_looked_at_once_the_node_runs_none_of_it(repository: JobRepository) -> None:
    add_node(repository)
    job = submit(repository, 2).job_execution_id
    first, last = claim(repository, limit=2)
    settling = Settling(repository, Recovery(repository, QUICK), Metrics())
    settling.settle(first, Outcome(COMPLETED), stop_requested=False)
    settling.write_due()
    settling.end_executions(still_running={job})
    settling.settle(last, Outcome(COMPLETED), stop_requested=False)
    settling.write_due()
    settling.end_executions(still_running={job})
    assert statuses(repository, job) == {"COMPLETED": 2}
    assert repository.reading.execution(job).status.is_active
    settling.end_executions()
    assert repository.reading.execution(job).status == "COMPLETED"
