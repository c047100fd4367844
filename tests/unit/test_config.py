"""Settings that refuse what cannot work, and the environment that feeds them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_dbpartition.config import DatabaseConfig, Timings, WorkerConfig, environment, positive
from airflow_dbpartition.errors import ConfigurationError


@pytest.mark.parametrize("value", [0, -1, -0.5, math.nan, math.inf, -math.inf, True, "3", None])
def test_what_is_no_positive_number_is_named_with_its_value(value: Any) -> None:
    with pytest.raises(ConfigurationError) as raised:
        positive("heartbeat_s", value)
    assert str(raised.value) == f"expected heartbeat_s to be a positive number, got {value!r}"


def test_a_positive_number_comes_back_as_it_is() -> None:
    assert positive("x", 0.001) == 0.001
    assert positive("x", 3) == 3


# --- environment -------------------------------------------------------------------------------------------------


def test_an_empty_variable_is_no_variable() -> None:
    source = {"DBPARTITION_SCHEMA": "", "SCHEMA": "x", "DBPARTITION_DATABASE_URL": "sqlite://"}
    assert environment("SCHEMA", source) is None
    assert environment("DATABASE_URL", source) == "sqlite://"
    assert environment("NODE_GROUP", source) is None


def test_the_database_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBPARTITION_DATABASE_URL", "postgresql://h/d")
    monkeypatch.setenv("DBPARTITION_SCHEMA", "batch")
    config = DatabaseConfig.from_environment()
    assert (config.url, config.schema) == ("postgresql://h/d", "batch")
    monkeypatch.delenv("DBPARTITION_DATABASE_URL")
    with pytest.raises(ConfigurationError, match="no database URL: set DBPARTITION_DATABASE_URL or pass"):
        DatabaseConfig.from_environment()


@pytest.mark.parametrize("name", ["connect_timeout_s", "statement_timeout_s", "lock_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, math.inf])
def test_waits_for_the_database_have_an_end(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"expected {name} to be a positive number, got {value!r}"):
        DatabaseConfig(**{"url": "sqlite://", name: value})  # type: ignore[arg-type]


def test_only_a_statement_may_be_without_limit() -> None:
    """Users' own transactions take as long as they take."""
    assert DatabaseConfig(url="sqlite://", statement_timeout_s=None).statement_timeout_s is None


@pytest.mark.parametrize("size", [-1, -10])
def test_a_pool_is_not_smaller_than_nothing(size: int) -> None:
    with pytest.raises(ConfigurationError, match="expected pool_size to be at least 0"):
        DatabaseConfig(url="sqlite://", pool_size=size)


# --- the clockwork -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"heartbeat_s": 4}, "expected unreachable_after to be at least 3 x heartbeat (12 s), got 10 s"),
        ({"unreachable_after_s": 8.9}, "expected unreachable_after to be at least 3 x heartbeat (9 s), got 8.9 s"),
        ({"remove_after_s": 10}, "expected remove_after to be more than unreachable_after (10 s), got 10 s"),
        ({"remove_after_s": 9}, "expected remove_after to be more than unreachable_after"),
        ({"fence_margin_s": 30}, "expected fence_margin to be between 0 and remove_after (30 s), got 30 s"),
        ({"fence_margin_s": 0}, "expected fence_margin"),
        ({"fence_margin_s": -1}, "expected fence_margin"),
        *(
            ({name: 0}, f"expected {name} to be a positive number, got 0")
            for name in ("heartbeat_s", "unreachable_after_s", "remove_after_s", "sweep_s", "poll_s", "steal_after_s")
        ),
    ],
    ids=str,
)
def test_a_clockwork_that_would_evict_the_living_is_refused(setting: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Timings(**setting)
    assert str(raised.value).startswith(words)


def test_the_smallest_clockwork_that_can_work_is_taken() -> None:
    assert Timings(heartbeat_s=1, unreachable_after_s=3, remove_after_s=3.1).fence_after_s > 3


seconds = st.floats(0.01, 1000)


@given(seconds, seconds, seconds)
def test_a_node_always_ends_its_own_work_before_anybody_may_run_it_again(
    heartbeat_s: float, unreachable_after_s: float, remove_after_s: float
) -> None:
    try:
        timings = Timings(
            heartbeat_s=heartbeat_s, unreachable_after_s=unreachable_after_s, remove_after_s=remove_after_s
        )
    except ConfigurationError:
        assert unreachable_after_s < 3 * heartbeat_s or remove_after_s <= unreachable_after_s
        return
    assert unreachable_after_s <= timings.fence_after_s <= remove_after_s
    assert 3 * timings.heartbeat_s <= timings.unreachable_after_s < timings.remove_after_s


# --- the worker --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"concurrency": 0}, "expected concurrency to be an integer of at least 1, got 0"),
        ({"concurrency": -3}, "expected concurrency"),
        ({"concurrency": True}, "expected concurrency"),
        ({"concurrency": 1.5}, "expected concurrency"),
        ({"prefetch": -1}, "expected prefetch to be at least 0, got -1"),
        ({"executor": "greenlet"}, 'expected executor to be "process" or "thread", got \'greenlet\''),
        ({"node_group": ""}, "expected node_group to have 1 to 100 characters, got ''"),
        ({"node_group": "x" * 101}, "expected node_group"),
        ({"node_prefix": ""}, "expected node_prefix to have 1 to 150 characters, got ''"),
        ({"node_prefix": "x" * 151}, "expected node_prefix"),
        ({"grace_s": -1}, "expected grace_s to be a number of at least 0, got -1"),
        ({"grace_s": math.nan}, "expected grace_s"),
        ({"stop_grace_s": -1}, "expected stop_grace_s"),
        ({"idle_timeout_s": math.inf}, "expected idle_timeout_s"),
        ({"max_partitions_per_child": 0}, "expected max_partitions_per_child to be at least 1, got 0"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_worker_that_cannot_work_is_refused_by_name(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        WorkerConfig(**setting)
    assert str(raised.value).startswith(words)


def test_nothing_at_all_is_a_worker() -> None:
    config = WorkerConfig(concurrency=1, prefetch=0, grace_s=0, idle_timeout_s=0, node_group="x" * 100)
    assert config.timings == Timings()
