"""Nodes: registration, heartbeats and what they answer, and who may be given work."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone

import pytest

from airflow_dbpartition.config import Timings
from airflow_dbpartition.domain import NodeStatus
from airflow_dbpartition.recovery import Continuity, Recovery
from airflow_dbpartition.repository import JobRepository
from tests.scenarios import add_node, claim, claim_one, complete, remove, silence, submit, sweep


def node_status(repository: JobRepository, node_id: str) -> NodeStatus:
    (node,) = [node for node in repository.nodes.all(include_removed=True) if node.node_id == node_id]
    return node.status


def test_a_registered_node_is_seen_as_it_said_it_is(repository: JobRepository) -> None:
    add_node(repository, "a", steps=("b", "a"), node_group="g", capacity=7)
    (node,) = repository.nodes.all()
    assert (node.node_id, node.node_group, node.status) == ("a", "g", NodeStatus.ACTIVE)
    assert (node.capacity, node.current_load, node.steps) == (7, 0, ("a", "b"))
    assert -0.5 < node.heartbeat_age_s < 5


def test_registering_is_repeatable(repository: JobRepository) -> None:
    add_node(repository, "a", capacity=1)
    add_node(repository, "a", capacity=9)
    assert [node.capacity for node in repository.nodes.all()] == [1]


def test_a_heartbeat_says_what_is_held_and_what_is_asked_to_stop(repository: JobRepository) -> None:
    add_node(repository, "a")
    add_node(repository, "b")
    submit(repository, 3, job="kept", to={"p0": "a", "p1": "a", "p2": "b"})
    stopped = submit(repository, 2, job="stopped", to="a")
    kept = claim(repository, "a", 2)
    stopping = claim_one(repository, "a")
    repository.executions.stop(stopped.job_execution_id, reason="enough")
    reply = repository.nodes.heartbeat("a", current_load=3)
    assert reply.status is NodeStatus.ACTIVE
    assert reply.held == {one.step_execution_id: 1 for one in (*kept, stopping)}
    assert reply.stopping == {stopping.step_execution_id}
    complete(repository, kept[0])
    assert kept[0].step_execution_id not in repository.nodes.heartbeat("a", current_load=2).held
    assert repository.nodes.heartbeat("b", current_load=0).held == {}


def test_a_heartbeat_of_a_removed_node_says_so_and_revives_nothing(repository: JobRepository) -> None:
    add_node(repository)
    submit(repository, 1)
    claim_one(repository)
    remove(repository, "a")
    reply = repository.nodes.heartbeat("a", current_load=1)
    assert (reply.status, reply.held, reply.stopping) == (None, {}, frozenset())
    assert node_status(repository, "a") is NodeStatus.REMOVED
    assert repository.nodes.heartbeat("never registered", current_load=0).status is None


def test_a_heartbeat_takes_a_suspicion_back_but_not_a_drain(repository: JobRepository) -> None:
    add_node(repository)
    silence(repository, "a", 15)
    assert sweep(repository).unreachable == ["a"]
    assert repository.nodes.heartbeat("a", current_load=0).status is NodeStatus.ACTIVE
    assert repository.nodes.drain("a")
    assert repository.nodes.heartbeat("a", current_load=0).status is NodeStatus.DRAINING


def test_a_draining_node_says_so_itself(repository: JobRepository) -> None:
    add_node(repository)
    assert repository.nodes.heartbeat("a", current_load=2, draining=True).status is NodeStatus.DRAINING
    (node,) = repository.nodes.all()
    assert node.current_load == 2
    assert repository.nodes.live(node_group="default", within_s=10) == []


def test_draining_a_node_that_is_gone_says_false(repository: JobRepository) -> None:
    assert not repository.nodes.drain("nobody")
    add_node(repository)
    remove(repository, "a")
    assert not repository.nodes.drain("a")


def test_ranks_number_the_fleet_without_gaps(repository: JobRepository) -> None:
    for node in "cabd":
        add_node(repository, node)
    remove(repository, "b")
    replies = {node: repository.nodes.heartbeat(node, current_load=0) for node in "acd"}
    assert [replies[node].rank for node in "acd"] == [0, 1, 2]
    assert {reply.fleet_size for reply in replies.values()} == {3}


def test_who_has_fallen_silent_takes_no_turn_at_sweeping(repository: JobRepository) -> None:
    """Else the dead would hold the turns of a fleet that has lost most of its nodes, and delay the failover."""
    for node in "abcd":
        add_node(repository, node)
    for node in "abc":
        silence(repository, node, 11)
    reply = repository.nodes.heartbeat("d", current_load=0, heard_within_s=10)
    assert (reply.rank, reply.fleet_size) == (0, 1)
    reply = repository.nodes.heartbeat("a", current_load=0, heard_within_s=10)
    assert (reply.rank, reply.fleet_size) == (0, 2)


def test_the_databases_clock_comes_with_the_heartbeat(repository: JobRepository) -> None:
    add_node(repository)
    assert repository.nodes.heartbeat("a", current_load=0).db_epoch_s == pytest.approx(time.time(), abs=5)


def test_work_is_only_given_to_the_live_nodes_of_the_group_that_know_the_step(repository: JobRepository) -> None:
    add_node(repository, "good")
    add_node(repository, "other group", node_group="g")
    add_node(repository, "other step", steps=("else",))
    add_node(repository, "silent")
    silence(repository, "silent", 11)
    live = repository.nodes.live(node_group="default", within_s=10, step="work")
    assert [node.node_id for node in live] == ["good"], "age decides, not status alone: silent is still ACTIVE"
    assert node_status(repository, "silent") is NodeStatus.ACTIVE


def test_who_was_not_heard_without_a_gap_judges_nobody() -> None:
    now = [100.0]
    continuity = Continuity(Timings(), clock=lambda: now[0])
    assert not continuity.may_judge
    for _ in range(11):
        continuity.heard(datetime.now(timezone.utc))
        now[0] += 3
    assert continuity.may_judge
    now[0] += 11  # the database was away
    assert not continuity.may_judge
    continuity.heard(datetime.now(timezone.utc))
    assert not continuity.may_judge, "the first one back evicts nobody"
    for _ in range(9):
        now[0] += 3
        continuity.heard(datetime.now(timezone.utc))
    assert not continuity.may_judge
    now[0] += 3
    continuity.heard(datetime.now(timezone.utc))
    assert continuity.may_judge


def test_a_right_to_judge_ends_by_the_databases_clock_unless_it_is_renewed(repository: JobRepository) -> None:
    """A sweep that is held up on its way, while nobody is heard, must not judge on its arrival."""
    for node in "ab":
        add_node(repository, node)
        silence(repository, node, 1000)
    now = repository.nodes.clock()
    recovery = Recovery(repository, Timings())
    late = recovery.sweep(may_judge=True, until=now - timedelta(seconds=1))
    assert (late.unreachable, late.removed) == ([], [])
    in_time = recovery.sweep(may_judge=True, until=now + timedelta(seconds=60))
    assert in_time.removed == ["a", "b"]


def test_the_right_to_judge_lasts_as_long_as_one_may_be_silent() -> None:
    now = [0.0]
    continuity = Continuity(Timings(unreachable_after_s=10), clock=lambda: now[0])
    heard = datetime(2026, 1, 1, tzinfo=timezone.utc)
    continuity.heard(heard)
    assert continuity.until == heard + timedelta(seconds=10)
    now[0] = 11.0
    continuity.heard()
    assert continuity.until is None, "after a gap it has to be earned again"
