"""Lost nodes: who is suspected, who is removed, and where their work goes."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import update

from airflow_dbpartition.domain import ExecutionStatus, JobSettings, NodeStatus, Partition, PartitionStatus
from airflow_dbpartition.errors import ClaimLostError
from airflow_dbpartition.recovery import Recovery
from airflow_dbpartition.repository import JobRepository
from tests.scenarios import (
    QUICK,
    add_node,
    claim,
    claim_one,
    column,
    complete,
    event_names,
    partition,
    remove,
    silence,
    statuses,
    submit,
    sweep,
)


def test_silence_is_first_suspected_and_then_ends_a_node(repository: JobRepository) -> None:
    for node, seconds in (("fresh", 0), ("late", 12), ("dead", 31), ("draining", 31)):
        add_node(repository, node)
        if node == "draining":
            repository.nodes.drain(node)
        silence(repository, node, seconds)
    report = sweep(repository)
    assert sorted(report.unreachable) == ["dead", "late"]
    assert sorted(report.removed) == ["dead", "draining"]
    found = {node.node_id: node.status for node in repository.nodes.all(include_removed=True)}
    assert found == {
        "fresh": NodeStatus.ACTIVE,
        "late": NodeStatus.UNREACHABLE,
        "dead": NodeStatus.REMOVED,
        "draining": NodeStatus.REMOVED,
    }
    assert sweep(repository).removed == []


def test_a_sweep_that_may_not_judge_removes_nobody_but_finishes_what_others_judged(repository: JobRepository) -> None:
    add_node(repository, "a")
    add_node(repository, "b")
    launched = submit(repository, 1, to="a", settings=JobSettings(transferable="always"))
    silence(repository, "b", 1000)
    remove(repository, "a")
    report = Recovery(repository, QUICK).sweep(may_judge=False)
    assert (report.unreachable, report.removed) == ([], [])
    assert [node for node, _ in report.rehomed] == ["a"]
    assert partition(repository, launched.job_execution_id).assigned_node is None, "nobody live: anybody's"


def test_lost_work_goes_to_the_live_nodes_by_the_executions_strategy(repository: JobRepository) -> None:
    for node in ("gone", "x", "y", "other group", "other step"):
        add_node(
            repository,
            node,
            node_group="g" if node == "other group" else "default",
            steps=("else",) if node == "other step" else ("work",),
        )
    launched = submit(repository, 4, to="gone")
    remove(repository, "gone")
    sweep(repository)
    assert sorted(column(repository, launched.job_execution_id, "assigned_node")) == ["x", "x", "y", "y"]
    assert column(repository, launched.job_execution_id, "version") == [1, 1, 1, 1]
    assert column(repository, launched.job_execution_id, "node_losses") == [0, 0, 0, 0], "it had not begun"
    assert event_names(repository, launched.job_execution_id) == ["reassigned"] * 4


def test_running_work_that_may_run_again_is_reassigned_and_counts_a_loss(repository: JobRepository) -> None:
    add_node(repository, "a")
    launched = submit(repository, 1, to="a", settings=JobSettings(transferable="always"))
    lost = claim_one(repository, "a")
    add_node(repository, "b")
    silence(repository, "a", 40)
    report = sweep(repository)
    assert [(node, rehomed.reassigned) for node, rehomed in report.rehomed] == [("a", 1)]
    row = partition(repository, launched.job_execution_id)
    assert (row.status, row.assigned_node, row.node_losses) == (PartitionStatus.PENDING, "b", 1)
    assert event_names(repository, launched.job_execution_id) == ["lost", "reassigned"]
    lost_event, reassigned = repository.reading.events(launched.job_execution_id)
    assert lost_event.node_id == "a"
    assert reassigned.message is not None
    assert "now b's" in reassigned.message
    with pytest.raises(ClaimLostError):
        complete(repository, lost)
    complete(repository, claim_one(repository, "b"))


@pytest.mark.parametrize("policy", ["until_started", "never"])
def test_running_work_that_may_not_run_again_fails_and_says_so(repository: JobRepository, policy: str) -> None:
    add_node(repository, "a")
    add_node(repository, "b")
    launched = submit(repository, 1, to="a", settings=JobSettings(transferable=policy))
    claim_one(repository, "a")
    remove(repository, "a")
    report = sweep(repository)
    assert report.rehomed[0][1].failed == 1
    row = partition(repository, launched.job_execution_id)
    assert (row.status, row.node_losses) == (PartitionStatus.FAILED, 1)
    assert "not transferable" in (row.exit_message or "")
    assert repository.reading.execution(launched.job_execution_id).status is ExecutionStatus.FAILED
    assert event_names(repository, launched.job_execution_id) == ["lost", "failed"]


def test_work_that_never_moves_fails_with_its_node_even_unstarted_and_is_not_called_lost(
    repository: JobRepository,
) -> None:
    add_node(repository, "a")
    launched = submit(repository, 1, to="a", settings=JobSettings(transferable="never"))
    remove(repository, "a")
    sweep(repository)
    row = partition(repository, launched.job_execution_id)
    assert (row.status, row.node_losses) == (PartitionStatus.FAILED, 0)
    assert "before this partition ran" in (row.exit_message or "")
    assert repository.executions.restart(launched.job_execution_id, place=lambda work: {}).created


def test_work_between_two_attempts_fails_with_its_node_and_says_that_it_had_begun(repository: JobRepository) -> None:
    add_node(repository, "a")
    launched = submit(repository, 1, to="a", settings=JobSettings(partition_retries=3))
    repository.settlements.retry(claim_one(repository, "a"), message="first error", delay_s=60)
    remove(repository, "a")
    sweep(repository)
    row = partition(repository, launched.job_execution_id)
    assert row.status is PartitionStatus.FAILED
    assert "before this partition ran" not in (row.exit_message or ""), "it has run, once"


def test_a_poison_partition_stops_killing_nodes(repository: JobRepository) -> None:
    launched = submit(repository, 2, settings=JobSettings(transferable="always", max_node_losses=2))
    for number in (1, 2):
        add_node(repository, f"n{number}")
        assert claim_one(repository, f"n{number}").partition_key == "p0"
        remove(repository, f"n{number}")
        sweep(repository)
    row = partition(repository, launched.job_execution_id)
    assert (row.status, row.node_losses) == (PartitionStatus.FAILED, 2)
    assert "max_node_losses" in (row.exit_message or "")
    assert statuses(repository, launched.job_execution_id) == {"FAILED": 1, "PENDING": 1}


def test_only_running_work_counts_losses(repository: JobRepository) -> None:
    launched = submit(repository, 1, to="n0", settings=JobSettings(max_node_losses=1))
    for number in range(4):
        add_node(repository, f"n{number + 1}")
        if number == 0:
            add_node(repository, "n0")
        remove(repository, f"n{number}")
        sweep(repository)
        assert partition(repository, launched.job_execution_id).assigned_node == f"n{number + 1}"
    assert partition(repository, launched.job_execution_id).node_losses == 0


def test_in_a_stopping_execution_lost_work_is_stopped_and_not_placed_again(repository: JobRepository) -> None:
    add_node(repository, "a")
    add_node(repository, "b")
    partitions = [Partition("moves", transferable=True), Partition("fixed", transferable=False)]
    launched = submit(repository, partitions, to="a")
    claim(repository, "a", 2)
    repository.executions.stop(launched.job_execution_id, reason="enough")
    remove(repository, "a")
    sweep(repository)
    assert partition(repository, launched.job_execution_id, "moves").status is PartitionStatus.STOPPED
    assert partition(repository, launched.job_execution_id, "fixed").status is PartitionStatus.FAILED
    assert repository.reading.execution(launched.job_execution_id).status is ExecutionStatus.FAILED


def test_a_node_that_turns_out_to_live_loses_nothing(repository: JobRepository) -> None:
    add_node(repository, "a")
    launched = submit(repository, 1, to="a")
    claim_one(repository, "a")
    assert Recovery(repository, QUICK).rehome("a", why="a mistake") == []
    assert statuses(repository, launched.job_execution_id) == {"CLAIMED": 1}


def test_owners_without_any_row_are_found_by_a_deep_sweep(repository: JobRepository) -> None:
    launched = submit(repository, 1, to="never registered")
    add_node(repository, "a")
    assert sweep(repository).rehomed == []
    assert [node for node, _ in sweep(repository, deep=True).rehomed] == ["never registered"]
    assert partition(repository, launched.job_execution_id).assigned_node == "a"


def test_who_leaves_gives_everything_away_at_once(repository: JobRepository) -> None:
    add_node(repository, "a")
    add_node(repository, "b")
    launched = submit(repository, 3, to="a")
    (rehomed,) = Recovery(repository, QUICK).leave("a")
    assert rehomed.reassigned == 3
    assert column(repository, launched.job_execution_id, "assigned_node") == ["b", "b", "b"]
    assert Recovery(repository, QUICK).leave("a") == []


def test_who_drains_hands_over_what_it_has_not_claimed(repository: JobRepository) -> None:
    add_node(repository, "a")
    add_node(repository, "b")
    partitions = [Partition("running"), Partition("waiting"), Partition("fixed", transferable=False)]
    launched = submit(repository, partitions, to="a")
    running = claim_one(repository, "a")
    repository.nodes.drain("a")
    Recovery(repository, QUICK).hand_over("a")
    rows = {row.partition_key: row for row in repository.reading.partitions(launched.job_execution_id)}
    assert {key: row.assigned_node for key, row in rows.items()} == {"running": "a", "waiting": "b", "fixed": "a"}
    complete(repository, running)


def test_the_last_lost_partition_ends_its_execution(repository: JobRepository) -> None:
    for node in "ab":
        add_node(repository, node)
    launched = submit(repository, 2, to={"p0": "a", "p1": "b"})
    claim_one(repository, "a")
    complete(repository, claim_one(repository, "b"))
    remove(repository, "a")
    sweep(repository)
    assert repository.reading.execution(launched.job_execution_id).status is ExecutionStatus.FAILED


def test_one_execution_that_cannot_be_read_does_not_stop_the_sweep(repository: JobRepository) -> None:
    """A sweep that dies at its first trouble would leave everything behind it lying for ever."""
    for node in ("gone1", "gone2", "live"):
        add_node(repository, node)
    bad = submit(repository, 1, job="bad", to="gone1", settings=JobSettings(assignment={"name": "of the future"}))
    worse = submit(repository, 1, job="worse", to="gone1")
    good = submit(repository, 1, job="good", to="gone2")
    e = repository.tables.executions
    broken: dict[str, Any] = {"transferable": "of the future", "max_node_losses": "many"}
    with repository.engine.begin() as connection:
        connection.execute(update(e).where(e.c.job_execution_id == worse.job_execution_id).values(settings=broken))
    for node in ("gone1", "gone2"):
        remove(repository, node)
    sweep(repository)
    assert partition(repository, good.job_execution_id).assigned_node == "live"
    assert partition(repository, bad.job_execution_id).assigned_node == "live"
