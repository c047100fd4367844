"""What is wrong is said in one line that names the thing, its value and what to do; and nothing is lost by it."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_dbpartition import revision
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.schema import VERSION_TABLE
from tests.cli.running import Run, as_process, steps_module
from tests.databases import Database, run_sql, with_user
from tests.scenarios import add_node, claim_one, finish_all, submit

HEAD = revision.head_revision()
UPGRADE = "`dbpartition db upgrade`"
SECRET = "s3cret-and-long"
BIG = 2**63

READING = [["nodes"], ["jobs"], ["job", 1], ["partitions", 1], ["db", "check"]]
ACTING = [["stop", 1], ["restart", 1], ["abandon", 1], ["drain", "a"], ["purge", "--older-than", "1d"]]


# --- the database ------------------------------------------------------------------------------------------------


@pytest.fixture
def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.parametrize("words", [["jobs"], ["db", "upgrade"], ["stop", 1], ["worker", "--import", "none"]])
def test_a_database_that_cannot_be_reached(bare: Run, closed_port: int, words: list[object]) -> None:
    url = f"postgresql://me:{SECRET}@127.0.0.1:{closed_port}/jobs"
    line = bare(*words, "--database-url", url).refused(1, f"me:***@127.0.0.1:{closed_port}/jobs", "refused")
    assert SECRET not in line


def test_a_host_that_does_not_exist(bare: Run) -> None:
    url = f"postgresql://me:{SECRET}@no-such-host.invalid/jobs"
    assert SECRET not in bare("jobs", "--database-url", url).refused(1, "no-such-host.invalid")


@pytest.fixture
def locked_out(postgres: Database) -> Database:
    """A user that PostgreSQL does not know."""
    return with_user(postgres, "nobody_" + secrets.token_hex(4), SECRET)


def test_a_login_that_postgres_refuses_without_its_password(bare: Run, locked_out: Database) -> None:
    line = bare("jobs", "--database-url", locked_out.url).refused(1, "nobody_", ":***@", "does not exist")
    assert SECRET not in line


def test_a_password_that_mysql_refuses_is_not_shown(bare: Run, mysql: Database) -> None:
    user = "somebody_" + secrets.token_hex(4)
    run_sql(mysql, f"CREATE USER {user} IDENTIFIED BY 'another'")
    try:
        line = bare("jobs", "--database-url", with_user(mysql, user, SECRET).url).refused(1, user, ":***@", "denied")
    finally:
        run_sql(mysql, f"DROP USER {user}")
    assert SECRET not in line


def test_verbose_shows_the_traceback_but_not_the_password(locked_out: Database) -> None:
    for option in ("-v", "--verbose"):
        told = as_process("jobs", option, database=locked_out)
        assert (told.code, "Traceback" in told.err, SECRET in told.err + told.out) == (1, True, False)
        assert told.err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("oracle://me@host/jobs", ["'oracle'", "postgresql", "mysql", "sqlite"]),
        ("nonsense", ["'nonsense'", "postgresql://user:password@host/database"]),
        ("postgresql://host:port/jobs", ["expected a database URL", "postgresql://user:password@host/database"]),
        (f"postgresql//me:{SECRET}@host/jobs", ["expected a database URL", "***"]),
        ("", ["DBPARTITION_DATABASE_URL", "--database-url"]),
    ],
)
def test_a_url_that_leads_nowhere(bare: Run, url: str, words: list[str]) -> None:
    assert SECRET not in bare("jobs", "--database-url", url).refused(2, *words)


def test_a_file_that_cannot_be_opened(bare: Run, tmp_path: Path) -> None:
    bare("jobs", "--database-url", f"sqlite:///{tmp_path}/none/jobs.sqlite").refused(1, "none/jobs.sqlite", "open")


# --- the schema --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [*READING, *ACTING], ids=lambda words: " ".join(map(str, words[:2])))
def test_tables_that_are_missing(dbpartition: Run, words: list[object]) -> None:
    dbpartition(*words).refused(1, "tables are missing", UPGRADE)


def test_a_worker_without_tables(database: Database, tmp_path: Path) -> None:
    told = as_process("worker", "--import", steps_module(tmp_path), "--drain", database=database, directory=tmp_path)
    told.refused(1, "tables are missing", UPGRADE)


def test_submitting_without_tables_writes_nothing(dbpartition: Run, tmp_path: Path) -> None:
    file = tmp_path / "partitions.json"
    file.write_text("[{}]")
    dbpartition("submit", "work", "--partitions", file).refused(1, "tables are missing", UPGRADE)


@pytest.mark.parametrize("words", [["jobs"], ["stop", 1], ["db", "check"], ["db", "upgrade"]])
def test_a_schema_that_is_newer_is_left_alone(
    dbpartition: Run, database: Database, repository: JobRepository, words: list[object]
) -> None:
    run_sql(database, f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    dbpartition(*words).refused(1, "revision 9999", f"revision {HEAD}", "install")


def test_a_schema_without_a_revision_counts_as_missing(
    dbpartition: Run, database: Database, repository: JobRepository
) -> None:
    run_sql(database, f"DELETE FROM {VERSION_TABLE}")
    dbpartition("jobs").refused(1, "tables are missing", UPGRADE)


# --- rights ------------------------------------------------------------------------------------------------------


@pytest.fixture
def reader(postgres: Database) -> Iterator[Database]:
    """A user who may read the job repository and nothing else; one job is in it."""
    user = "reader_" + secrets.token_hex(4)
    repository = postgres.migrated()
    submit(repository, 2)
    repository.close()
    run_sql(
        postgres,
        f"CREATE ROLE {user} LOGIN PASSWORD '{SECRET}'",
        f"GRANT USAGE ON SCHEMA {postgres.schema} TO {user}",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA {postgres.schema} TO {user}",
    )
    yield with_user(postgres, user, SECRET)
    run_sql(postgres, f"DROP OWNED BY {user}", f"DROP ROLE {user}")


def test_a_reader_may_look_and_is_told_what_is_lacking_when_acting(bare: Run, reader: Database, tmp_path: Path) -> None:
    file = tmp_path / "partitions.json"
    file.write_text("[{}]")
    place = ["--database-url", reader.url, "--schema", reader.schema]
    (job,) = bare("jobs", "--json", *place).well().data
    for words in (["stop", job["id"]], ["drain", "a"], ["submit", "work", "--partitions", file]):
        told = bare(*words, *place)
        last = told.err.splitlines()[-1]  # submit says first for how many nodes it plans
        assert (told.code, told.out, "Traceback" in told.err) == (1, "", False)
        assert last.startswith("error: "), last
        assert "permission denied" in last, last
        assert "`dbpartition db sql`" in last, last
        assert SECRET not in told.err
    assert bare("jobs", "--json", *place).well().data == [job]


# --- options and variables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--concurrency", "0", ["concurrency", "at least 1", "got 0"]),
        ("--concurrency", "many", ["--concurrency", "'many'", "`dbpartition worker --help`"]),
        ("--heartbeat", "20", ["unreachable_after", "3 x heartbeat (60 s)", "got 10 s"]),
        ("--heartbeat", "nan", ["heartbeat_s", "positive", "nan"]),
        ("--unreachable-after", "40", ["remove_after", "unreachable_after (40 s)", "got 30 s"]),
        ("--executor", "fibre", ["executor", "process", "thread", "'fibre'"]),
        ("--grace", "-1", ["grace_s", "at least 0", "-1"]),
        ("--prefetch", "-1", ["prefetch", "at least 0", "-1"]),
        ("--max-partitions-per-child", "-1", ["max_partitions_per_child", "-1"]),
        ("--log-format", "xml", ["log format", "console, json", "'xml'"]),
        ("--log-level", "loud", ["log level", "warning", "'loud'"]),
        ("--node-group", "g" * 101, ["node_group", "1 to 100 characters"]),
    ],
)
def test_a_worker_option_that_cannot_be(bare: Run, option: str, value: str, words: list[str]) -> None:
    database = ["--database-url", "sqlite:///not-looked-at.sqlite"]
    assert "(from " not in bare("worker", *database, "--import", "none", option, value).refused(2, *words)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DBPARTITION_CONCURRENCY", "0"),
        ("DBPARTITION_CONCURRENCY", "many"),
        ("DBPARTITION_HEARTBEAT", "-3"),
        ("DBPARTITION_HEARTBEAT", "nan"),
        ("DBPARTITION_REMOVE_AFTER", "soon"),
        ("DBPARTITION_EXECUTOR", "fibre"),
        ("DBPARTITION_GRACE", "-1"),
        ("DBPARTITION_DRAIN", "perhaps"),
        ("DBPARTITION_LOG_LEVEL", "loud"),
        ("DBPARTITION_DATABASE_URL", "nonsense"),
        ("DBPARTITION_DATABASE_URL", "oracle://host/jobs"),
    ],
)
def test_a_variable_that_cannot_be_is_named(
    bare: Run, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv("DBPARTITION_DATABASE_URL", "sqlite:///not-looked-at.sqlite")
    monkeypatch.setenv(variable, value)
    bare("worker", "--import", "none").refused(2, variable, value.split(":")[0])


def test_a_typed_option_wins_and_the_variable_is_not_blamed(bare: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBPARTITION_CONCURRENCY", "4")
    words = ["worker", "--database-url", "sqlite:///not-looked-at.sqlite", "--import", "none", "--concurrency", "0"]
    assert "DBPARTITION_CONCURRENCY" not in bare(*words).refused(2, "concurrency", "got 0")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["frobnicate"], ["'frobnicate'", "`dbpartition --help`"]),
        (["jobs", "--frobnicate"], ["--frobnicate", "`dbpartition jobs --help`"]),
        (["job"], ["ID", "`dbpartition job --help`"]),
        (["job", "seven"], ["ID", "'seven'"]),
        (["job", "0"], ["ID", "'0'"]),
        (["job", str(BIG)], ["ID", str(BIG)]),
        (["jobs", "--limit", "0"], ["--limit", "'0'"]),
        (["jobs", "--limit", str(BIG)], ["--limit", str(BIG)]),
        (["submit", "work"], ["--partitions"]),
        (["db", "sql", "--dialect", "oracle"], ["--dialect", "'oracle'", "postgresql, mysql, sqlite"]),
    ],
)
def test_words_that_are_not_understood(bare: Run, words: list[str], told: list[str]) -> None:
    bare(*words).refused(2, *told)


def test_sql_cannot_be_written_where_a_file_is(bare: Run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    bare("db", "sql", "--directory", file).refused(2, "--directory", str(file))
    assert file.read_text() == "mine"


# --- modules of steps --------------------------------------------------------------------------------------------

REGISTERED_TWICE = """\
from airflow_dbpartition.worker import step

