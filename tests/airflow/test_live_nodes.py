"""The sensor that waits for workers, in its three modes."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from airflow.sdk.bases.operator import TriggerFailureReason
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSensorTimeout,
    AirflowSkipException,
    TaskDeferred,
)
from airflow.triggers.base import TriggerEvent

from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.sensors import LiveNodesSensor
from airflow_dbpartition.triggers import LiveNodesTrigger
from tests.airflow.test_tries import execute, meanwhile, when
from tests.airflow.worlds import Try, connection_to, define
from tests.databases import Database
from tests.scenarios import add_node, remove, silence

MODES: dict[str, dict[str, Any]] = {
    "poke": {"deferrable": False},
    "reschedule": {"mode": "reschedule", "deferrable": False},
    "deferred": {"deferrable": True},
}
TIMED_OUT = {"error": TriggerFailureReason.TRIGGER_TIMEOUT}


def live(mode: str = "poke", **options: Any) -> LiveNodesSensor:
    return LiveNodesSensor(
        **{"task_id": "live", "poke_interval": 0.2, "repository_conn_id": "repo", **MODES[mode], **options}
    )


def deferral(sensor: LiveNodesSensor) -> TaskDeferred:
    """What a look that finds too few nodes defers with."""
    with pytest.raises(TaskDeferred) as deferred:
        execute(sensor, Try())
    assert deferred.value.method_name == "execute_live"
    return deferred.value


def fired(trigger: Any) -> list[TriggerEvent]:
    """The events of a trigger that another process has made of what was stored."""

    async def collect() -> list[TriggerEvent]:
        return [event async for event in LiveNodesTrigger(**trigger.serialize()[1]).run()]

    return asyncio.run(asyncio.wait_for(collect(), 30))


# --- the same in every mode ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_enough_nodes_are_their_number_at_once(connected: JobRepository, mode: str) -> None:
    for name in ("a", "b", "c"):
        add_node(connected, name)
    assert execute(live(mode, min_nodes=2), Try()) == 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("soft_fail", [False, True])
def test_a_timeout_fails_or_skips(connected: JobRepository, mode: str, soft_fail: bool) -> None:
    long_ago = datetime.now(timezone.utc) - timedelta(seconds=100)
    sensor = live(mode, timeout=0 if mode == "deferred" else 0.3, soft_fail=soft_fail)
    with pytest.raises(AirflowSkipException if soft_fail else AirflowSensorTimeout):
        execute(sensor, Try(first_reschedule=long_ago))


@pytest.mark.parametrize("mode", MODES)
def test_soft_fail_does_not_skip_over_a_wrong_connection(mode: str) -> None:
    with pytest.raises(AirflowFailException, match="'nowhere' is not defined"):
        execute(live(mode, repository_conn_id="nowhere", soft_fail=True), Try())


@pytest.mark.parametrize("mode", MODES)
def test_never_fail_skips_over_anything(mode: str) -> None:
    with pytest.raises(AirflowSkipException):
        execute(live(mode, repository_conn_id="nowhere", never_fail=True), Try())


@pytest.mark.parametrize("mode", MODES)
def test_an_outage_is_waited_out(sqlite_that_is_away: None, mode: str) -> None:
    expected: dict[str, type[BaseException]] = {
        "poke": AirflowSensorTimeout,
        "reschedule": AirflowRescheduleException,
        "deferred": TaskDeferred,
    }
    with pytest.raises(expected[mode]):
        execute(live(mode, timeout=0.3 if mode == "poke" else 60), Try())


@pytest.fixture
def sqlite_that_is_away(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    away = Database("sqlite", f"sqlite:///{tmp_path}/no/such/directory.sqlite")
    define(monkeypatch, "repo", connection_to(away))


@pytest.mark.parametrize("min_nodes", [0, "none", 1.5])
def test_a_number_of_nodes_that_is_none_is_refused_when_the_dag_is_read(min_nodes: Any) -> None:
    with pytest.raises(ConfigurationError, match="task 'live': expected min_nodes to be an integer of at least 1"):
        live(min_nodes=min_nodes)


# --- poke ----------------------------------------------------------------------------------------------------------


def test_it_waits_until_enough_nodes_that_know_the_step_are_live(connected: JobRepository) -> None:
    _too_few(connected)
    began: list[int] = []

    def one_more() -> None:
        add_node(connected, "b")

    with meanwhile(when(lambda: bool(began), one_more)):
        began.append(1)
        assert execute(live(min_nodes=2, step="work", timeout=30), Try()) == 2


# --- deferred ------------------------------------------------------------------------------------------------------


def test_deferred_it_waits_until_enough_nodes_that_know_the_step_are_live(connected: JobRepository) -> None:
    _too_few(connected)
    sensor = live("deferred", min_nodes=2, step="work", timeout=60)
    deferred = deferral(sensor)
    assert timedelta(seconds=55) < deferred.timeout <= timedelta(seconds=60)
    began: list[int] = []

    def one_more() -> None:
        add_node(connected, "b")

    with meanwhile(when(lambda: bool(began), one_more)):
        began.append(1)
        (event,) = fired(deferred.trigger)
    assert event.payload == {"message": "2 of 2 live nodes of group 'default' that know the step 'work'"}
    assert sensor.execute_live(Try().context(), event.payload, **(deferred.kwargs or {})) == 2


def test_where_a_node_has_left_before_the_task_is_back_the_wait_goes_on_in_the_same_window(
    connected: JobRepository,
) -> None:
    add_node(connected, "a")
    sensor = live("deferred", min_nodes=2, timeout=60)
    deferred = deferral(sensor)
    add_node(connected, "b")
    (event,) = fired(deferred.trigger)
    remove(connected, "b")
    with pytest.raises(TaskDeferred) as again:
        sensor.execute_live(Try().context(), event.payload, **(deferred.kwargs or {}))
    assert again.value.kwargs == deferred.kwargs
    assert again.value.timeout < deferred.timeout


@pytest.mark.parametrize("soft_fail", [False, True])
def test_a_deferral_that_times_out_is_a_last_look(connected: JobRepository, soft_fail: bool) -> None:
    sensor = live("deferred", soft_fail=soft_fail, timeout=60)
    with pytest.raises(
        AirflowSkipException if soft_fail else AirflowSensorTimeout, match="timed out after 60 s: there are not enough"
    ):
        sensor.resume_execution("__fail__", TIMED_OUT, Try().context())
    add_node(connected)
    assert sensor.resume_execution("__fail__", TIMED_OUT, Try().context()) == 1


def test_soft_fail_does_not_skip_over_a_trigger_that_failed(connected: JobRepository) -> None:
    with pytest.raises(AirflowException) as failed:
        live("deferred", soft_fail=True).resume_execution("__fail__", {"error": "ImportError"}, Try().context())
    assert not isinstance(failed.value, AirflowSkipException)


def test_the_interval_is_the_sensors_and_no_longer_than_the_connection_allows(
    database: Database, repository: JobRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    define(monkeypatch, "repo", connection_to(database, longest_poll_interval_s=1))
    for given, used in ((0.5, 0.5), (30, 1.0)):
        trigger: Any = deferral(live("deferred", poke_interval=given)).trigger
        assert trigger.poll_interval_s == used


def test_what_is_stored_of_the_wait_is_small_json_without_secrets(connected: JobRepository) -> None:
    path, arguments = deferral(live("deferred", min_nodes="3", node_group="g", step="work")).trigger.serialize()
    assert path == "airflow_dbpartition.triggers.LiveNodesTrigger"
    assert arguments == {
        "min_nodes": 3,
        "node_group": "g",
        "repository_conn_id": "repo",
        "step": "work",
        "poll_interval_s": 0.2,
    }


def _too_few(repository: JobRepository) -> None:
    """One node that would do, and others that would not."""
    add_node(repository, "a")
    add_node(repository, "silent")
    silence(repository, "silent", 60)
    add_node(repository, "other step", steps=("other",))
    add_node(repository, "other group", node_group="other")
