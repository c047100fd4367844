"""What one look at the database says of an execution: the same for the poke, the reschedule and the resumed task."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from airflow_dbpartition.config import Timings
from airflow_dbpartition.dialects import db_later
from airflow_dbpartition.domain import JobSettings, Partition
from airflow_dbpartition.errors import JobExecutionNotFoundError
from airflow_dbpartition.recovery import Continuity
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.storable import dump_json
from airflow_dbpartition.waiting import Outcome, Verdict, look, sweep
from tests.scenarios import (
    STEP,
    add_node,
    claim,
    claim_one,
    complete,
    fail_all,
    finish_all,
    remove,
    silence,
    statuses,
    submit,
    to_nobody,
)


def age_execution(repository: JobRepository, job_execution_id: int, seconds: float) -> None:
    """Let the execution have been written so long ago."""
    e = repository.tables.executions
    with repository.engine.begin() as connection:
        connection.execute(
            update(e).where(e.c.job_execution_id == job_execution_id).values(create_time=db_later(-seconds))
        )


def verdict(repository: JobRepository, job_execution_id: int, no_nodes_timeout_s: float | None = None) -> Verdict:
    return look(repository, job_execution_id, no_nodes_timeout_s=no_nodes_timeout_s)


def test_while_work_is_left_the_wait_goes_on_and_says_how_far_it_is(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 4)
    complete(repository, claim(repository, limit=2)[0])

    found = verdict(repository, launched.job_execution_id)
    assert found.outcome is Outcome.WAITING
    assert not found.is_final
    assert found.message == f"job execution {launched.job_execution_id}: 1/4 partitions done, 1 running, 2 waiting"
    assert found.summary is None


def test_the_summary_has_counts_and_sums_and_no_partition(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 2)
    for taken in claim(repository, limit=2):
        complete(repository, taken, write=5, skip=1, result={"secret": "not here"})
    repository.executions.finalise(launched.job_execution_id)

    found = verdict(repository, launched.job_execution_id)
    assert found.outcome is Outcome.COMPLETED
    assert found.summary is not None
    assert found.summary["partitions"]["completed"] == 2
    assert found.summary["counters"]["write"] == 10
    assert "secret" not in dump_json(found.summary)


def test_no_partitions_are_a_success(repository: JobRepository) -> None:
    launched = submit(repository, 0)
    assert verdict(repository, launched.job_execution_id).outcome is Outcome.COMPLETED


def test_a_failure_names_the_first_ten_partitions_with_node_attempt_and_the_end_of_the_error(
    repository: JobRepository,
) -> None:
    add_node(repository)
    launched = submit(repository, 12)
    fail_all(repository, launched.job_execution_id, message="Traceback\n  line 1\n  line 2\nValueError: bad row")

    found = verdict(repository, launched.job_execution_id)
    assert found.outcome is Outcome.FAILED
    lines = found.message.splitlines()
    assert lines[0] == f"job execution {launched.job_execution_id} (job) FAILED: 12 of 12 partitions failed"
    assert found.message.count("ValueError: bad row") == 10
    assert "  p0 on a (attempt 1): " in found.message
    assert "p10" not in found.message
    assert lines[-2] == "  and 2 more"
    assert f"`dbpartition job {launched.job_execution_id}`" in lines[-1], "the next act"


def test_the_end_of_a_very_long_error_is_kept_short(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 10)
    fail_all(repository, launched.job_execution_id, message="x" * 7_000 + " the end")

    message = verdict(repository, launched.job_execution_id).message
    assert message.count("the end") == 10
    assert len(message) < 6_000


def test_a_stop_says_why(repository: JobRepository) -> None:
    launched = submit(repository, 2)
    repository.executions.stop(launched.job_execution_id, reason="somebody changed their mind")

    found = verdict(repository, launched.job_execution_id)
    assert found.outcome is Outcome.STOPPED
    assert "was stopped (somebody changed their mind)" in found.message


def test_an_abandoned_execution_is_final(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 1)
    fail_all(repository, launched.job_execution_id)
    repository.executions.abandon(launched.job_execution_id)
    assert verdict(repository, launched.job_execution_id).outcome is Outcome.ABANDONED


def test_a_restart_is_followed_whichever_execution_is_asked_for(repository: JobRepository) -> None:
    add_node(repository)
    first = submit(repository, 2)
    complete(repository, claim_one(repository))
    fail_all(repository, first.job_execution_id)
    second = repository.executions.restart(first.job_execution_id, place=to_nobody)

    found = verdict(repository, first.job_execution_id)
    assert (found.outcome, found.job_execution_id) == (Outcome.WAITING, second.job_execution_id)
    finish_all(repository, second.job_execution_id)
    found = verdict(repository, first.job_execution_id)
    assert (found.outcome, found.job_execution_id) == (Outcome.COMPLETED, second.job_execution_id)
    assert found.summary is not None
    assert found.summary["partitions"]["completed"] == 2


def test_an_execution_that_is_not_there_is_an_error(repository: JobRepository) -> None:
    with pytest.raises(JobExecutionNotFoundError, match="there is no job execution 4711"):
        verdict(repository, 4711)


def test_past_its_deadline_an_execution_is_late_but_a_finished_one_is_not(repository: JobRepository) -> None:
    add_node(repository)
    late = submit(repository, 1, timeout_s=-1.0)
    assert verdict(repository, late.job_execution_id).outcome is Outcome.LATE
    finish_all(repository, late.job_execution_id)
    assert verdict(repository, late.job_execution_id).outcome is Outcome.COMPLETED


def test_completed_is_not_believed_while_a_partition_is_not(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 2)
    complete(repository, claim_one(repository))
    e = repository.tables.executions
    with repository.engine.begin() as connection:  # as somebody with a SQL prompt might
        connection.execute(update(e).values(status="COMPLETED", active_instance_id=None))

    found = verdict(repository, launched.job_execution_id)
    assert found.outcome is Outcome.FAILED
    assert "marked COMPLETED, but its partitions are not" in found.message


def test_without_any_node_the_wait_is_given_up_only_after_the_patience(repository: JobRepository) -> None:
    launched = submit(repository, 1)
    assert verdict(repository, launched.job_execution_id, 60).outcome is Outcome.WAITING
    age_execution(repository, launched.job_execution_id, 90)
    assert verdict(repository, launched.job_execution_id).outcome is Outcome.WAITING  # nobody asked to give up

    found = verdict(repository, launched.job_execution_id, 60)
    assert found.outcome is Outcome.NO_NODES
    assert "no live node of group 'default' with the step 'work' for 60 s: start workers" in found.message
    assert statuses(repository, launched.job_execution_id) == {"PENDING": 1}


def test_a_node_that_can_do_the_work_keeps_the_wait_alive(repository: JobRepository) -> None:
    launched = submit(repository, 1)
    age_execution(repository, launched.job_execution_id, 90)
    add_node(repository, "elsewhere", node_group="other")
    add_node(repository, "ignorant", steps=("another",))
    found = verdict(repository, launched.job_execution_id, 60)
    assert found.outcome is Outcome.NO_NODES
    assert "the 1 live node(s) of the group do not know the step" in found.message

    add_node(repository, "able")
    assert verdict(repository, launched.job_execution_id, 60).outcome is Outcome.WAITING
    silence(repository, "able", 30)
    assert verdict(repository, launched.job_execution_id, 60).outcome is Outcome.WAITING
    silence(repository, "able", 61)
    assert verdict(repository, launched.job_execution_id, 60).outcome is Outcome.NO_NODES


def test_the_silence_is_counted_from_the_last_node_that_has_gone(repository: JobRepository) -> None:
    launched = submit(repository, 1)
    age_execution(repository, launched.job_execution_id, 900)
    add_node(repository, "gone")
    remove(repository, "gone")
    assert verdict(repository, launched.job_execution_id, 60).outcome is Outcome.WAITING


def test_a_sweep_ends_what_nobody_else_is_there_to_end(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 1)
    complete(repository, claim_one(repository))  # and its worker dies before it ends the execution
    assert verdict(repository, launched.job_execution_id).outcome is Outcome.WAITING

    sweep(repository, Timings())
    assert verdict(repository, launched.job_execution_id).outcome is Outcome.COMPLETED


def test_a_manager_judges_nodes_only_after_an_unbroken_presence(repository: JobRepository) -> None:
    add_node(repository)
    submit(repository, [Partition("p0", {}, transferable=True)], settings=JobSettings(), to="a")
    silence(repository, "a", 1000)
    clock = [0.0]
    timings = Timings(heartbeat_s=1, unreachable_after_s=3, remove_after_s=6)
    continuity = Continuity(timings, clock=lambda: clock[0])

    for moment in (0.0, 2.0, 4.0, 5.9):
        clock[0] = moment
        sweep(repository, timings, continuity)
        assert [node.node_id for node in repository.nodes.all(node_group="default")] == ["a"], moment
    clock[0] = 6.5
    sweep(repository, timings, continuity)
    sweep(repository, timings, continuity)
    assert repository.nodes.live(node_group="default", within_s=3) == []
    assert [node.node_id for node in repository.nodes.all(node_group="default")] == []
    assert claim(repository, add_node(repository, "b"), steps=(STEP,))
