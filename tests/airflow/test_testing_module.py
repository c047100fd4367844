"""airflow_dbpartition.testing: real `dag.test()` runs with a local worker, and what the local worker leaves behind."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, TaskDeferred
from sqlalchemy import Column, Integer, MetaData, Table, func, insert, select

from airflow_dbpartition import cli, testing
from airflow_dbpartition.config import Timings
from airflow_dbpartition.domain import JobSettings
from airflow_dbpartition.errors import (
    ConfigurationError,
    JobExecutionNotFoundError,
    UnknownStepError,
)
from airflow_dbpartition.hooks import JobRepositoryHook
from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.testing import LocalJobRepository, local_job_repository, local_worker, run_pending
from airflow_dbpartition.worker import ChunkStep, PartitionContext, step
from airflow_dbpartition.worker import steps as registry
from airflow_dbpartition.worker.node import Worker
from tests.airflow.dag_test_runs import EXAMPLES, MARK, PATIENCE_S, greeting_when_awaited
from tests.airflow.own_airflow import environment_of
from tests.airflow.worlds import Try
from tests.modules import import_file

pytestmark = pytest.mark.timeout(PATIENCE_S + 100)

HERE = Path(__file__).resolve().parent
VARIABLE = "AIRFLOW_CONN_DBPARTITION_DEFAULT"
TWO = {"ada": {"person": "Ada"}, "grace": {"person": "Grace"}}
HELLO = {"ada": "Hello, Ada!", "grace": "Hello, Grace!"}


@step("testing.greet")
def greet(ctx: PartitionContext) -> str:
    return f"Hello, {ctx.context['person']}!"


def refuse_grace(ctx: PartitionContext) -> str:
    if ctx.context["person"] == "Grace":
        raise ValueError("there is no greeting for Grace")
    return greet(ctx)


def operator(**options: Any) -> PartitionedStepOperator:
    return PartitionedStepOperator(
        **{"task_id": "task", "step": "testing.greet", "partitioner": TWO, "deferrable": False, **options}
    )


# --- dag.test(): an Airflow of its own, in another process ---------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What came of each DAG of `local_dags/`."""
    home = tmp_path_factory.mktemp("airflow")
    environment = environment_of(home, HERE / "local_dags")

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=home,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S + 60,
        )
        assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
        return done.stdout

    run("-m", "airflow", "db", "migrate")
    told = [line for line in run("-m", "tests.airflow.dag_test_runs").splitlines() if line.startswith(MARK)]
    came: dict[str, dict[str, Any]] = json.loads(told[0].removeprefix(MARK))
    return came


WAITS = ("blocking", "deferred", "sensor_pokes", "sensor_deferred", "sensor_reschedules")


@pytest.mark.parametrize("name", WAITS)
def test_a_dag_succeeds_however_it_waits(runs: dict[str, dict[str, Any]], name: str) -> None:
    run = runs[name]
    assert run["state"] == "success", run["report"]
    assert run["summary"]["partitions"]["completed"] == 3
    assert run["results"] == {name: f"Hello, {name}!" for name in ("Ada", "Grace", "Edsger")}
    assert run["errors"] == {}


@pytest.mark.parametrize("name", ["fails", "fails_deferred"])
def test_a_failed_partition_fails_the_run_and_its_error_can_be_read(runs: dict[str, dict[str, Any]], name: str) -> None:
    run = runs[name]
    assert run["state"] == "failed"
    assert list(run["errors"]) == ["Grace"]
    assert run["errors"]["Grace"].endswith("ValueError: there is no greeting for Grace")
    assert run["report"].startswith(f"job execution 1 ({name}.greet): FAILED (2 COMPLETED, 1 FAILED)")
    assert "    ValueError: there is no greeting for Grace" in run["report"]