@step("work")
def one(ctx): ...

@step("work")
def other(ctx): ...
"""


@pytest.mark.parametrize("executor", ["process", "thread"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import a_library_that_is_not_here", ["bad_steps", "'a_library_that_is_not_here'", "bad_steps.py:1"]),
        ("def work(:", ["bad_steps", "SyntaxError", "line 1"]),
        ("raise SystemExit(0)", ["bad_steps", "SystemExit"]),
        ("", ["no step is registered by bad_steps", '@step("name")', "--import"]),
        (REGISTERED_TWICE, ["'work'", "bad_steps.one", "bad_steps.other", "rename one"]),
        (None, ["bad_steps", "No module named 'bad_steps'", "--import"]),
    ],
    ids=["cannot be imported", "is no Python", "exits", "has no step", "has a step twice", "does not exist"],
)
def test_a_module_of_steps_that_is_of_no_use(
    postgres: Database,
    postgres_repository: JobRepository,
    tmp_path: Path,
    text: str | None,
    words: list[str],
    executor: str,
) -> None:
    module = "bad_steps" if text is None else steps_module(tmp_path, text, "bad_steps")
    submit(postgres_repository, 1)
    told = as_process(
        "worker", "--import", module, "--drain", "--executor", executor, database=postgres, directory=tmp_path
    )
    told.refused(1, *words)
    assert postgres_repository.nodes.all(include_removed=True) == []
    assert [job.status.is_active for job in postgres_repository.reading.recent(limit=2)] == [True]


def test_two_files_of_one_name_are_not_taken_for_each_other(
    postgres: Database, postgres_repository: JobRepository, tmp_path: Path
) -> None:
    words: list[object] = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        text = f'from airflow_dbpartition.worker import step\n\n@step("{name}")\ndef work(ctx): ...\n'
        steps_module(tmp_path / name, text, "steps")
        words += ["--import", tmp_path / name / "steps.py"]
    told = as_process("worker", *words, "--drain", database=postgres, directory=tmp_path)
    told.refused(1, f"cannot import {tmp_path}/two/steps.py", "'steps'", f"{tmp_path}/one/steps.py", "rename one")


# --- submit ------------------------------------------------------------------------------------------------------

DEEP = "[" * 100_000
BAD_PARTITIONS = [
    ("", ["--partitions is empty"]),
    (" \n\n", ["--partitions is empty"]),
    ("[", ["--partitions is not JSON", "line 1 column 2"]),
    ('[\n{"a": 1},\n{"a": }\n]', ["--partitions is not JSON", "line 3"]),
    ('{"a": 1}\nnonsense\n', ["--partitions line 2 is not JSON"]),
    ('{"a": {}, "b": {}, "a": {}}', ["--partitions", "'a'", "more than once"]),
    ('{"a": {"x": 1, "x": 2}}', ["--partitions", "'x'", "more than once"]),
    ('{"x": 1}\n{"x": 1, "x": 2}', ["--partitions line 2", "'x'", "more than once"]),
    ('[{"key": "a", "context": {}}, {"key": "a", "context": {}}]', ["--partitions", "'a'", "more than once"]),
    ('[{"x": NaN}]', ["--partitions", "NaN", "null"]),
    ('[{"x": -Infinity}]', ["--partitions", "-Infinity"]),
    ('[{"x": 1e999}]', ["'partition0'", "context['x']", "inf"]),
    ('[{"x": "\\u0000"}]', ["'partition0'", "context['x']", "NUL"]),
    ('[{"x": "\\ud800"}]', ["'partition0'", "context['x']", "surrogate"]),
    ("3", ["expected --partitions to hold a list or an object, got int"]),
    ("[1]", ["partition 0", "got 1"]),
    ('{"a": 1}', ["--partitions", "'a'", "int"]),
    ('[{"key": 1, "context": {}}]', ["key of result 0", "got 1", "str()"]),
    ('[{"key": " a", "context": {}}]', ["key of result 0", "' a'"]),
    ('[{"key": "a", "context": {}, "weight": "heavy"}]', ["weight", "'a'", "'heavy'"]),
    ('[{"key": "a", "context": {}, "transferable": 3}]', ["'a'", "transferable", "3"]),
    (DEEP, ["--partitions", "nested too deeply"]),
    (json.dumps([{"x": "y" * 5 * 2**20}]), ["'partition0'", "5242888 bytes", "limit is 1048576"]),
]


@pytest.mark.parametrize(("text", "words"), BAD_PARTITIONS, ids=[text[:40] or "nothing" for text, _ in BAD_PARTITIONS])
def test_partitions_that_cannot_be_stored(
    bare: Run, postgres: Database, postgres_repository: JobRepository, tmp_path: Path, text: str, words: list[str]
) -> None:
    file = tmp_path / "partitions.json"
    file.write_text(text)
    place = ["--database-url", postgres.url, "--schema", postgres.schema]
    bare("submit", "work", "--partitions", file, *place).refused(1, *words)
    assert bare("jobs", "--json", *place).well().data == []


def test_the_list_without_partitions_is_a_job_that_is_done(
    dbpartition: Run, repository: JobRepository, tmp_path: Path
) -> None:
    file = tmp_path / "partitions.json"
    file.write_text("[]")
    assert dbpartition("submit", "work", "--partitions", file, "--json").well().data["status"] == "COMPLETED"


def test_a_stream_that_breaks_off_at_its_last_line_writes_nothing(
    dbpartition: Run, database: Database, repository: JobRepository
) -> None:
    lines = '{"number": 1}\n' * 50_000 + '{"number": '
    told = as_process("submit", "work", "--partitions", "-", stdin=lines, database=database)
    told.refused(1, "--partitions line 50001 is not JSON")
    assert dbpartition("jobs", "--json").well().data == []


def test_bytes_that_are_not_text() -> None:
    told = as_process("submit", "work", "--partitions", "-", stdin="\udcff\udcfe")
    told.refused(2, "--partitions -", "utf-8")


@pytest.mark.parametrize("name", ["none.json", "."])
def test_a_file_that_cannot_be_read(bare: Run, tmp_path: Path, name: str) -> None:
    bare("submit", "work", "--partitions", tmp_path / name).refused(2, "--partitions", str(tmp_path / name))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--parameters", "nonsense"], ["--parameters", "'nonsense'", "JSON object"]),
        (["--parameters", "[1]"], ["--parameters", "'[1]'", "JSON object"]),
        (["--parameters", '{"day": 1, "day": 2}'], ["--parameters", "'day'", "more than once"]),
        (["--parameters", '{"day": NaN}'], ["--parameters", "NaN"]),
        (["--transferable", "perhaps"], ["--transferable", "until_started", "'perhaps'"]),
        (["--retries", "-1"], ["--retries", "'-1'"]),
        (["--priority", str(BIG)], ["--priority", str(BIG)]),
        (["--node-group", ""], ["node_group", "1 to 100 characters", "''"]),
        (["--job-name", "j" * 251], ["job_name", "1 to 250 characters"]),
        (["--heartbeat", "20"], ["unreachable_after", "3 x heartbeat"]),
    ],
)
def test_an_option_of_submit_that_cannot_be(bare: Run, tmp_path: Path, options: list[str], words: list[str]) -> None:
    file = tmp_path / "partitions.json"
    file.write_text("[{}]")
    database = f"sqlite:///{tmp_path}/none.sqlite"
    bare("submit", "work", "--partitions", file, "--database-url", database, *options).refused(2, *words)
    assert not (tmp_path / "none.sqlite").exists()


def test_a_step_that_no_live_node_knows(dbpartition: Run, repository: JobRepository, tmp_path: Path) -> None:
    add_node(repository, "a", steps=["other"])
    file = tmp_path / "partitions.json"
    file.write_text("[{}]")
    dbpartition("submit", "wrok", "--partitions", file).refused(1, "'wrok'", "'default'", "a knows other", "correct")
    assert dbpartition("jobs", "--json").well().data == []


# --- what is not there, and what may not be ----------------------------------------------------------------------


@pytest.mark.parametrize("command", ["job", "partitions", "stop", "restart", "abandon"])
def test_a_job_execution_that_does_not_exist(dbpartition: Run, repository: JobRepository, command: str) -> None:
    dbpartition(command, 4711).refused(1, "there is no job execution 4711")


def test_a_node_that_does_not_exist(dbpartition: Run, repository: JobRepository) -> None:
    dbpartition("drain", "b").refused(1, "no live node 'b'", "live: none")
    add_node(repository, "a")
    dbpartition("drain", "b").refused(1, "no live node 'b'", "live: a")


def test_what_has_completed_is_not_restarted_or_abandoned(dbpartition: Run, repository: JobRepository) -> None:
    add_node(repository)
    number = submit(repository, 2).job_execution_id
    finish_all(repository, number)
    for command in ("restart", "abandon"):
        dbpartition(command, number).refused(1, f"job execution {number}", "COMPLETED")
    assert [row["status"] for row in dbpartition("jobs", "--json").well().data] == ["COMPLETED"]


def test_what_still_runs_is_not_abandoned(dbpartition: Run, repository: JobRepository) -> None:
    add_node(repository)
    number = submit(repository, 2).job_execution_id
    claim_one(repository)
    dbpartition("abandon", number).refused(1, str(number), "stop")
    assert repository.reading.execution(number).status.is_active


@pytest.mark.parametrize("age", ["yesterday", "", "-1d", "1 month", "1d2h", "nan", "inf", "99999999999d", "9" * 400])
def test_an_age_that_is_none_purges_nothing(dbpartition: Run, repository: JobRepository, age: str) -> None:
    add_node(repository)
    number = submit(repository).job_execution_id
    finish_all(repository, number)
    dbpartition("purge", "--older-than", age).refused(2, "--older-than", repr(age), "d")
    assert [row["id"] for row in dbpartition("jobs", "--json").well().data] == [number]
