"""Every command does what it says, on every database, and what --json prints is JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from airflow_dbpartition import revision
from airflow_dbpartition.domain import NodeStatus, Partition
from airflow_dbpartition.repository import JobRepository
from tests.cli.running import Run, as_process, drain, start
from tests.databases import Database, run_sql
from tests.scenarios import add_node, claim_one, complete, fail_all, finish_all, statuses, submit, sweep

HEAD = revision.head_revision()


# --- db ----------------------------------------------------------------------------------------------------------


def test_upgrade_makes_the_tables_once(dbpartition: Run) -> None:
    assert dbpartition("db", "upgrade").well().out == f"the job repository went from nothing to revision {HEAD}\n"
    assert dbpartition("db", "upgrade").well().out == f"the job repository is at revision {HEAD} already\n"


def test_upgrade_tells_a_program_where_it_came_from(dbpartition: Run) -> None:
    assert dbpartition("db", "upgrade", "--json").well().data == {"before": None, "now": HEAD}
    assert dbpartition("db", "upgrade", "--json").well().data == {"before": HEAD, "now": HEAD}


def test_check_is_content_with_what_upgrade_made(dbpartition: Run) -> None:
    dbpartition("db", "upgrade").well()
    assert dbpartition("db", "check").well().out == f"the schema is as revision {HEAD} wants it\n"
    assert dbpartition("db", "check", "--json").well().data == {"revision": HEAD, "differences": []}


def test_check_names_what_somebody_took_away(dbpartition: Run, database: Database) -> None:
    dbpartition("db", "upgrade").well()
    run_sql(database, "DROP VIEW batch_cluster")
    checked = dbpartition("db", "check")
    assert (checked.code, "batch_cluster" in checked.out, "`dbpartition db upgrade`" in checked.out) == (1, True, True)
    checked = dbpartition("db", "check", "--json")
    assert (checked.code, checked.data["differences"]) == (1, ["missing view batch_cluster"])


@pytest.mark.parametrize("dialect", ["postgresql", "mysql", "sqlite"])
def test_sql_prints_what_it_writes_into_a_directory(bare: Run, dialect: str, tmp_path: Path) -> None:
    printed = bare("db", "sql", "--dialect", dialect).well().out
    written = tmp_path / "new" / "folder"
    assert bare("db", "sql", "--dialect", dialect, "--directory", written).well().out == ""
    texts = [path.read_text() for path in written.iterdir()]
    assert sorted(path.name for path in written.iterdir())[-2:] == ["schema.sql", "views.sql"]
    assert all(text.strip() in printed for text in texts)
    assert "CREATE TABLE batch_partitions" in printed


def test_sql_puts_the_tables_where_the_schema_option_says(bare: Run) -> None:
    assert "CREATE TABLE jobs.batch_partitions" in bare("db", "sql", "--schema", "jobs").well().out


# --- look --------------------------------------------------------------------------------------------------------


def test_nodes_says_that_there_are_none_and_what_starts_one(dbpartition: Run, repository: JobRepository) -> None:
    assert "dbpartition worker" in dbpartition("nodes").well().out
    assert dbpartition("nodes", "--json").well().data == []


def test_nodes_lists_the_live_and_with_all_the_removed(dbpartition: Run, repository: JobRepository) -> None:
    add_node(repository, "a", steps=["work", "rest"], capacity=7)
    add_node(repository, "b")
    repository.losses.deregister("b")
    (node,) = dbpartition("nodes", "--json").well().data
    assert (node["node"], node["status"], node["capacity"], node["steps"]) == ("a", "ACTIVE", 7, ["rest", "work"])
    assert {row["node"]: row["status"] for row in dbpartition("nodes", "--all", "--json").well().data} == {
        "a": "ACTIVE",
        "b": "REMOVED",
    }
    table = dbpartition("nodes").well().out.splitlines()
    assert table[0].split()[:3] == ["node", "group", "status"]
    assert table[1].split()[:3] == ["a", "default", "ACTIVE"]


def test_jobs_lists_the_newest_first(dbpartition: Run, repository: JobRepository) -> None:
    add_node(repository)
    old = submit(repository, 2, job="old").job_execution_id
    finish_all(repository, old)
    new = submit(repository, 3, job="new").job_execution_id
    rows = dbpartition("jobs", "--json").well().data
    assert [(row["id"], row["job"], row["status"], row["partitions"]) for row in rows] == [
        (new, "new", "STARTING", 3),
        (old, "old", "COMPLETED", 2),
    ]
    assert (rows[0]["pending"], rows[1]["completed"]) == (3, 2)
    assert len(dbpartition("jobs").well().out.splitlines()) == 3


def test_jobs_can_be_narrowed(dbpartition: Run, repository: JobRepository) -> None:
    add_node(repository)
    old = submit(repository, job="old").job_execution_id
    finish_all(repository, old)
    new = submit(repository, job="new").job_execution_id
    assert [row["id"] for row in dbpartition("jobs", "--active", "--json").well().data] == [new]
    assert [row["id"] for row in dbpartition("jobs", "--job-name", "old", "--json").well().data] == [old]
    assert [row["id"] for row in dbpartition("jobs", "--limit", 1, "--json").well().data] == [new]
    assert dbpartition("jobs", "--job-name", "none").well().out == "no job executions\n"
    assert dbpartition("jobs", "--job-name", "none", "--json").well().data == []


def test_job_shows_its_counts_failures_and_events(dbpartition: Run, repository: JobRepository) -> None:
    add_node(repository)
    number = submit(repository, 2).job_execution_id
    complete(repository, claim_one(repository))
    fail_all(repository, number, message="Traceback\nValueError: it is broken")
    shown = dbpartition("job", number, "--json").well().data
    assert (shown["id"], shown["status"], shown["completed"], shown["failed"]) == (number, "FAILED", 1, 1)
    assert [(one["partition_key"], "it is broken" in one["message"]) for one in shown["failures"]] == [("p1", True)]
    assert [event["event"] for event in shown["events"]] == ["failed"]
    text = dbpartition("job", number).well().out
    assert "failed: p1 on a" in text
    assert "ValueError: it is broken" in text


def test_partitions_shows_all_or_those_that_failed(dbpartition: Run, repository: JobRepository) -> None:
    add_node(repository)
    number = submit(repository, 3).job_execution_id
    complete(repository, claim_one(repository), result={"ü": 1}, read=5)
    fail_all(repository, number, message="Traceback\nValueError: it is broken")
    rows = {row["key"]: row for row in dbpartition("partitions", number, "--json").well().data}
    assert list(rows) == ["p0", "p1", "p2"]
    assert (rows["p0"]["status"], rows["p0"]["result"], rows["p0"]["read"]) == ("COMPLETED", {"ü": 1}, 5)
    assert rows["p2"]["context"] == {"number": 2}
    assert [row["key"] for row in dbpartition("partitions", number, "--failed", "--json").well().data] == ["p1", "p2"]
    assert len(dbpartition("partitions", number, "--limit", 1, "--json").well().data) == 1
    table = dbpartition("partitions", number, "--failed").well().out.splitlines()
    assert table[1].endswith("ValueError: it is broken")


@pytest.mark.parametrize("words", [["--json"], []])
def test_what_the_terminal_cannot_show_is_escaped(
    dbpartition: Run, database: Database, repository: JobRepository, words: list[str]
) -> None:
    number = submit(repository, [Partition("ä", {"name": "\u2708"})]).job_execution_id
    ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    shown = as_process("partitions", number, *words, database=database, environment=ascii_only).well()
    if words:
        assert [(row["key"], row["context"]) for row in shown.data] == [("ä", {"name": "\u2708"})]
    else:
        assert "\\xe4" in shown.out


def test_partitions_says_that_none_failed(dbpartition: Run, repository: JobRepository) -> None:
    number = submit(repository).job_execution_id
    assert dbpartition("partitions", number, "--failed").well().out == "no such partitions\n"
    assert dbpartition("partitions", number, "--failed", "--json").well().data == []


# --- watch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ending", "code", "status"), [(finish_all, 0, "COMPLETED"), (fail_all, 3, "FAILED")])
def test_watching_ends_with_the_job_and_says_by_its_code_how(
    dbpartition: Run, repository: JobRepository, ending: object, code: int, status: str
) -> None:
    assert callable(ending)
    add_node(repository)
    number = submit(repository, 2).job_execution_id
    began = time.monotonic()
    timer = threading.Timer(0.7, lambda: ending(repository, number))
    timer.start()
    watched = dbpartition("job", number, "--watch", "--json")
    took_s = time.monotonic() - began
    timer.join()
    assert (watched.code, watched.data["status"]) == (code, status)
    assert f"job execution {number}" in watched.err  # the bar leaves stdout to the data
    assert 0.7 <= took_s < 20


def test_watching_what_has_ended_returns_at_once(dbpartition: Run, repository: JobRepository) -> None:
    number = submit(repository).job_execution_id
    repository.executions.stop(number, reason="enough")
    watched = dbpartition("job", number, "--watch")
    assert (watched.code, "STOPPED" in watched.out) == (3, True)
    assert dbpartition("job", number).code == 0  # to look is not to judge


def test_an_interrupted_watch_leaves_the_job_alone(database: Database, repository: JobRepository) -> None:
    number = submit(repository).job_execution_id
    ours, terminal = os.openpty()
    with start("job", number, "--watch", database=database, stderr=terminal, environment={"TERM": "xterm"}) as process:
        os.close(terminal)
        shown = os.read(ours, 1024)  # the bar is there
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
        with contextlib.suppress(OSError):  # Linux says at a terminal's end: input/output error
            while more := os.read(ours, 1024):
                shown += more
    os.close(ours)
    assert (process.returncode, out, b"Traceback" in shown) == (130, "", False)
    assert repository.reading.execution(number).status.is_active


# --- submit ------------------------------------------------------------------------------------------------------

THREE = {"a": {"number": 1}, "b": {"number": 2}, "ä": {"number": 3}}


def contexts(run: Run, number: int) -> dict[str, object]:
    return {row["key"]: row["context"] for row in run("partitions", number, "--json").well().data}


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        (json.dumps(THREE), THREE),
        ('[{"number": 1}, {"number": 2}]', {"partition0": {"number": 1}, "partition1": {"number": 2}}),
        ('{"number": 1}\n\n{"number": 2}\n', {"partition0": {"number": 1}, "partition1": {"number": 2}}),
        ('[{"key": "a", "context": {"number": 1}, "weight": 2}]', {"a": {"number": 1}}),
        ('{"key": "a", "context": {"number": 1}}\n{"key": "b", "context": {}}\n', {"a": {"number": 1}, "b": {}}),
        ('{"key": "a", "context": {"number": 1}}\n', {"a": {"number": 1}}),
        ('{"key": {"number": 1}, "context": {"number": 2}}', {"key": {"number": 1}, "context": {"number": 2}}),
        ('\ufeff[{"number": 1}]', {"partition0": {"number": 1}}),
    ],
    ids=["object", "list", "lines", "partitions", "lines of partitions", "one line", "keys that are words", "with BOM"],
)
def test_submit_reads_every_form_of_partitions(
    dbpartition: Run, repository: JobRepository, tmp_path: Path, text: str, stored: object
) -> None:
    file = tmp_path / "partitions.json"
    file.write_text(text, encoding="utf-8")
    submitted = dbpartition("submit", "work", "--partitions", file).well()
    assert contexts(dbpartition, int(submitted.out)) == stored


def test_submit_reads_from_a_pipe(dbpartition: Run, database: Database, repository: JobRepository) -> None:
    submitted = as_process("submit", "work", "--partitions", "-", stdin=json.dumps(THREE), database=database).well()
    assert contexts(dbpartition, int(submitted.out)) == THREE
    assert "the partitions wait for whoever comes" in submitted.err  # stdout is the id and nothing else


def test_submit_takes_a_long_stream_of_lines(dbpartition: Run, database: Database, repository: JobRepository) -> None:
    lines = "".join(f'{{"number": {number}}}\n' for number in range(20_000))
    submitted = as_process("submit", "work", "--partitions", "-", stdin=lines, database=database).well()
    (row,) = dbpartition("jobs", "--json").well().data
    assert (row["id"], row["pending"]) == (int(submitted.out), 20_000)


def test_submit_stores_how_the_job_is_to_run(dbpartition: Run, repository: JobRepository, tmp_path: Path) -> None:
    file = tmp_path / "partitions.json"
    file.write_text("[{}]")
    words = ["--transferable", "true", "--retries", 2, "--job-name", "nightly", "--node-group", "big", "--priority", 9]
    submitted = dbpartition("submit", "work", "--partitions", file, *words, "--json").well().data
    assert (submitted["status"], submitted["created"]) == ("STARTING", True)
    execution = repository.reading.execution(submitted["job_execution_id"])
    assert (execution.job_name, execution.node_group, execution.step_name) == ("nightly", "big", "work")
    assert (execution.settings.transferable, execution.settings.partition_retries) == ("always", 2)


def test_the_same_parameters_are_the_same_job(dbpartition: Run, repository: JobRepository, tmp_path: Path) -> None:
    add_node(repository)
    file = tmp_path / "partitions.json"
    file.write_text("[{}, {}]")
    words = ["submit", "work", "--partitions", file, "--parameters", '{"day": 1, "hour": 2}', "--json"]
    first = dbpartition(*words).well().data
    words[5] = '{"hour": 2, "day": 1}'
    assert dbpartition(*words).well().data == {**first, "created": False}
    finish_all(repository, first["job_execution_id"])
    assert dbpartition(*words).well().data == {**first, "created": False, "status": "COMPLETED"}
    words[5] = '{"day": 2, "hour": 2}'
    assert dbpartition(*words).well().data["created"] is True
    assert len(dbpartition("jobs", "--json").well().data) == 2


def test_the_same_parameters_again_restart_what_failed(
    dbpartition: Run, repository: JobRepository, tmp_path: Path
) -> None:
    add_node(repository)
    file = tmp_path / "partitions.json"
    file.write_text("[{}, {}]")
    words = ["submit", "work", "--partitions", file, "--parameters", '{"day": 1}', "--json"]
    first = dbpartition(*words).well().data["job_execution_id"]
    complete(repository, claim_one(repository))
    fail_all(repository, first)
    second = dbpartition(*words).well().data
    assert (second["created"], second["job_execution_id"] > first) == (True, True)
    assert statuses(repository, second["job_execution_id"]) == {"PENDING": 1}


def test_without_parameters_each_submit_is_a_job_of_its_own(
    dbpartition: Run, repository: JobRepository, tmp_path: Path
) -> None:
    file = tmp_path / "partitions.json"
    file.write_text("[{}]")
    numbers = {dbpartition("submit", "work", "--partitions", file).well().out for _ in range(2)}
    assert len(numbers) == 2


# --- act ---------------------------------------------------------------------------------------------------------


def test_stop_stops_what_waits_and_may_be_said_twice(dbpartition: Run, repository: JobRepository) -> None:
    number = submit(repository, 2).job_execution_id
    for _ in range(2):
        assert dbpartition("stop", number).well().out == f"job execution {number} is STOPPED\n"
    assert statuses(repository, number) == {"STOPPED": 2}


def test_stop_leaves_what_runs_to_its_owner(dbpartition: Run, repository: JobRepository) -> None:
    add_node(repository)
    number = submit(repository, 2).job_execution_id
    claim_one(repository)
    assert dbpartition("stop", number).well().out == f"job execution {number} is STOPPING\n"
    assert statuses(repository, number) == {"CLAIMED": 1, "STOPPED": 1}


def test_restart_runs_again_what_did_not_complete(dbpartition: Run, repository: JobRepository) -> None:
    add_node(repository)
    number = submit(repository, 3).job_execution_id
    complete(repository, claim_one(repository))
    fail_all(repository, number)
    again = dbpartition("restart", number, "--json").well().data
    assert again["created"] is True
    assert statuses(repository, again["job_execution_id"]) == {"PENDING": 2}
    # Said twice, it is the same restart.
    assert dbpartition("restart", number, "--json").well().data == {**again, "created": False}


def test_restart_prints_the_new_number(dbpartition: Run, repository: JobRepository) -> None:
    number = submit(repository).job_execution_id
    repository.executions.stop(number, reason="enough")
    restarted = dbpartition("restart", number).well()
    assert int(restarted.out) > number
    assert f"job execution {number} restarted as" in restarted.err


def test_restart_runs_what_was_lost_only_when_told(dbpartition: Run, repository: JobRepository) -> None:
    add_node(repository)
    number = submit(repository, 1).job_execution_id
    claim_one(repository)  # by default what has started never moves
    repository.losses.deregister("a")
    sweep(repository, deep=True)
    assert statuses(repository, number) == {"FAILED": 1}
    dbpartition("restart", number).refused(1, f"job execution {number}", "--include-lost")
    again = dbpartition("restart", number, "--include-lost", "--json").well().data
    assert statuses(repository, again["job_execution_id"]) == {"PENDING": 1}


def test_abandon_is_the_last_word(dbpartition: Run, repository: JobRepository) -> None:
    number = submit(repository).job_execution_id
    repository.executions.stop(number, reason="enough")
    assert dbpartition("abandon", number).well().out == f"job execution {number} is ABANDONED\n"
    dbpartition("restart", number).refused(1, str(number), "abandoned")


def test_drain_asks_a_node_to_leave(dbpartition: Run, repository: JobRepository) -> None:
    add_node(repository, "a")
    assert dbpartition("drain", "a").well().out == "node a is asked to drain\n"
    (node,) = repository.nodes.all()
    assert node.status is NodeStatus.DRAINING


def test_purge_deletes_what_has_ended_and_keeps_what_is_active(dbpartition: Run, repository: JobRepository) -> None:
    add_node(repository)
    done = submit(repository, 2, job="done").job_execution_id
    finish_all(repository, done)
    active = submit(repository, 2, job="active").job_execution_id
    assert dbpartition("purge", "--older-than", "1h", "--json").well().data["executions"] == 0
    purged = dbpartition("purge", "--older-than", "0s", "--json").well().data
    assert (purged["instances"], purged["executions"], purged["partitions"]) == (1, 1, 2)
    assert [row["id"] for row in dbpartition("jobs", "--json").well().data] == [active]
    assert dbpartition("purge", "--older-than", "0s").well().out.startswith("deleted 0 job instances")


# --- a worker and a job, as processes ----------------------------------------------------------------------------


def test_a_submitted_job_is_drained_by_a_worker(
    dbpartition: Run, database: Database, repository: JobRepository, tmp_path: Path
) -> None:
    submitted = as_process("submit", "work", "--partitions", "-", stdin=json.dumps(THREE), database=database).well()
    drain(database, tmp_path).well()
    watched = dbpartition("job", int(submitted.out), "--watch", "--json").well().data
    assert (watched["status"], watched["completed"]) == ("COMPLETED", 3)
    results = {row["key"]: row["result"] for row in dbpartition("partitions", int(submitted.out), "--json").well().data}
    assert results == {"a": {"got": 1}, "b": {"got": 2}, "ä": {"got": 3}}


def test_a_worker_that_drains_says_by_its_code_that_work_failed(
    dbpartition: Run, database: Database, repository: JobRepository, tmp_path: Path
) -> None:
    number = submit(repository, 1).job_execution_id
    assert drain(database, tmp_path, text=STEPS_THAT_FAIL).code == 3
    assert dbpartition("job", number, "--watch").code == 3
    assert "ValueError: it is broken" in dbpartition("partitions", number, "--failed").well().out


STEPS_THAT_FAIL = """\
from airflow_dbpartition.worker import step

@step("work")
def work(ctx):
    raise ValueError("it is broken")
"""


# --- the words themselves ----------------------------------------------------------------------------------------


def test_without_a_command_the_help_is_shown(bare: Run) -> None:
    for words, told in (((), "submit"), (("db",), "upgrade")):
        shown = bare(*words)
        assert (shown.code, told in shown.out, shown.err) == (2, True, "")


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["db", "-h"], ["worker", "--help"]])
def test_help_is_no_error(bare: Run, words: list[str]) -> None:
    assert "Usage: dbpartition" in bare(*words).well().out


def test_a_reader_that_has_seen_enough_is_no_error(database: Database, repository: JobRepository) -> None:
    submit(repository, 3000)
    (number,) = [execution.job_execution_id for execution in repository.reading.recent(limit=1)]
    with start("partitions", number, "--json", "--limit", 3000, database=database) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) == "["
        process.stdout.close()
        err = process.stderr.read()
    assert (process.returncode, err) == (0, "")