def test_a_retry_of_the_task_restarts_what_failed(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["retried"]
    assert (run["state"], run["tries"]) == ("success", {"greet": 2}), run["report"]
    assert run["summary"]["job_execution_id"] == 2
    assert run["summary"]["partitions"]["completed"] == 3
    assert sorted(run["of_each_job"][0]) == ["Ada", "Edsger", "Grace"]


def test_each_mapped_task_has_a_job_of_its_own(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["mapped"]
    assert run["state"] == "success", run["report"]
    jobs = sorted(run["of_each_job"], key=len)  # the mapped tasks are run in any order
    assert jobs == [{"a": "Hello, Ada!"}, {"g": "Hello, Grace!", "e": "Hello, Edsger!"}]


def test_partitions_that_were_only_planned_can_be_run_afterwards(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["only_plans"]
    assert run["before"]["state"] == "success"
    assert run["before"]["summary"]["partitions"]["pending"] == 3
    assert run["attempts"] == 3
    assert run["summary"]["partitions"]["completed"] == 3


def test_chunks_and_transactions_write_into_the_same_file(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["chunks_and_pages"]
    assert run["state"] == "success", run["report"]
    assert run["chunks"]["partitions"]["completed"] == run["pages"]["partitions"]["completed"] == 2
    counters = run["chunks"]["counters"]
    assert (counters["read"], counters["write"], counters["filter"], counters["skip"]) == (1200, 1198, 1, 1)
    assert run["booked"] == [1198, 1198 * 125]
    assert run["findings"] == run["pages"]["counters"]["write"] == 12
    assert run["added_up"] == 1198


def test_airflow_may_import_a_file_of_steps_once_more(runs: dict[str, dict[str, Any]]) -> None:
    assert runs["all_files"]["import_errors"] == {}


# --- the local worker ----------------------------------------------------------------------------------------------


def test_a_wait_looks_often_whatever_its_own_interval(tmp_path: Path) -> None:
    began = time.monotonic()
    with greeting_when_awaited() as step, local_worker(tmp_path, steps={"testing.greet": step}) as jobs:
        summary = operator(wait_for_completion=True, poll_interval=60).execute(Try().context())
        assert summary == jobs.summary()
        assert summary["partitions"]["completed"] == 2
        assert jobs.results() == HELLO
    assert time.monotonic() - began < 30


def test_a_deferred_wait_looks_often_and_gives_up_early(tmp_path: Path) -> None:
    with local_job_repository(tmp_path), pytest.raises(TaskDeferred) as deferral:
        operator(wait_for_completion=True, deferrable=True, poll_interval=60, no_nodes_timeout=None).execute(
            Try().context()
        )
    asked = deferral.value.trigger.serialize()[1]
    assert (asked["poll_interval_s"], asked["no_nodes_timeout_s"]) == (0.2, 30.0)


def test_intervals_that_are_shorter_already_stay_as_they_are(tmp_path: Path) -> None:
    with local_job_repository(tmp_path), pytest.raises(TaskDeferred) as deferral:
        operator(wait_for_completion=True, deferrable=True, poll_interval=0.1, no_nodes_timeout=5).execute(
            Try().context()
        )
    asked = deferral.value.trigger.serialize()[1]
    assert (asked["poll_interval_s"], asked["no_nodes_timeout_s"]) == (0.1, 5.0)


def test_a_wait_for_a_group_that_nobody_works_for_says_so_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testing, "TIMINGS", Timings(heartbeat_s=0.1, unreachable_after_s=0.5, remove_after_s=999))
    monkeypatch.setattr(testing, "WAITS", {"longest_poll_interval_s": 0.1, "longest_no_nodes_timeout_s": 0.5})
    with local_worker(tmp_path), pytest.raises(AirflowException, match="no live node of group 'elsewhere'"):
        operator(wait_for_completion=True, node_group="elsewhere").execute(Try().context())


def test_one_more_block_on_the_same_directory_is_one_more_node_or_another_group(tmp_path: Path) -> None:
    with local_worker(tmp_path) as jobs, local_worker(tmp_path), local_worker(tmp_path, node_group="elsewhere"):
        assert sorted(node.node_group for node in jobs.nodes.all()) == ["default", "default", "elsewhere"]
        job = jobs.submit("testing.greet", TWO, node_group="elsewhere")
        wait_until(lambda: jobs.results(job) == HELLO)
        assert {row.assigned_node for row in jobs.reading.partitions(job)} <= {
            node.node_id for node in jobs.nodes.all() if node.node_group == "elsewhere"
        }


def test_functions_stand_in_for_steps_only_inside_the_block(tmp_path: Path) -> None:
    with local_worker(tmp_path, steps={"testing.greet": lambda ctx: "stood in", "else": greet}):
        summary = operator(wait_for_completion=True).execute(Try().context())
        results = dict(JobRepositoryHook().iter_results(summary["job_execution_id"]))
        assert results == {"ada": "stood in", "grace": "stood in"}
    assert registry.find_step("testing.greet") is greet
    assert "else" not in registry.registered_steps()


def test_a_file_of_steps_may_be_imported_in_one_block_after_the_other(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with local_worker(tmp_path / name, imports=[str(EXAMPLES / "greetings.py")]) as jobs:
            jobs.submit("greet", TWO)
            wait_until(lambda jobs=jobs: len(jobs.results()) == 2)  # type: ignore[misc]
            assert jobs.results()["ada"] == {"greeting": "Hello, Ada!"}


def test_a_file_that_was_imported_under_another_name_keeps_its_state_and_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "steps_with_state.py"
    path.write_text(
        "from airflow_dbpartition.worker import step\n"
        "seen = []\n"
        "@step('testing.remember')\n"
        "def remember(ctx):\n"
        "    seen.append(ctx.partition_key)\n"
    )
    module = import_file(path, "unusual_prefix_steps_with_state")
    with local_job_repository(tmp_path) as jobs:
        jobs.submit("testing.remember", TWO)
        run_pending(jobs, imports=[str(path)])
    assert module.seen == ["ada", "grace"]
    assert import_file(path, "a_second_copy").remember is registry.find_step("testing.remember")


def test_a_step_of_another_file_still_clashes(tmp_path: Path) -> None:
    path = tmp_path / "steps_that_clash.py"
    path.write_text("from airflow_dbpartition.worker import step\n@step('testing.greet')\ndef greet(ctx): pass\n")
    refuses(r"registered twice, by .*test_testing_module.greet and steps_that_clash.greet", tmp_path, [str(path)])


# --- what is left behind -------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def open_files(path: Path) -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(link))
        except FileNotFoundError:
            continue
    return [file for file in found if file.startswith(str(path))]


def threads() -> set[str]:
    ours = {thread.name for thread in threading.enumerate() if thread.name.startswith(("dbpartition", "partition-"))}
    return ours - {"dbpartition-watchdog"}  # one for the whole process, which stays


def use(jobs: LocalJobRepository) -> None:
    assert operator(wait_for_completion=True).execute(Try().context())["partitions"]["completed"] == 2
    assert "dbpartition-local-worker" in threads()
    assert open_files(jobs.path)


def test_a_block_leaves_no_thread_no_connection_and_no_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with local_worker(tmp_path) as jobs:
        assert json.loads(os.environ[VARIABLE])["host"] == str(jobs.path)
        use(jobs)
    assert VARIABLE not in os.environ
    assert threads() == set()
    assert jobs.summary()["partitions"]["completed"] == 2
    assert open_files(jobs.path) == []


def test_a_block_that_ends_by_an_error_leaves_no_more_than_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "sqlite:///mine")

    def fail() -> None:
        with local_worker(tmp_path) as jobs:
            use(jobs)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.environ[VARIABLE] == "sqlite:///mine"
    assert threads() == set()
    assert open_files(tmp_path) == []


def test_what_still_runs_at_the_end_is_asked_to_stop(tmp_path: Path) -> None:
    entered = threading.Event()

    def work_until_stopped(ctx: PartitionContext) -> None:
        entered.set()
        while not ctx.should_stop:
            time.sleep(0.01)
        ctx.raise_if_stopping()

    with local_worker(tmp_path, steps={"endless": work_until_stopped}) as jobs:
        jobs.submit("endless", {"only": {}})
        assert entered.wait(30)
    assert threads() == set()
    assert "interrupted while it ran" in jobs.errors()["only"]


def test_one_block_after_the_other_finds_what_is_in_the_directory(tmp_path: Path) -> None:
    words = "there is no greeting for Grace"
    with local_worker(tmp_path, steps={"testing.greet": refuse_grace}), pytest.raises(AirflowException, match=words):
        operator(wait_for_completion=True).execute(Try(max_tries=1).context())
    with local_worker(tmp_path) as jobs:
        assert jobs.errors() == {"grace": jobs.errors("dag.task")["grace"]}
        assert operator(wait_for_completion=True).execute(Try(max_tries=1, try_number=2).context()) == jobs.summary()
        assert jobs.summary()["partitions"]["completed"] == 2
    with local_worker(tmp_path / "another") as jobs:
        assert jobs.report() == "no job was launched"


def test_a_worker_that_breaks_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_worker: Worker) -> bool:
        raise RuntimeError("the loop is broken")

    monkeypatch.setattr(Worker, "_claim", broken)
    with pytest.raises(RuntimeError, match="the loop is broken"), local_worker(tmp_path):
        wait_until(lambda: threads() == set())
    assert VARIABLE not in os.environ


# --- misuse --------------------------------------------------------------------------------------------------------


def refuses(words: str, directory: Path, *arguments: Any, **options: Any) -> None:
    with pytest.raises(ConfigurationError, match=words), local_worker(directory, *arguments, **options):
        pass
    assert threads() == set()


def test_two_directories_cannot_be_one_connection_at_once(tmp_path: Path) -> None:
    with local_job_repository(tmp_path / "outer") as outer:
        refuses(r"the connection 'dbpartition_default' is that of .*/outer/.* already", tmp_path / "inner")
        with local_job_repository(tmp_path / "inner", conn_id="other") as inner:
            assert JobRepositoryHook("other").address().url == inner.url
        with local_job_repository(tmp_path / "outer"):
            pass
        refuses("is that of .*/outer/.* already", tmp_path / "inner")
        assert JobRepositoryHook().address().url == outer.url
    with local_job_repository(tmp_path / "inner") as inner:
        assert JobRepositoryHook().address().url == inner.url


def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    refuses("cannot import no_such_steps: ModuleNotFoundError", tmp_path, ["no_such_steps"])
    assert VARIABLE not in os.environ


def test_a_text_is_no_list_of_modules(tmp_path: Path) -> None:
    refuses(r"expected imports to be a list of modules or \.py files, got 'steps'", tmp_path, "steps")


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        refuses(f"cannot keep a job repository in {directory}: ", directory)


def test_a_worker_without_steps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", {})
    refuses(r'there is no step: .*imports=.*@step\("name"\)', tmp_path)


def test_a_stand_in_has_to_be_a_function(tmp_path: Path) -> None:
    words = "expected step 'greet' to be a function or a ChunkStep, got 'hello'"
    refuses(words, tmp_path, steps={"greet": "hello"})


# --- run_pending ---------------------------------------------------------------------------------------------------


@pytest.fixture
def jobs(tmp_path: Path) -> Any:
    with local_job_repository(tmp_path) as jobs:
        yield jobs


def test_partitions_are_run_one_after_the_other_in_the_calling_thread(jobs: LocalJobRepository) -> None:
    ran: list[tuple[str, str]] = []

    def note(ctx: PartitionContext) -> None:
        ran.append((ctx.partition_key, threading.current_thread().name))

    keys = [f"p{number}" for number in range(6)]
    jobs.submit("note", {key: {} for key in keys})
    before = threading.active_count()
    assert run_pending(jobs, steps={"note": note}) == 6
    assert ran == [(key, threading.current_thread().name) for key in keys]
    assert threading.active_count() == before
    assert jobs.summary()["status"] == "COMPLETED"
    assert jobs.nodes.all() == []
    assert run_pending(jobs) == 0


def test_what_an_operator_has_launched_is_run(jobs: LocalJobRepository) -> None:
    job = operator().execute(Try().context())
    assert run_pending(jobs) == 2
    assert jobs.results(job) == jobs.results("dag.task") == HELLO


def test_what_the_command_line_has_submitted_is_run(jobs: LocalJobRepository, tmp_path: Path) -> None:
    (tmp_path / "two.json").write_text(json.dumps(TWO))
    with pytest.raises(SystemExit) as ended:
        cli.main(["submit", "testing.greet", "--partitions", str(tmp_path / "two.json"), "--database-url", jobs.url])
    assert ended.value.code == 0
    assert run_pending(jobs) == 2
    assert jobs.results("testing.greet") == HELLO


def test_a_retry_is_waited_for(jobs: LocalJobRepository) -> None:
    def at_the_third_attempt(ctx: PartitionContext) -> int:
        if ctx.attempt < 3:
            raise ValueError("not yet")
        return ctx.attempt

    jobs.submit("stubborn", {"only": {}}, settings=JobSettings(partition_retries=2, retry_delay_s=0.05))
    assert run_pending(jobs, steps={"stubborn": at_the_third_attempt}) == 3
    assert jobs.results() == {"only": 3}


def test_a_failure_does_not_keep_the_others_from_running(jobs: LocalJobRepository) -> None:
    jobs.submit("greet_some", {"grace": {"person": "Grace"}, "ada": {"person": "Ada"}})
    assert run_pending(jobs, steps={"greet_some": refuse_grace}) == 2
    assert jobs.results() == {"ada": "Hello, Ada!"}
    assert jobs.summary()["status"] == "FAILED"
    assert jobs.errors()["grace"].endswith("ValueError: there is no greeting for Grace")


def test_a_failure_with_fail_fast_stops_the_others(jobs: LocalJobRepository) -> None:
    jobs.submit(
        "greet_some", {"grace": {"person": "Grace"}, "ada": {"person": "Ada"}}, settings=JobSettings(fail_fast=True)
    )
    assert run_pending(jobs, steps={"greet_some": refuse_grace}) == 1
    assert jobs.summary()["partitions"]["stopped"] == 1


def test_a_step_that_nobody_knows_is_named_when_all_else_has_run(jobs: LocalJobRepository) -> None:
    jobs.submit("unheard_of", TWO)
    jobs.submit("testing.greet", TWO)
    with pytest.raises(UnknownStepError, match=r"partitions wait for 'unheard_of', .* \(registered: .*testing\.greet"):
        run_pending(jobs)
    assert jobs.results() == HELLO


def test_a_person_who_interrupts_ends_the_whole_run(jobs: LocalJobRepository) -> None:
    def interrupted(ctx: PartitionContext) -> None:
        raise KeyboardInterrupt

    jobs.submit("interrupted", TWO)
    with pytest.raises(KeyboardInterrupt):
        run_pending(jobs, steps={"interrupted": interrupted})
    assert jobs.summary()["partitions"]["pending"] == jobs.summary()["partitions"]["failed"] == 1
    assert jobs.nodes.all() == []


def test_chunks_and_transactions_are_run_as_on_a_worker(jobs: LocalJobRepository) -> None:
    numbers = Table("numbers", MetaData(), Column("number", Integer, primary_key=True))
    numbers.create(jobs.engine)

    def write(items: list[int], connection: Any) -> None:
        connection.execute(insert(numbers), [{"number": number} for number in items])

    def fail_after_writing(ctx: PartitionContext) -> None:
        with ctx.transaction() as connection:
            write([1000], connection)
            raise ValueError("rolled back")

    odd_tens = ChunkStep(reader=lambda ctx: range(100), processor=lambda n: n if n % 10 else None, writer=write)
    jobs.submit("chunks", {"all": {}})
    jobs.submit("fails", {"all": {}})
    run_pending(jobs, steps={"chunks": odd_tens, "fails": fail_after_writing})
    assert jobs.summary("chunks")["counters"]["write"] == 90
    assert jobs.summary("fails")["partitions"]["failed"] == 1
    with jobs.engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(numbers)).scalar_one() == 90


def test_a_job_that_was_not_launched_is_not_found(jobs: LocalJobRepository) -> None:
    with pytest.raises(JobExecutionNotFoundError, match="no job was launched yet"):
        jobs.summary()
    job = jobs.submit("testing.greet", TWO)
    with pytest.raises(JobExecutionNotFoundError, match=rf"no job 'dag.task' was launched; job execution {job} \("):
        jobs.results("dag.task")
    with pytest.raises(JobExecutionNotFoundError, match="there is no job execution 99"):
        jobs.errors(99)


def test_one_block_after_the_other_leaves_no_descriptor(tmp_path: Path) -> None:
    def use_once() -> int:
        with local_worker(tmp_path):
            pass
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    first = use_once()
    assert [use_once() for _ in range(3)] == [first] * 3
