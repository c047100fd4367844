"""Submitting: all or nothing, once however often it is said, and owned by the newest try."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import func, select

from airflow_dbpartition.domain import ExecutionStatus, JobIdentity, JobSettings, Partition
from airflow_dbpartition.errors import DatabaseError, InvalidPartitionError, OwnershipLostError
from airflow_dbpartition.repository import JobRepository, NewExecution
from airflow_dbpartition.repository.executions import INSERT_BATCH_ROWS
from tests.scenarios import add_node, claim, column, finish_all, partition, plan, submit


def count_rows(repository: JobRepository) -> list[int]:
    tables = repository.tables
    with repository.engine.connect() as connection:
        return [
            connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in (tables.instances, tables.executions, tables.partitions)
        ]


def test_a_plan_is_stored_with_every_field_as_it_was_given(repository: JobRepository) -> None:
    context = {"text": "ü\n'\"\\%s:x", "list": [1, 2.5, None, True], "deep": {"a": {"b": []}}, "big": 2**53}
    partitions = [
        Partition("first", context, weight=7.5, transferable=True),
        Partition("second", {}, transferable=False),
        Partition("Second", {}, transferable=None),
        Partition("\\N", {"\\.\t": "\\N\t\r\x1e\u2028🂡"}, weight=1e-300),
        Partition("a\\b\tc\nd\re", weight=1e300),
    ]
    launched = submit(repository, partitions, to={"first": "a"}, priority=3, manager={"dag_id": "d"})
    assert launched.created
    assert launched.status is ExecutionStatus.STARTING
    rows = repository.reading.partitions(launched.job_execution_id)
    assert [row.partition_key for row in rows] == [partition.key for partition in partitions]
    assert [row.context for row in rows] == [partition.context for partition in partitions]
    assert [row.weight for row in rows] == [7.5, 1.0, 1.0, 1e-300, 1e300]
    assert [row.assigned_node for row in rows] == ["a", *[None] * 4]
    until_started = "until_started"
    policies = ["always", "never", until_started, until_started, until_started]
    assert column(repository, launched.job_execution_id, "transfer_policy") == policies
    assert column(repository, launched.job_execution_id, "is_transferable") == [1, 0, 1, 1, 1]
    assert column(repository, launched.job_execution_id, "priority") == [3] * 5
    execution = repository.reading.execution(launched.job_execution_id)
    assert execution.manager == {"dag_id": "d"}
    assert execution.settings == JobSettings()
    assert execution.create_time.tzinfo is not None


def test_fifty_thousand_partitions_are_planned_at_once(repository: JobRepository) -> None:
    launched = submit(repository, 50_000)
    assert count_rows(repository)[2] == 50_000
    assert repository.reading.progress([launched.job_execution_id])[launched.job_execution_id].total == 50_000


def test_contexts_of_a_mebibyte_each_are_planned_too(repository: JobRepository) -> None:
    partitions = [Partition(f"p{number}", {"text": "x" * (1024 * 1024 - 50)}) for number in range(40)]
    launched = submit(repository, partitions)
    assert len(partition(repository, launched.job_execution_id, "p39").context["text"]) == 1024 * 1024 - 50


def test_a_plan_that_breaks_off_in_the_middle_leaves_nothing(repository: JobRepository) -> None:
    class Dies(dict[str, str | None]):
        """A placement whose process dies when the third batch is about to be written."""

        def get(self, key: str, default: object = None) -> None:
            if key == "p4500":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        submit(repository, 5000, to=Dies())
    assert count_rows(repository) == [0, 0, 0]


def test_a_plan_with_a_duplicate_key_names_it_and_leaves_nothing(repository: JobRepository) -> None:
    with pytest.raises(InvalidPartitionError, match="partition key 'p7' comes more than once"):
        submit(repository, [*plan(2500), Partition("p7")], to={})
    assert count_rows(repository) == [0, 0, 0]


def test_partitions_are_dealt_in_turn_where_only_nodes_are_named(repository: JobRepository) -> None:
    new = NewExecution(identity=JobIdentity("job", {}), step_name="step")
    many = 2 * INSERT_BATCH_ROWS + 3
    job = repository.executions.submit(new, plan(many), ["a", "b", "c"]).job_execution_id
    owners = dict(zip(column(repository, job, "partition_key"), column(repository, job, "assigned_node"), strict=True))
    assert owners == {f"p{number}": "abc"[number % 3] for number in range(many)}


def test_a_second_submit_attaches_to_the_first_execution(repository: JobRepository) -> None:
    first = submit(repository, 3, owner_token="one")
    second = submit(repository, 5, owner_token="two")
    assert second.job_execution_id == first.job_execution_id
    assert not second.created
    assert count_rows(repository) == [1, 1, 3]


def test_a_submit_that_is_repeated_by_the_same_try_says_created_again(repository: JobRepository) -> None:
    first = submit(repository, 3, owner_token="one")
    again = submit(repository, 3, owner_token="one")
    assert again == first


def test_other_parameters_or_another_generation_are_another_instance(repository: JobRepository) -> None:
    ids = {
        submit(repository, parameters={"day": 1}).job_execution_id,
        submit(repository, parameters={"day": 2}).job_execution_id,
        submit(repository, parameters={"day": 1}, generation=2).job_execution_id,
        submit(repository, job="JOB", parameters={"day": 1}).job_execution_id,
    }
    assert len(ids) == 4


def test_submitting_a_job_that_is_done_returns_it_and_runs_nothing(repository: JobRepository) -> None:
    add_node(repository)
    first = submit(repository, 1)
    finish_all(repository, first.job_execution_id)
    again = submit(repository, 1, owner_token="new")
    assert again.job_execution_id == first.job_execution_id
    assert again.status is ExecutionStatus.COMPLETED
    assert not again.created
    assert claim(repository) == []


def test_zero_partitions_are_completed_at_once(repository: JobRepository) -> None:
    launched = submit(repository, 0)
    assert launched.status is ExecutionStatus.COMPLETED
    execution = repository.reading.execution(launched.job_execution_id)
    assert execution.status is ExecutionStatus.COMPLETED
    assert execution.end_time is not None
    assert repository.executions.finalise(launched.job_execution_id) is ExecutionStatus.COMPLETED
    assert repository.reading.summary(launched.job_execution_id).counts["total"] == 0


def test_who_attaches_owns_and_the_owner_before_is_not_heard_any_more(repository: JobRepository) -> None:
    launched = submit(repository, 1, owner_token="old")
    status = repository.executions.attach(launched.job_execution_id, owner_token="new", manager={"try": 2})
    assert status is ExecutionStatus.STARTING
    assert repository.reading.execution(launched.job_execution_id).manager == {"try": 2}
    with pytest.raises(OwnershipLostError, match="newer try"):
        repository.executions.stop(launched.job_execution_id, owner_token="old", reason="on_kill")
    assert repository.reading.execution(launched.job_execution_id).status is ExecutionStatus.STARTING
    assert repository.executions.stop(launched.job_execution_id, owner_token="new", reason="on_kill") is (
        ExecutionStatus.STOPPED
    )


def test_who_attaches_without_a_token_takes_nothing_from_the_owner(repository: JobRepository) -> None:
    launched = submit(repository, 1, owner_token="owner")
    submit(repository, 1)
    assert repository.reading.execution(launched.job_execution_id).owner_token == "owner"


def test_the_deadline_is_a_moment_by_the_databases_clock(repository: JobRepository) -> None:
    late = submit(repository, 1, job="late", timeout_s=0.001).job_execution_id
    early = submit(repository, 1, job="early", timeout_s=3600).job_execution_id
    never = submit(repository, 1, job="never").job_execution_id
    time.sleep(0.02)
    progress = repository.reading.progress([late, early, never, 987654])
    assert {key: value.deadline_passed for key, value in progress.items()} == {late: True, early: False, never: False}


def test_a_job_key_does_not_depend_on_the_order_of_parameters(repository: JobRepository) -> None:
    one = submit(repository, parameters={"a": {"x": 1, "y": 2}, "b": 1})
    two = submit(repository, parameters={"b": 1, "a": {"y": 2, "x": 1}})
    assert one.job_execution_id == two.job_execution_id
    found = repository.reading.latest("job", JobIdentity("job", {"b": 1, "a": {"x": 1, "y": 2}}).job_key)
    assert found is not None
    assert found.job_execution_id == one.job_execution_id


def test_what_the_database_refuses_is_one_line_of_ours_and_no_rows(repository: JobRepository) -> None:
    if repository.engine.dialect.name == "sqlite":
        pytest.skip("SQLite stores text of any length")
    with pytest.raises(DatabaseError) as raised:
        submit(repository, [Partition("k" * 201)])
    assert "\n" not in str(raised.value)
    assert count_rows(repository) == [0, 0, 0]
