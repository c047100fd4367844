"""The nightly batch on real workers, PostgreSQL and moto's server: what is published, marked, and published twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.engine import make_url

pytest.importorskip("boto3")
pytest.importorskip("moto")

from airflow_dbpartition.demo.processes import Guard
from airflow_dbpartition.demo.records import make_records, records
from airflow_dbpartition.domain import JobSettings
from airflow_dbpartition.partitioners import ColumnRangePartitioner, StandaloneEnvironment, collect_partitions
from airflow_dbpartition.repository import JobRepository
from tests.databases import Database, run_sql
from tests.worker.processes import QUICK, Fleet, Job, Node, wait_until
from tests.worker.sns import MotoServer, Refused, SnsProxy, Topic, moto_server

STEPS = "airflow_dbpartition.demo.publishing"
DAY = date(2026, 11, 2)
CHUNK = 50  # five calls of PublishBatch
AT_LEAST_ONCE = JobSettings(transferable="always", partition_retries=20, retry_delay_s=0.1, retry_max_delay_s=0.3)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory, guard: Guard) -> Iterator[MotoServer]:
    with moto_server(tmp_path_factory.mktemp("moto"), guard) as server:
        yield server


class Batch:
    """Pending records, a topic, SNS behind a proxy, and workers that know the step."""

    def __init__(self, fleet: Fleet, topic: Topic, proxy: SnsProxy) -> None:
        self.fleet = fleet
        self.topic = topic
        self.sns = proxy
        self._engine = fleet.repository.engine

    def fill(self, count: int, changes: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        make_records(self._engine, DAY, count, changes=changes)

    def start(self, name: str = "node", **options: Any) -> Node:
        return self.fleet.start(name, imports=STEPS, environment=self.sns.environment, **options)

    def submit(
        self, partitions: int = 1, *, settings: JobSettings = AT_LEAST_ONCE, topic_arn: str | None = None, **more: Any
    ) -> Job:
        partitioner = ColumnRangePartitioner(
            table="records",
            column="id",
            where=f"status = 'PENDING' AND reference_date = '{DAY}'",
            balanced=True,
            context={
                "reference_date": DAY,
                "topic_arn": topic_arn or self.topic.arn,
                "chunk_size": CHUNK,
                **more,
            },
        )
        planned = collect_partitions(
            partitioner,
            grid_size=partitions,
            environment=StandaloneEnvironment(self._engine),
            default_transferable=settings.transferable,
        )
        assert len(planned) == partitions
        return self.fleet.submit(planned, step="publish_pending_records", settings=settings)

    def marks(self) -> dict[str, int]:
        """How many records there are of each status."""
        query = select(records.c.status, func.count()).group_by(records.c.status)
        with self._engine.connect() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def ids(self, status: str = "PUBLISHED") -> set[str]:
        """The message ids of the records that have the status."""
        query = select(records.c.id, records.c.reference_date).where(records.c.status == status)
        with self._engine.connect() as connection:
            return {f"record-{row.reference_date}-{row.id}" for row in connection.execute(query)}

    def reasons(self) -> Counter[str]:
        query = select(records.c.reason).where(records.c.reason.is_not(None))
        with self._engine.connect() as connection:
            return Counter(connection.execute(query).scalars())

    def told(self, job: Job) -> dict[str, int]:
        """The summed results of the partitions, which the counters have to confirm."""
        rows = list(job.partitions().values())
        total = {name: sum(row.result[name] for row in rows) for name in ("PUBLISHED", "INVALID", "REFUSED")}
        assert sum(row.counters.write for row in rows) == total["PUBLISHED"]
        assert sum(row.counters.skip for row in rows) == total["INVALID"] + total["REFUSED"]
        return total


@pytest.fixture
def batch(
    postgres: Database, tmp_path: Path, guard: Guard, moto: MotoServer, request: pytest.FixtureRequest
) -> Iterator[Batch]:
    # The records are found by their plain name, as the job repository's tables are not.
    url = make_url(postgres.url).update_query_dict({"options": f"-csearch_path={postgres.schema}"})
    database = replace(postgres, url=url.render_as_string(hide_password=False))
    repository: JobRepository = database.migrated()
    with SnsProxy(moto) as proxy, Fleet(database, repository, tmp_path, guard, QUICK) as fleet:
        yield Batch(fleet, moto.topic(str(postgres.schema)), proxy)
    repository.close()


def once_each(ids: set[str]) -> dict[str, int]:
    return dict.fromkeys(ids, 1)


# --- all is well ---------------------------------------------------------------------------------------------------


def test_every_valid_pending_record_of_the_date_is_published_once_and_marked(batch: Batch) -> None:
    batch.fill(
        200,
        {
            3: {"reference_date": date(2026, 11, 1)},
            7: {"status": "PUBLISHED"},
            50: {"account": " "},
            51: {"cents": 0},
            52: {"currency": "euro"},
            53: {"memo": "x" * 300_000},
            199: {"cents": -5},
        },
    )
    already = batch.ids()
    batch.start("one")
    batch.start("two")
    job = batch.submit(2)  # of two chunks each

    assert job.ends() == "COMPLETED"
    assert batch.marks() == {"PENDING": 1, "PUBLISHED": 194, "INVALID": 5}
    assert batch.told(job) == {"PUBLISHED": 193, "INVALID": 5, "REFUSED": 0}
    assert batch.topic.counted() == once_each(batch.ids() - already)
    assert {reason.split(" bytes")[0].rstrip("0123456789") for reason in batch.reasons()} == {
        "no account",
        "0 cents is no amount",
        "-5 cents is no amount",
        "'euro' is no currency",
        "its message has ",
    }
    assert sum(len(call.sent) for call in batch.sns.calls) == 193
    assert len(batch.sns.calls) <= 193 / 10 + 4  # full calls, but for the last of each chunk


def test_a_message_says_what_the_record_says(batch: Batch) -> None:
    batch.fill(1, {0: {"account": "Zoë & <Søn> \U0001f6eb", "memo": "tab\tnl\n\x01\x7f", "cents": 2**40}})
    batch.start()
    assert batch.submit().ends() == "COMPLETED"
    (message,) = batch.topic.receive()
    record_id = message["record_id"]
    assert message == {
        "message_id": f"record-2026-11-02-{record_id}",
        "record_id": record_id,
        "reference_date": "2026-11-02",
        "account": "Zoë & <Søn> \U0001f6eb",
        "cents": 2**40,
        "currency": "EUR",
        "memo": "tab\tnl\n\x01\x7f",
    }


def test_large_messages_are_spread_over_calls_that_sns_takes(batch: Batch) -> None:
    batch.fill(12, {number: {"memo": "x" * 100_000} for number in range(12)})
    batch.start()
    assert batch.submit().ends() == "COMPLETED"
    assert batch.marks() == {"PUBLISHED": 12}
    assert [len(call.sent) for call in batch.sns.calls] == [2] * 6
    assert batch.topic.counted() == once_each(batch.ids())


# --- entries that are refused --------------------------------------------------------------------------------------


def refusing(code: str, *, fault: bool, every: int) -> Any:
    def refuse(body: Mapping[str, Any]) -> Refused | None:
        return Refused(code, fault) if body["cents"] % every == 0 else None

    return refuse


def test_a_message_that_is_refused_for_its_own_sake_is_marked_with_the_code_and_not_sent_again(batch: Batch) -> None:
    batch.fill(100)
    batch.sns.refuse = refusing("InvalidParameter", fault=True, every=25)
    batch.start()
    job = batch.submit()

    assert job.ends() == "COMPLETED"
    assert batch.marks() == {"PUBLISHED": 96, "REFUSED": 4}
    assert batch.told(job) == {"PUBLISHED": 96, "INVALID": 0, "REFUSED": 4}
    assert batch.reasons() == {"InvalidParameter: the test says so": 4}
    assert batch.topic.counted() == once_each(batch.ids())
    assert Counter(id_ for call in batch.sns.calls for id_ in call.sent) == once_each(
        batch.ids() | batch.ids("REFUSED")
    )


def test_entries_that_sns_could_not_take_are_sent_again_and_only_they(batch: Batch) -> None:
    batch.fill(100)
    seen: Counter[str] = Counter()

    def twice_unwell(body: Mapping[str, Any]) -> Refused | None:
        seen[body["message_id"]] += 1
        return Refused("InternalError", False) if body["cents"] % 25 == 0 and seen[body["message_id"]] < 3 else None

    batch.sns.refuse = twice_unwell
    batch.start()
    job = batch.submit()

    assert job.ends() == "COMPLETED"
    assert job.events() == []  # the partition was tried once
    assert batch.told(job) == {"PUBLISHED": 100, "INVALID": 0, "REFUSED": 0}
    assert batch.topic.counted() == once_each(batch.ids())
    assert Counter(seen.values()) == {1: 96, 3: 4}


@pytest.mark.resilience_long
def test_an_entry_that_sns_never_takes_fails_the_partition_and_marks_nothing_of_its_chunk(batch: Batch) -> None:
    batch.fill(120)
    unwell = {"record": 77}
    batch.sns.refuse = lambda body: Refused("InternalError", False) if body["cents"] == 100 + unwell["record"] else None
    batch.start()
    job = batch.submit(settings=replace(AT_LEAST_ONCE, partition_retries=1))

    assert job.ends() == "FAILED"
    assert batch.marks() == {"PUBLISHED": 50, "PENDING": 70}
    message = str(job.partition("partition0").exit_message)
    assert "PublishError: 1 of 10 messages were not published in 6 tries: InternalError: the test says so" in message

    unwell["record"] = -1
    assert batch.submit().ends() == "COMPLETED"
    assert batch.marks() == {"PUBLISHED": 120}
    counted = batch.topic.counted()
    assert set(counted) == batch.ids()
    assert sum(counted.values()) - 120 == 2 * 29  # what had been taken of that chunk, by two attempts


def test_what_is_not_the_messages_fault_marks_no_message(batch: Batch) -> None:
    batch.fill(30)
    batch.sns.refuse = refusing("KMSAccessDenied", fault=True, every=1)
    batch.start()
    job = batch.submit(settings=replace(AT_LEAST_ONCE, partition_retries=0))
    assert job.ends() == "FAILED"
    assert batch.marks() == {"PENDING": 30}
    assert "the message is not to blame: KMSAccessDenied" in str(job.partition("partition0").exit_message)


def test_more_refused_messages_than_may_be_fail_the_partition(batch: Batch) -> None:
    batch.fill(100)
    batch.sns.refuse = refusing("InvalidParameter", fault=True, every=10)  # one of each call, ten in all
    batch.start()
    job = batch.submit(settings=replace(AT_LEAST_ONCE, partition_retries=0), refusal_limit=7)
    assert job.ends() == "FAILED"
    assert "SNS refused 3 messages, where 2 may still be refused" in str(job.partition("partition0").exit_message)
    assert batch.marks() == {"PUBLISHED": 45, "REFUSED": 5, "PENDING": 50}

    assert batch.submit(refusal_limit=5).ends() == "COMPLETED"
    assert batch.marks() == {"PUBLISHED": 90, "REFUSED": 10}


# --- outages -------------------------------------------------------------------------------------------------------


def check_nothing_was_lost(batch: Batch, job: Job, count: int, *, attempts_that_failed: int) -> Counter[str]:
    """All is published and marked, none skipped, and no more than a chunk came twice for each failed attempt."""
    assert job.ends() == "COMPLETED"
    assert batch.marks() == {"PUBLISHED": count}
    assert batch.told(job) == {"PUBLISHED": count, "INVALID": 0, "REFUSED": 0}
    counted = batch.topic.counted()
    assert set(counted) == batch.ids()
    assert sum(counted.values()) - count <= CHUNK * attempts_that_failed
    return counted


def test_an_outage_in_the_middle_skips_nothing(batch: Batch) -> None:
    batch.fill(200)
    batch.sns.answer_with(503, from_call=8)  # in the middle of the second chunk
    batch.start()
    job = batch.submit()
    wait_until(lambda: job.events().count("retried") >= 2, "two attempts have failed", logs=batch.fleet.log_paths)
    assert batch.marks() == {"PUBLISHED": 50, "PENDING": 150}
    batch.sns.answer_with(None)

    failed = job.events().count("retried")
    counted = check_nothing_was_lost(batch, job, 200, attempts_that_failed=failed)
    assert sum(counted.values()) - 200 == 30  # three calls had been taken of that chunk; later attempts got nothing out
    assert {call.answered for call in batch.sns.calls} == {200, 503}


def test_a_short_outage_costs_no_attempt(batch: Batch) -> None:
    batch.fill(100)
    batch.sns.answer_with(503, from_call=3)
    batch.start()
    job = batch.submit()
    batch.sns.wait_for_answers(503, times=2)
    batch.sns.answer_with(None)
    counted = check_nothing_was_lost(batch, job, 100, attempts_that_failed=0)
    assert set(counted.values()) == {1}
    assert job.events() == []


@pytest.mark.resilience_long
def test_connections_that_are_refused_in_the_middle_skip_nothing(batch: Batch) -> None:
    batch.fill(200)
    batch.sns.hold_answers_of(7)
    batch.start()
    job = batch.submit()
    batch.sns.wait_until_held(7)
    batch.sns.stop_listening()
    batch.sns.let_go(7)
    wait_until(lambda: job.events().count("retried") >= 1, "an attempt has failed", logs=batch.fleet.log_paths)
    assert batch.marks() == {"PUBLISHED": 50, "PENDING": 150}
    batch.sns.listen()

    check_nothing_was_lost(batch, job, 200, attempts_that_failed=job.events().count("retried"))
    assert "Could not connect to the endpoint URL" in batch.fleet.nodes[0].log


def test_a_topic_that_does_not_exist_fails_at_once_and_marks_nothing(batch: Batch) -> None:
    batch.fill(20)
    batch.start()
    job = batch.submit(
        settings=replace(AT_LEAST_ONCE, partition_retries=0), topic_arn=f"{batch.topic.arn}-of-somebody-else"
    )
    assert job.ends() == "FAILED"
    assert batch.marks() == {"PENDING": 20}
    assert "not published in one try" in str(job.partition("partition0").exit_message)
    assert len(batch.sns.calls) == 1


# --- deaths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("killed_at", "twice"),
    [
        pytest.param([14], 50, id="after the last call of the third chunk"),
        pytest.param([1, 6], 20 + 50, id="twice in the first chunk", marks=pytest.mark.resilience_long),
    ],
)
def test_a_worker_that_is_killed_between_publishing_and_commit_publishes_no_more_than_its_chunk_twice(
    batch: Batch, killed_at: list[int], twice: int
) -> None:
    batch.fill(200)
    batch.sns.hold_answers_of(*killed_at)
    node = batch.start("node-0")
    job = batch.submit()
    for life, call in enumerate(killed_at, start=1):
        batch.sns.wait_until_held(call)
        node.process.kill()
        batch.sns.let_go(call)
        node = batch.start(f"node-{life}")

    assert job.ends() == "COMPLETED"
    assert job.partition("partition0").node_losses == len(killed_at)
    assert batch.marks() == {"PUBLISHED": 200}
    assert batch.told(job) == {"PUBLISHED": 200, "INVALID": 0, "REFUSED": 0}
    counted = batch.topic.counted()
    assert set(counted) == batch.ids()  # nothing lost; who drops known ids has each record once
    assert sum(counted.values()) - 200 == twice
    assert twice <= CHUNK * len(killed_at)


@pytest.mark.resilience_long
def test_on_a_fifo_topic_sns_itself_drops_what_is_published_twice(batch: Batch, moto: MotoServer) -> None:
    topic = moto.topic("ordered", fifo=True)
    batch.fill(30)
    batch.sns.hold_answers_of(1)
    node = batch.start("node-0")
    job = batch.submit(topic_arn=topic.arn)
    batch.sns.wait_until_held(1)
    node.process.kill()
    batch.sns.let_go(1)
    batch.start("node-1")

    assert job.ends() == "COMPLETED"
    assert sum(len(call.passed) for call in batch.sns.calls) == 20 + 30
    assert topic.counted() == once_each(batch.ids())


def test_a_record_that_somebody_else_has_settled_meanwhile_is_noticed(batch: Batch) -> None:
    batch.fill(50)
    batch.sns.hold_answers_of(4)
    batch.start()
    job = batch.submit()
    batch.sns.wait_until_held(4)
    run_sql(batch.fleet.database, "UPDATE records SET status = 'INVALID', reason = 'by hand' WHERE cents = 107")
    batch.sns.let_go(4)

    assert job.ends() == "COMPLETED"
    assert job.events() == ["retried"]
    assert "1 of 50 records were settled by somebody else" in batch.fleet.nodes[0].log
    assert batch.marks() == {"PUBLISHED": 49, "INVALID": 1}
    assert batch.reasons() == {"by hand": 1}
