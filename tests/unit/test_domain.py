"""Statuses, transitions and the values that travel between the parts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_dbpartition.domain import (
    ACTIVE_EXECUTIONS,
    COUNTER_NAMES,
    LIVE_PARTITIONS,
    Counters,
    ExecutionStatus,
    JobIdentity,
    JobSettings,
    NodeStatus,
    NodeView,
    PartitionStatus,
    Progress,
    TransferPolicy,
    Transition,
    Transitions,
)
from airflow_dbpartition.errors import ConfigurationError
from tests.unit.claims import a_claim

P = PartitionStatus
TRANSITIONS = {name: value for name, value in vars(Transitions).items() if isinstance(value, Transition)}

# The state machine as the design has it: every pair that is not here must be impossible.
ALLOWED = {
    (P.PENDING, P.CLAIMED): {"claim", "steal"},
    (P.PENDING, P.PENDING): {"reassign"},
    (P.PENDING, P.FAILED): {"abandon"},
    (P.PENDING, P.STOPPED): {"stop"},
    (P.CLAIMED, P.PENDING): {"retry", "release", "reassign"},
    (P.CLAIMED, P.CLAIMED): {"checkpoint"},
    (P.CLAIMED, P.COMPLETED): {"complete"},
    (P.CLAIMED, P.FAILED): {"fail", "abandon"},
    (P.CLAIMED, P.STOPPED): {"stop"},
}


@pytest.mark.parametrize(("source", "target"), list(product(P, P)), ids=str)
def test_every_pair_of_statuses_is_reached_by_exactly_the_verbs_of_the_design(
    source: PartitionStatus, target: PartitionStatus
) -> None:
    found = {one.name for one in TRANSITIONS.values() if source in one.sources and one.target is target}
    assert found == ALLOWED.get((source, target), set())


def test_terminal_partitions_never_move_again() -> None:
    terminal = set(P) - set(LIVE_PARTITIONS)
    assert terminal == {P.COMPLETED, P.FAILED, P.STOPPED}
    assert not {source for one in TRANSITIONS.values() for source in one.sources} & terminal


def test_the_fence_grows_with_every_change_of_hands_and_with_nothing_else() -> None:
    """A settle must leave the version alone: its owner may have to repeat it when the answer was lost."""
    assert {one.name for one in TRANSITIONS.values() if one.changes_hands} == {"claim", "steal", "reassign", "abandon"}


def test_active_executions_are_those_that_are_not_over() -> None:
    over = {"COMPLETED", "FAILED", "STOPPED", "ABANDONED"}
    assert {str(status) for status in ExecutionStatus if status.is_active} == {str(s) for s in ExecutionStatus} - over
    assert all(status.is_active for status in ACTIVE_EXECUTIONS)


@pytest.mark.parametrize("status", [*PartitionStatus, *ExecutionStatus, *NodeStatus, *TransferPolicy], ids=repr)
def test_statuses_print_as_their_value(status: Any) -> None:
    """On Python 3.11 and newer a mixed-in enum would print as Class.NAME, in SQL and in logs."""
    assert f"{status}" == str(status) == status.value


# --- transfer policy ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        (True, TransferPolicy.ALWAYS),
        ("always", TransferPolicy.ALWAYS),
        (False, TransferPolicy.NEVER),
        ("never", TransferPolicy.NEVER),
        ("until_started", TransferPolicy.UNTIL_STARTED),
        *((policy, policy) for policy in TransferPolicy),
    ],
)
def test_a_transfer_policy_is_read_as_authors_write_it(value: object, policy: TransferPolicy) -> None:
    assert TransferPolicy.parse(value) is policy


@pytest.mark.parametrize("value", ["True", "yes", "", None, 2, "ALWAYS", [], "until started"])
def test_what_is_no_transfer_policy_is_named(value: object) -> None:
    with pytest.raises(ConfigurationError, match='expected transferable to be True, False or "until_started", got '):
        TransferPolicy.parse(value)


# --- identity ----------------------------------------------------------------------------------------------------

parameters = st.dictionaries(st.text("abc", max_size=3), st.integers() | st.text("xyz", max_size=3), max_size=5)


@given(parameters)
def test_a_job_key_does_not_depend_on_the_order_of_the_parameters(values: dict[str, Any]) -> None:
    backwards = dict(reversed(values.items()))
    assert JobIdentity("job", values).job_key == JobIdentity("job", backwards).job_key


@given(parameters, parameters)
def test_other_parameters_are_another_job(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (JobIdentity("job", one).job_key == JobIdentity("job", other).job_key) == (one == other)


def test_a_job_key_stays_the_same_from_release_to_release() -> None:
    """It is stored: a version that hashed otherwise would do every finished job again."""
    assert JobIdentity("job", {"run_id": "manual__1", "map_index": -1}).job_key == "08a5d0a93d73eda34b0b7564f8f1809a"


@pytest.mark.parametrize("name", ["", "x" * 251])
def test_a_job_name_has_1_to_250_characters(name: str) -> None:
    with pytest.raises(ConfigurationError, match="expected job_name to have 1 to 250 characters"):
        JobIdentity(name)
    assert JobIdentity("x" * 250).job_key


@pytest.mark.parametrize("value", [{1, 2}, object(), float("nan"), b"x", "a\x00"])
def test_parameters_that_are_not_json_are_named(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"job parameters\['bad'\]"):
        _ = JobIdentity("job", {"bad": value}).job_key


# --- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"transferable": "perhaps"}, "transferable"),
        ({"partition_retries": -1}, "partition_retries to be an integer of at least 0, got -1"),
        ({"partition_retries": True}, "partition_retries"),
        ({"partition_retries": 1.5}, "partition_retries"),
        ({"max_node_losses": 0}, "max_node_losses to be an integer of at least 1, got 0"),
        ({"retry_delay_s": -0.1}, "retry_delay_s"),
        ({"retry_delay_s": float("nan")}, "retry_delay_s"),
        ({"retry_max_delay_s": -1}, "retry_max_delay_s"),
        ({"partition_timeout_s": 0}, "partition_timeout to be a positive number of seconds, got 0"),
        ({"partition_timeout_s": -5}, "partition_timeout"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_by_name(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        JobSettings(**setting)


def test_settings_survive_being_stored() -> None:
    settings = JobSettings(
        transferable="never",
        assignment={"name": "fixed_node_count", "count": 3},
        stealing=False,
        partition_retries=4,
        retry_delay_s=0.5,
        retry_max_delay_s=9,
        max_node_losses=7,
        partition_timeout_s=60,
        fail_fast=True,
    )
    assert JobSettings.from_json(settings.to_json()) == settings
    assert JobSettings.from_json(JobSettings().to_json()) == JobSettings()


def test_of_stored_settings_only_what_cannot_be_read_is_left_at_its_default() -> None:
    """Rolling deploys: one row of a newer version must not stop every claim and every sweep of this one."""
    stored = {
        "transferable": "of the future",
        "max_node_losses": "many",
        "assignment": "a name",
        "invented_later": 1,
        "partition_retries": 4,
        "fail_fast": True,
    }
    assert JobSettings.from_json(stored) == JobSettings(partition_retries=4, fail_fast=True)
    assert JobSettings.from_json({}) == JobSettings()


# --- claims ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"attempt": 2}, {"version": 9}, {"node_id": "b"}, {"job_execution_id": 7}, {"step_execution_id": 8}]
)
def test_the_idempotency_key_is_the_same_over_attempts_owners_and_restarts(change: dict[str, Any]) -> None:
    assert a_claim(**change).idempotency_key == a_claim().idempotency_key


@pytest.mark.parametrize(
    "change", [{"partition_key": "l"}, {"generation": 2}, {"job_name": "jobk"}, {"job_key": "other"}]
)
def test_the_idempotency_key_is_another_for_other_work(change: dict[str, Any]) -> None:
    assert a_claim(**change).idempotency_key != a_claim().idempotency_key


def test_where_one_part_of_the_idempotency_key_ends_is_part_of_it() -> None:
    assert a_claim(job_name="ab", job_key="c").idempotency_key != a_claim(job_name="a", job_key="bc").idempotency_key


@pytest.mark.parametrize(("attempt", "left"), [(1, 2), (2, 1), (3, 0), (4, 0)])
def test_retries_left_are_never_negative(attempt: int, left: int) -> None:
    assert a_claim(attempt=attempt).retries_left == left


def test_counters_and_their_columns_are_one_to_one() -> None:
    counters = Counters(read=1, write=2, filter=3, skip=4, commit=5, rollback=6)
    columns = counters.as_columns()
    assert list(columns) == [f"{name}_count" for name in COUNTER_NAMES]
    assert Counters.from_columns({**columns, "other": 1}) == counters
    assert Counters.from_columns(dict.fromkeys(columns)) == Counters(), "a row without values counts nothing"


# --- nodes and progress ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", NodeStatus, ids=str)
@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"node_group": "other"}, False),
        ({"heartbeat_age_s": 10.0}, False),
        ({"heartbeat_age_s": 9.9}, True),
        ({"steps": ()}, False),
    ],
    ids=str,
)
def test_work_is_given_to_the_active_that_are_heard_and_know_the_step(
    status: NodeStatus, change: dict[str, Any], fits: bool
) -> None:
    node = replace(NodeView("a", "default", status, 1, 0, ("work",), 1.0), **change)
    expected = fits and status is NodeStatus.ACTIVE
    assert node.may_be_given("work", node_group="default", within_s=10) is expected


def test_a_node_may_be_asked_about_without_a_step() -> None:
    assert NodeView("a", "g", NodeStatus.ACTIVE, 1, 0, (), 0.0).may_be_given(None, node_group="g", within_s=10)


def test_progress_adds_up() -> None:
    counts = {P.PENDING: 1, P.CLAIMED: 2, P.COMPLETED: 3, P.FAILED: 4, P.STOPPED: 5}
    progress = Progress(1, ExecutionStatus.STARTED, False, counts)
    assert (progress.total, progress.live, progress.done) == (15, 3, 12)
    assert Progress(1, ExecutionStatus.COMPLETED, False, {}).total == 0
