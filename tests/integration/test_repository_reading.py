"""Looking: pages, counts, history and the three views."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from airflow_dbpartition.domain import ExecutionStatus, PartitionStatus
from airflow_dbpartition.repository import JobRepository, reading
from tests.scenarios import add_node, claim, claim_one, complete, fail_all, finish_all, submit


def test_results_are_read_page_by_page_each_once(repository: JobRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    add_node(repository)
    launched = submit(repository, 25)
    for taken in claim(repository, limit=25):
        complete(repository, taken, result=taken.context["number"])
    for page in (1, 5, 25, 26):
        monkeypatch.setattr(reading, "RESULT_PAGE_ROWS", page)
        results = list(repository.reading.iter_results(launched.job_execution_id))
        assert results == [(f"p{number}", number) for number in range(25)]


def test_partitions_are_read_by_status_and_in_pages(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 5)
    complete(repository, claim_one(repository))
    pending = repository.reading.partitions(launched.job_execution_id, statuses=[PartitionStatus.PENDING], limit=2)
    assert [row.partition_key for row in pending] == ["p1", "p2"]
    rest = repository.reading.partitions(launched.job_execution_id, after=pending[-1].step_execution_id)
    assert [row.partition_key for row in rest] == ["p3", "p4"]


def test_progress_counts_every_execution_in_one_look(repository: JobRepository) -> None:
    add_node(repository)
    one = submit(repository, 3, job="one").job_execution_id
    two = submit(repository, 0, job="two").job_execution_id
    complete(repository, claim_one(repository))
    claim_one(repository)
    progress = repository.reading.progress([one, two, 12345])
    assert set(progress) == {one, two}
    assert progress[one].counts == {
        PartitionStatus.COMPLETED: 1,
        PartitionStatus.CLAIMED: 1,
        PartitionStatus.PENDING: 1,
    }
    assert (progress[one].total, progress[one].done, progress[one].live) == (3, 1, 2)
    assert (progress[two].total, progress[two].status) == (0, ExecutionStatus.COMPLETED)
    assert repository.reading.progress([]) == {}
    by_node = repository.reading.running_by_node(one)
    assert by_node == {
        "a": {PartitionStatus.COMPLETED: 1, PartitionStatus.CLAIMED: 1},
        "": {PartitionStatus.PENDING: 1},
    }


def test_the_latest_execution_is_that_of_the_latest_generation(repository: JobRepository) -> None:
    add_node(repository)
    first = submit(repository, 1).job_execution_id
    second = submit(repository, 1, generation=2).job_execution_id
    fail_all(repository, first)
    restarted = repository.executions.restart(first, place=lambda work: {}).job_execution_id
    assert restarted > second
    key = repository.reading.execution(first).job_key
    latest = repository.reading.latest("job", key)
    assert latest is not None
    assert (latest.job_execution_id, latest.generation) == (second, 2)
    assert repository.reading.latest("job", "none") is None
    assert repository.reading.latest_of_instance(first).job_execution_id == restarted


@pytest.mark.parametrize("limit", [1, 2, 10])
def test_recent_is_newest_first_whatever_the_generation(repository: JobRepository, limit: int) -> None:
    add_node(repository)
    old = submit(repository, 1, job="many", generation=5).job_execution_id
    done = submit(repository, 0, job="done").job_execution_id
    new = submit(repository, 1, job="new").job_execution_id
    found = [execution.job_execution_id for execution in repository.reading.recent(limit=limit)]
    assert found == [new, done, old][:limit]
    assert [one.job_execution_id for one in repository.reading.recent(active=True)] == [new, old]
    assert [one.job_execution_id for one in repository.reading.recent(job_name="done")] == [done]


def test_events_are_read_from_where_one_left_off(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 1)
    for number in range(3):
        repository.settlements.retry(claim_one(repository), message=f"error {number}", delay_s=0)
    events = repository.reading.events(launched.job_execution_id)
    assert [event.message for event in events] == ["error 0", "error 1", "error 2"]
    assert [event.version for event in events] == [1, 2, 3]
    assert all(-1 < event.seconds_ago < 10 for event in events)
    after = repository.reading.events(launched.job_execution_id, after=events[0].event_id, limit=1)
    assert [event.event_id for event in after] == [events[1].event_id]


def test_the_three_views_answer_in_plain_sql(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 4, manager={"dag_id": "d"})
    submit(repository, 0, job="empty")
    complete(repository, claim_one(repository), write=10)
    claim_one(repository)
    repository.claims.mark_started(launched.job_execution_id)
    prefix = f'"{repository.schema}".' if repository.schema else ""
    with repository.engine.connect() as connection:

        def ask(query: str) -> list[dict[str, object]]:
            return [dict(row) for row in connection.execute(text(query.replace("FROM ", f"FROM {prefix}"))).mappings()]

        (progress, empty) = ask("SELECT * FROM batch_job_progress ORDER BY job_execution_id")
        assert (progress["partitions"], progress["completed"], progress["claimed"], progress["pending"]) == (4, 1, 1, 2)
        assert float(str(progress["per_cent"])) == 25.0
        assert float(str(progress["oldest_claim_s"])) >= 0
        assert progress["write_count"] == 10
        assert float(str(empty["per_cent"])) == 100.0
        (coordination, _) = ask("SELECT * FROM batch_job_coordination ORDER BY job_execution_id")
        assert (coordination["manager_step"], coordination["status"]) == ("work", "STARTED")
        (cluster,) = ask("SELECT * FROM batch_cluster")
        assert (cluster["node_id"], cluster["running"], cluster["running_partitions"]) == ("a", 1, "p1")
        assert float(str(cluster["heartbeat_age_s"])) < 10


def test_a_summary_is_small_json(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 3)
    assert repository.reading.summary(launched.job_execution_id).duration_s is None
    finish_all(repository, launched.job_execution_id)
    summary = repository.reading.summary(launched.job_execution_id).to_json()
    assert summary["status"] == "COMPLETED"
    assert summary["partitions"]["completed"] == 3
    assert summary["nodes"] == 1
    assert summary["duration_s"] >= 0
