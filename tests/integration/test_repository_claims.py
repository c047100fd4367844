"""Claiming: in which order, by whom, and what is never taken."""

from __future__ import annotations

import pytest

from airflow_dbpartition.domain import (
    Claim,
    ExecutionStatus,
    JobSettings,
    Partition,
    PartitionStatus,
    TransferPolicy,
)
from airflow_dbpartition.repository import JobRepository
from tests.scenarios import (
    add_node,
    age_partitions,
    claim,
    claim_one,
    column,
    complete,
    event_names,
    partition,
    plan,
    remove,
    silence,
    submit,
    sweep,
)


def keys(claims: list[Claim]) -> list[str]:
    return [one.partition_key for one in claims]


def test_a_claim_carries_all_that_the_work_needs(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(
        repository,
        [Partition("k", {"low": 1}, transferable=True)],
        settings=JobSettings(partition_retries=2),
        parameters={"day": "1"},
    )
    taken = claim_one(repository)
    assert taken.job_execution_id == launched.job_execution_id
    assert (taken.partition_key, taken.context, taken.checkpoint) == ("k", {"low": 1}, None)
    assert (taken.version, taken.attempt, taken.retries_left) == (1, 1, 2)
    assert taken.transfer_policy is TransferPolicy.ALWAYS
    assert (taken.job_name, taken.generation, taken.step_name) == ("job", 1, "work")
    row = partition(repository, launched.job_execution_id, "k")
    assert (row.status, row.assigned_node, row.version, row.attempt) == (PartitionStatus.CLAIMED, "a", 1, 1)


def test_a_node_takes_its_own_then_nobodys_then_anothers(repository: JobRepository) -> None:
    add_node(repository, "a")
    add_node(repository, "b")
    submit(repository, 6, to={"p0": "b", "p1": "b", "p2": None, "p3": None, "p4": "a", "p5": "a"})
    age_partitions(repository, 10)
    assert keys(claim(repository, "a", 3, steal_after_s=1)) == ["p4", "p5", "p2"]
    assert keys(claim(repository, "a", 3, steal_after_s=1)) == ["p3"], "who found work of its own does not steal"
    assert keys(claim(repository, "a", 3, steal_after_s=1)) == ["p0", "p1"]
    assert claim(repository, "a", 3, steal_after_s=1) == []


def test_no_more_is_taken_than_asked_for(repository: JobRepository) -> None:
    add_node(repository)
    submit(repository, 5)
    assert claim(repository, limit=0) == []
    assert claim(repository, limit=-1) == []
    assert len(claim(repository, limit=2)) == 2
    assert len(claim(repository, limit=100)) == 3


def test_only_steps_that_are_registered_are_taken(repository: JobRepository) -> None:
    add_node(repository, "a", steps=("work", "other"))
    submit(repository, 1, job="one", step="work")
    submit(repository, 1, job="two", step="other")
    submit(repository, 1, job="three", step="WORK")
    assert claim(repository, steps=()) == []
    assert [one.step_name for one in claim(repository, limit=9, steps=("other", "absent"))] == ["other"]
    assert [one.step_name for one in claim(repository, limit=9)] == ["work"]
    assert not repository.claims.waiting(node_id="a", node_group="default", steps=("work",))
    assert repository.claims.waiting(node_id="a", node_group="default", steps=("WORK",))


def test_another_groups_free_work_is_not_taken_and_not_stolen(repository: JobRepository) -> None:
    add_node(repository, "a", node_group="other")
    submit(repository, 1, job="free")
    submit(repository, 1, job="given", to="b")
    age_partitions(repository, 10)
    assert claim(repository, "a", 9, node_group="other", steal_after_s=0) == []


def test_what_is_not_available_yet_is_left_alone(repository: JobRepository) -> None:
    add_node(repository)
    submit(repository, 1, settings=JobSettings(partition_retries=1))
    first = claim_one(repository)
    repository.settlements.retry(first, message="again", delay_s=3600)
    assert claim(repository) == []
    assert repository.claims.waiting(node_id="a", node_group="default", steps=("work",))


def test_higher_priority_goes_first_and_then_the_order_of_the_plan(repository: JobRepository) -> None:
    add_node(repository)
    submit(repository, [Partition("low1"), Partition("low2")], job="low")
    submit(repository, [Partition("high1"), Partition("high2")], job="high", priority=10)
    assert keys(claim(repository, limit=4)) == ["high1", "high2", "low1", "low2"]


@pytest.mark.parametrize(
    ("policy", "before", "after"), [("always", 1, 1), ("until_started", 1, 0), ("never", 0, 0)], ids=str
)
def test_the_claim_itself_ends_until_started(repository: JobRepository, policy: str, before: int, after: int) -> None:
    add_node(repository)
    launched = submit(repository, 1, settings=JobSettings(transferable=policy), to="a")
    assert column(repository, launched.job_execution_id, "is_transferable") == [before]
    claim_one(repository)
    assert column(repository, launched.job_execution_id, "is_transferable") == [after]


def test_a_steal_is_recorded_with_the_node_it_was_taken_from(repository: JobRepository) -> None:
    add_node(repository, "a")
    launched = submit(repository, 1, to="busy")
    age_partitions(repository, 10)
    taken = claim_one(repository, "a", steal_after_s=5)
    assert taken.stolen_from == "busy"
    (event,) = repository.reading.events(launched.job_execution_id)
    assert (event.event, event.node_id, event.message) == ("stolen", "busy", "taken by idle node a")


def test_nothing_is_stolen_before_its_own_node_has_had_its_time(repository: JobRepository) -> None:
    add_node(repository, "a")
    submit(repository, 1, to="busy")
    assert claim(repository, "a", steal_after_s=30) == []
    age_partitions(repository, 31)
    assert claim(repository, "a") == [], "no steal_after_s, no stealing"
    assert len(claim(repository, "a", steal_after_s=30)) == 1


def test_nothing_is_stolen_that_may_not_move_or_whose_execution_says_no(repository: JobRepository) -> None:
    add_node(repository, "a")
    submit(repository, [Partition("fixed", transferable=False)], job="fixed", to="busy")
    submit(repository, 1, job="no stealing", settings=JobSettings(stealing=False), to="busy")
    age_partitions(repository, 10)
    assert claim(repository, "a", 9, steal_after_s=0) == []
    assert not repository.claims.waiting(node_id="a", node_group="default", steps=("work",))


def test_started_work_that_waits_for_its_retry_is_not_stolen_unless_it_may_always_move(
    repository: JobRepository,
) -> None:
    add_node(repository, "a")
    add_node(repository, "b")
    submit(repository, [Partition("once"), Partition("often", transferable=True)], to="a")
    for taken in claim(repository, "a", 2):
        repository.settlements.retry(taken, message="again", delay_s=0)
    age_partitions(repository, 10)
    assert keys(claim(repository, "b", 9, steal_after_s=0)) == ["often"]
    assert keys(claim(repository, "a", 9)) == ["once"]


@pytest.mark.parametrize("status", ["REMOVED", "DRAINING", "UNREACHABLE", "no row"])
def test_a_node_that_is_not_active_gets_nothing(repository: JobRepository, status: str) -> None:
    if status != "no row":
        add_node(repository)
    submit(repository, 1, to="a")
    submit(repository, 1, job="free")
    if status == "REMOVED":
        remove(repository, "a")
    elif status == "DRAINING":
        repository.nodes.drain("a")
    elif status == "UNREACHABLE":
        silence(repository, "a", 15)
        assert sweep(repository).unreachable == ["a"]
    assert claim(repository, "a", 9, steal_after_s=0) == []


def test_a_stopping_execution_is_not_claimed_from(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 2)
    first = claim_one(repository)
    assert repository.executions.stop(launched.job_execution_id, reason="enough") is ExecutionStatus.STOPPING
    assert claim(repository, limit=9) == []
    repository.settlements.stop(first)


def test_many_workers_work_and_the_first_claim_starts_the_execution_once(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 2)
    claim_one(repository)
    repository.claims.mark_started(launched.job_execution_id)
    started = repository.reading.execution(launched.job_execution_id)
    assert started.status is ExecutionStatus.STARTED
    repository.claims.mark_started(launched.job_execution_id)
    assert repository.reading.execution(launched.job_execution_id).start_time == started.start_time


def test_settings_are_those_of_each_ones_own_execution(repository: JobRepository) -> None:
    add_node(repository)
    submit(repository, 1, job="one", settings=JobSettings(partition_timeout_s=5.5))
    submit(repository, 1, job="two", settings=JobSettings(partition_timeout_s=None, fail_fast=True))
    one, two = claim(repository, limit=2)
    assert (one.job_name, one.settings.partition_timeout_s) == ("one", 5.5)
    assert (two.job_name, two.settings.fail_fast) == ("two", True)


def test_the_idempotency_key_is_stable_over_attempts_and_restarts_and_new_in_a_generation(
    repository: JobRepository,
) -> None:
    add_node(repository)
    launched = submit(repository, plan(2), settings=JobSettings(partition_retries=1))
    first, other = claim(repository, limit=2)
    assert first.idempotency_key != other.idempotency_key
    repository.settlements.retry(first, message="again", delay_s=0)
    again = claim_one(repository)
    assert again.idempotency_key == first.idempotency_key
    repository.settlements.fail(again, message="broken")
    complete(repository, other)
    repository.executions.finalise(launched.job_execution_id)
    repository.executions.restart(launched.job_execution_id, place=lambda work: {})
    restarted = claim_one(repository)
    assert restarted.idempotency_key == first.idempotency_key
    submit(repository, plan(2), generation=2)
    assert claim_one(repository).idempotency_key != first.idempotency_key
    assert event_names(repository, launched.job_execution_id) == ["retried", "failed"]
