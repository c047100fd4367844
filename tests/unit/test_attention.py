"""How closely a worker looks at the database."""

from __future__ import annotations

import math

import pytest

from airflow_dbpartition.config import Timings
from airflow_dbpartition.domain import NodeStatus
from airflow_dbpartition.repository import HeartbeatReply
from airflow_dbpartition.worker.attention import IDLE_SWEEP_EVERY_S, UNTOLD_S, Attention

NOW = 1000.0
TIMINGS = Timings()


def reply(*, active: bool = False, silent: bool = False) -> HeartbeatReply:
    return HeartbeatReply(NodeStatus.ACTIVE, {}, frozenset(), is_work_active=active, is_any_silent=silent)


@pytest.fixture
def idle() -> Attention:
    """A worker that has been told that no work is active."""
    attention = Attention(TIMINGS, NOW - 1)
    attention.heard(reply(), NOW, is_told=True)
    attention.found_nothing(NOW)
    assert attention.next_look == math.inf
    return attention


def test_a_new_worker_looks_at_once_and_sweeps() -> None:
    assert Attention(TIMINGS, NOW - 1).next_look <= NOW
    assert Attention(TIMINGS, NOW - 1).sweep_every_s == TIMINGS.sweep_s


def test_it_polls_while_work_is_active() -> None:
    attention = Attention(TIMINGS, NOW - 1)
    attention.heard(reply(active=True), NOW, is_told=True)
    attention.found_nothing(NOW)
    assert NOW + 0.8 * TIMINGS.poll_s <= attention.next_look <= NOW + 1.2 * TIMINGS.poll_s


def test_it_neither_polls_nor_sweeps_often_while_none_is(idle: Attention) -> None:
    assert idle.sweep_every_s == IDLE_SWEEP_EVERY_S


def test_a_heartbeat_that_tells_of_work_makes_it_look_at_once(idle: Attention) -> None:
    idle.heard(reply(active=True), NOW + 3, is_told=True)
    assert idle.next_look <= NOW
    assert idle.sweep_every_s == TIMINGS.sweep_s


def test_an_announcement_makes_it_look_at_once(idle: Attention) -> None:
    idle.announced(NOW + 1)
    assert idle.next_look <= NOW


def test_a_heartbeat_that_was_sent_before_an_announcement_does_not_belie_it(idle: Attention) -> None:
    idle.announced(NOW + 1)
    idle.heard(reply(), NOW + 0.9, is_told=True)
    idle.found_nothing(NOW + 1)
    assert idle.next_look < math.inf
    idle.heard(reply(), NOW + 4, is_told=True)
    assert idle.next_look == math.inf


def test_a_free_slot_makes_it_look_once(idle: Attention) -> None:
    idle.look_now()
    assert idle.next_look <= NOW
    idle.found_nothing(NOW + 1)
    assert idle.next_look == math.inf


def test_a_silent_node_makes_it_sweep_and_not_look(idle: Attention) -> None:
    idle.heard(reply(silent=True), NOW + 3, is_told=True)
    assert idle.sweep_every_s == TIMINGS.sweep_s
    assert idle.next_look == math.inf


def test_where_nothing_is_announced_it_goes_on_polling_for_a_while_after_the_last_job() -> None:
    attention = Attention(TIMINGS, NOW - 1)
    attention.heard(reply(active=True), NOW, is_told=False)
    attention.found_nothing(NOW)
    attention.heard(reply(), NOW + UNTOLD_S - 1, is_told=False)
    assert attention.next_look < math.inf
    attention.heard(reply(), NOW + UNTOLD_S + 1, is_told=False)
    assert attention.next_look == math.inf
