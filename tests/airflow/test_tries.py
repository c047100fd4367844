"""Operator and sensor over their tries, against a real repository: retry, clear, deadline, signal, resume."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSensorTimeout,
    AirflowSkipException,
    TaskDeferralTimeout,
    TaskDeferred,
)

from airflow_dbpartition.domain import JobExecution
from airflow_dbpartition.errors import OwnershipLostError
from airflow_dbpartition.launching import Launcher
from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.sensors import PartitionCompletionSensor
from airflow_dbpartition.task_outcome import InterruptedTaskError
from tests.airflow.worlds import Try, connection_to, define
from tests.databases import Database, run_sql, with_user
from tests.scenarios import (
    add_node,
    claim,
    claim_one,
    complete,
    fail_all,
    finish_all,
    remove,
    statuses,
    submit,
    sweep,
)

TWO: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
PATIENCE_S = 30.0


def operator(**options: Any) -> PartitionedStepOperator:
    return PartitionedStepOperator(
        **{"task_id": "task", "step": "work", "partitioner": TWO, "repository_conn_id": "repo", **options}
    )


def waiting(**options: Any) -> PartitionedStepOperator:
    return operator(**{"wait_for_completion": True, "poll_interval": 0.1, "deferrable": False, **options})


def sensor(job_execution_id: int, **options: Any) -> PartitionCompletionSensor:
    return PartitionCompletionSensor(
        **{
            "task_id": "wait",
            "job_execution_id": job_execution_id,
            "repository_conn_id": "repo",
            "poke_interval": 0.2,
            "deferrable": False,
            **options,
        }
    )


def execute(made: Any, this: Try) -> Any:
    return made.execute(this.context())


def latest(repository: JobRepository) -> JobExecution:
    return repository.reading.recent(limit=1)[0]


def all_executions(repository: JobRepository) -> list[JobExecution]:
    return list(reversed(repository.reading.recent(limit=100)))


def says(monkeypatch: pytest.MonkeyPatch, state: str | None) -> None:
    """Let Airflow answer that the task is in this state; None: it cannot be asked."""

    def states(self: Try, **asked: Any) -> dict[str, dict[str, str]]:
        if state is None:
            raise ConnectionError("the API server is away")
        return {self.run_id: {asked["task_ids"][0]: state}}

    monkeypatch.setattr(Try, "get_task_states", states, raising=False)


@contextlib.contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Run something beside the test, and hear of its failure."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(act)
        yield
        done.result()


def when(condition: Callable[[], Any], act: Callable[[], Any]) -> Callable[[], None]:
    """Act once the condition holds."""

    def run() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        act()

    return run


def is_launched(repository: JobRepository) -> Callable[[], bool]:
    return lambda: bool(repository.reading.recent(limit=1))


# --- retry and clear of the operator -------------------------------------------------------------------------------


def test_a_retry_attaches_to_what_still_runs_and_takes_it_over(connected: JobRepository) -> None:
    first = Try(max_tries=1)
    launched = execute(operator(), first)
    retried = first.retried()

    assert execute(operator(), retried) == launched
    assert latest(connected).owner_token == str(retried.id)
    with pytest.raises(OwnershipLostError):
        connected.executions.stop(launched, owner_token=str(first.id), reason="the old try was killed")


def test_a_retry_returns_what_has_completed(connected: JobRepository) -> None:
    add_node(connected)
    first = Try(max_tries=1)
    launched = execute(operator(), first)
    finish_all(connected, launched)

    assert execute(operator(), first.retried()) == launched
    assert execute(waiting(), first.retried())["partitions"]["completed"] == 2
    assert len(all_executions(connected)) == 1


def test_a_retry_restarts_only_what_failed(connected: JobRepository) -> None:
    add_node(connected)
    first = Try(max_tries=1)
    launched = execute(operator(), first)
    complete(connected, claim_one(connected))
    fail_all(connected, launched)

    restarted = execute(operator(), first.retried())
    assert restarted != launched
    assert statuses(connected, restarted) == {"PENDING": 1}


def test_a_clear_does_a_completed_job_again_and_restarts_a_failed_one(connected: JobRepository) -> None:
    add_node(connected)
    first = Try()
    launched = execute(operator(), first)
    finish_all(connected, launched)

    cleared = first.cleared()
    again = execute(operator(), cleared)
    assert (latest(connected).job_execution_id, latest(connected).generation) == (again, 2)
    complete(connected, claim_one(connected))
    fail_all(connected, again)

    restarted = execute(operator(), cleared.cleared())
    assert (latest(connected).job_execution_id, latest(connected).generation) == (restarted, 2)
    assert statuses(connected, restarted) == {"PENDING": 1}


def test_on_clear_rerun_does_all_of_a_failed_job_again(connected: JobRepository) -> None:
    add_node(connected)
    first = Try(max_tries=1)
    launched = execute(operator(on_clear="rerun", retries=1), first)
    complete(connected, claim_one(connected))
    fail_all(connected, launched)

    retried = first.retried()
    assert statuses(connected, execute(operator(on_clear="rerun", retries=1), retried)) == {"PENDING": 1}
    fail_all(connected, latest(connected).job_execution_id)
    again = execute(operator(on_clear="rerun", retries=1), retried.cleared(retries=1))
    assert statuses(connected, again) == {"PENDING": 2}
    assert latest(connected).generation == 2


def test_what_was_lost_and_may_have_run_waits_for_a_person(connected: JobRepository) -> None:
    add_node(connected)
    first = Try(max_tries=1)
    launched = execute(operator(retries=1), first)
    claim(connected, limit=2)
    remove(connected, "a")
    sweep(connected)
    assert statuses(connected, launched) == {"FAILED": 2}

    with pytest.raises(AirflowFailException, match=r"may have done their work.*clear the task in Airflow"):
        execute(operator(retries=1), first.retried())
    restarted = execute(operator(retries=1), first.retried().cleared(retries=1))
    assert statuses(connected, restarted) == {"PENDING": 2}


def test_an_abandoned_job_is_only_done_again_by_a_clear(connected: JobRepository) -> None:
    add_node(connected)
    first = Try(max_tries=1)
    launched = execute(operator(retries=1), first)
    fail_all(connected, launched)
    connected.executions.abandon(launched)

    with pytest.raises(AirflowFailException, match="was abandoned"):
        execute(operator(retries=1), first.retried())
    assert execute(operator(retries=1), first.retried().cleared(retries=1)) != launched


def test_a_retry_opens_no_new_window_but_a_clear_does(connected: JobRepository) -> None:
    add_node(connected)
    first = Try(max_tries=1)
    launched = execute(operator(timeout=0.2, retries=1), first)
    fail_all(connected, launched)
    when(lambda: connected.reading.progress([launched])[launched].deadline_passed, lambda: None)()

    with pytest.raises(AirflowFailException, match=r"deadline .* has passed, and a retry opens no new one"):
        execute(operator(timeout=60, retries=1), first.retried())
    execute(operator(timeout=60, retries=1), first.retried().cleared(retries=1))
    deadline = latest(connected).deadline
    assert deadline is not None
    assert deadline > datetime.now(timezone.utc) + timedelta(seconds=30)


def test_a_restart_within_the_window_keeps_the_deadline(connected: JobRepository) -> None:
    add_node(connected)
    first = Try(max_tries=1)
    launched = execute(operator(timeout=60), first)
    deadline = latest(connected).deadline
    fail_all(connected, launched)
    execute(operator(timeout=60), first.retried())
    assert latest(connected).deadline == deadline


def test_two_tries_at_once_launch_one_execution(connected: JobRepository) -> None:
    tries = [Try() for _ in range(6)]
    barrier = threading.Barrier(len(tries))

    def launch(this: Try) -> int:
        barrier.wait(PATIENCE_S)
        return int(execute(operator(), this))

    with ThreadPoolExecutor(len(tries)) as pool:
        assert len(set(pool.map(launch, tries))) == 1
    assert len(all_executions(connected)) == 1
    assert statuses(connected, latest(connected).job_execution_id) == {"PENDING": 2}


def test_runs_and_mapped_tasks_have_jobs_of_their_own_but_parameters_can_join_them(connected: JobRepository) -> None:
    ids = {
        execute(operator(), Try()),
        execute(operator(), Try(run_id="another")),
        execute(operator(), Try(map_index=0)),
        execute(operator(), Try(map_index=1)),
        execute(operator(), Try(task_id="another")),
        execute(operator(), Try(dag_id="another")),
    }
    assert len(ids) == 6
    by_day = operator(job_name="daily", job_parameters={"day": "2026-01-01"})
    assert execute(by_day, Try()) == execute(by_day, Try(run_id="another", dag_id="other"))


def test_a_very_long_name_is_shortened_and_stays_unique(connected: JobRepository) -> None:
    execute(operator(), Try(dag_id="d" * 240, task_id="t" * 240))
    execute(operator(), Try(dag_id="d" * 240, task_id="t" * 239 + "u"))
    names = {execution.job_name for execution in all_executions(connected)}
    assert len(names) == 2
    assert {len(name) for name in names} == {250}


def test_a_template_that_comes_out_as_text_is_no_partitioner(connected: JobRepository) -> None:
    made = operator(partitioner="{{ partitions }}")
    made.partitioner = "{'a': {}}"  # as a DAG without native objects renders it
    with pytest.raises(AirflowFailException, match=r"task 'task': .*render_template_as_native_obj=True"):
        execute(made, Try())
    assert all_executions(connected) == []


# --- waiting -------------------------------------------------------------------------------------------------------


def test_failed_partitions_may_be_retried_but_a_persons_stop_may_not(connected: JobRepository) -> None:
    add_node(connected)
    this = Try()
    with (
        meanwhile(when(is_launched(connected), lambda: fail_all(connected, latest(connected).job_execution_id))),
        pytest.raises(AirflowException, match="2 of 2 partitions failed") as caught,
    ):
        execute(waiting(), this)
    assert not isinstance(caught.value, AirflowFailException)

    other = Try(run_id="other")
    launched = execute(operator(), other)
    connected.executions.stop(launched, reason="a person said so")
    with pytest.raises(AirflowException, match="was stopped"):
        execute(sensor(launched), other.of("wait"))


def test_a_person_who_stops_what_is_waited_for_ends_the_task_without_a_retry(connected: JobRepository) -> None:
    def stop() -> None:
        connected.executions.stop(latest(connected).job_execution_id, reason="a person said so")

    with (
        meanwhile(when(is_launched(connected), stop)),
        pytest.raises(AirflowFailException, match=r"was stopped \(a person said so\)"),
    ):
        execute(waiting(), Try())


@pytest.mark.parametrize(
    ("state", "on_sigterm", "status"),
    [
        ("running", "detach", "STARTING"),
        ("running", "stop", "STOPPED"),
        ("failed", "detach", "STOPPED"),
        ("removed", "detach", "STOPPED"),
        (None, "detach", "STARTING"),
        (None, "stop", "STOPPED"),
    ],
)
@pytest.mark.parametrize("kind", ["operator", "sensor"])
def test_a_drained_process_detaches_and_a_killed_one_stops_and_neither_returns(
    connected: JobRepository,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    state: str | None,
    on_sigterm: str,
    status: str,
) -> None:
    says(monkeypatch, state)
    this = Try()
    made: Any
    if kind == "operator":
        made = waiting(on_sigterm=on_sigterm)
    else:
        made, this = sensor(execute(operator(), this), on_sigterm=on_sigterm), this.of("wait")
    with (
        meanwhile(when(is_launched(connected), made.on_kill)),
        pytest.raises(InterruptedTaskError, match="asked to end"),
    ):
        execute(made, this)
    assert latest(connected).status.value == status


def leaving(kind: str, this: Try) -> tuple[Any, Try]:
    """A task that gives its slot back by itself once it has launched or looked, and its try."""
    if kind == "plan":
        return operator(), this
    if kind == "deferred operator":
        return waiting(deferrable=True), this
    options: dict[str, Any] = {"deferrable": True} if kind == "deferred sensor" else {"mode": "reschedule"}
    return sensor(execute(operator(), this), **options), this.of("wait")


LEAVING = ["plan", "deferred operator", "deferred sensor", "rescheduled sensor"]


@pytest.mark.parametrize("kind", LEAVING)
def test_a_drained_process_that_leaves_by_itself_spends_no_retry(
    connected: JobRepository, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    says(monkeypatch, "running")
    made, this = leaving(kind, Try())
    made.on_kill()
    if kind == "plan":
        assert execute(made, this) == latest(connected).job_execution_id
    else:
        with pytest.raises((TaskDeferred, AirflowRescheduleException)):
            execute(made, this)
    assert latest(connected).status.value == "STARTING"


@pytest.mark.parametrize("kind", LEAVING)
def test_a_killed_process_that_would_leave_by_itself_stops_the_execution(
    connected: JobRepository, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    says(monkeypatch, "failed")
    made, this = leaving(kind, Try())
    made.on_kill()
    with pytest.raises(InterruptedTaskError, match="is STOPPED"):
        execute(made, this)
    assert latest(connected).status.value == "STOPPED"


def test_an_outage_of_the_database_is_waited_out(
    postgres: Database, postgres_repository: JobRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_node(postgres_repository)
    user = f"manager_{secrets.token_hex(4)}"
    run_sql(postgres, f"CREATE ROLE {user} LOGIN SUPERUSER")
    try:
        define(monkeypatch, "repo", connection_to(with_user(postgres, user)))
        made = waiting()
        warned = threading.Event()

        def warning(message: str, *words: object) -> None:
            if "the wait goes on" in message:
                warned.set()

        monkeypatch.setattr(made.log, "warning", warning)

        def outage() -> None:
            run_sql(
                postgres,
                f"ALTER ROLE {user} NOLOGIN",
                f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{user}'",
            )
            assert warned.wait(PATIENCE_S)
            finish_all(postgres_repository, latest(postgres_repository).job_execution_id)
            run_sql(postgres, f"ALTER ROLE {user} LOGIN")

        with meanwhile(when(is_launched(postgres_repository), outage)):
            assert execute(made, Try())["partitions"]["completed"] == 2
        assert warned.is_set()
    finally:
        run_sql(postgres, f"DROP ROLE {user}")


def test_progress_is_logged_when_it_changes_and_only_then(
    connected: JobRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_node(connected)
    made = waiting(poll_interval=0.05)
    said: list[str] = []
    monkeypatch.setattr(made.log, "info", lambda message, *words: said.append(message % words if words else message))

    def work() -> None:
        for done in ("0/2 partitions done, 2 waiting", "1/2 partitions done, 1 waiting"):
            when(lambda: any(done in line for line in said), lambda: None)()  # noqa: B023 - called at once
            looks = len(said)
            time.sleep(0.3)  # some more looks, which show nothing new
            assert len(said) == looks
            complete(connected, claim_one(connected))
        connected.executions.finalise(latest(connected).job_execution_id)

    with meanwhile(when(is_launched(connected), work)):
        execute(made, Try())
    assert [line for line in said if "0/2 partitions done, 2 waiting" in line] != []
    assert len(said) == len(set(said))


def test_a_deadline_stops_the_execution_and_fails_without_a_retry(connected: JobRepository) -> None:
    with pytest.raises(AirflowFailException, match=r"its deadline has passed: .*is STOPPED"):
        execute(waiting(timeout=0.5), Try())
    assert latest(connected).status.value == "STOPPED"


# --- deferring -----------------------------------------------------------------------------------------------------


def deferred(made: Any, this: Try) -> TaskDeferred:
    with pytest.raises(TaskDeferred) as caught:
        execute(made, this)
    return caught.value


def resume(made: Any, this: Try, wait: TaskDeferred, event: dict[str, Any] | None = None) -> Any:
    return made.resume_execution(wait.method_name, {**(wait.kwargs or {}), "event": event}, this.context())


def test_what_has_ended_already_is_not_deferred(connected: JobRepository) -> None:
    assert execute(waiting(partitioner={}, deferrable=True), Try())["partitions"]["total"] == 0


def test_a_resumed_task_believes_the_database_and_not_the_event(connected: JobRepository) -> None:
    add_node(connected)
    this = Try()
    made = waiting(deferrable=True)
    wait = deferred(made, this)
    lie = {"status": "completed", "message": "all is well"}

    with pytest.raises(TaskDeferred):  # it still runs: the wait goes on
        resume(made, this, wait, lie)
    fail_all(connected, latest(connected).job_execution_id)
    with pytest.raises(AirflowException, match="2 of 2 partitions failed"):
        resume(made, this, wait, lie)


def test_a_resumed_task_returns_the_summary(connected: JobRepository) -> None:
    add_node(connected)
    this = Try()
    made = waiting(deferrable=True)
    wait = deferred(made, this)
    finish_all(connected, latest(connected).job_execution_id)
    assert resume(made, this, wait)["partitions"]["completed"] == 2


@pytest.mark.parametrize("kind", ["operator", "sensor"])
def test_each_deferral_has_only_what_is_left_of_the_time(connected: JobRepository, kind: str) -> None:
    this = Try()
    made: Any = waiting(deferrable=True, timeout=60)
    if kind == "sensor":
        made, this = sensor(execute(operator(), this), deferrable=True, timeout=60), this.of("wait")
    first = deferred(made, this)
    time.sleep(0.3)
    with pytest.raises(TaskDeferred) as caught:
        resume(made, this, first)
    assert first.timeout is not None
    assert caught.value.timeout is not None
    assert caught.value.timeout <= first.timeout - timedelta(seconds=0.3)


@pytest.mark.parametrize("kind", ["operator", "sensor"])
def test_a_deferral_that_times_out_stops_the_execution(
    connected: JobRepository, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    this = Try()
    made: Any = waiting(deferrable=True, timeout=60)
    if kind == "sensor":
        made, this = sensor(execute(operator(), this), deferrable=True, timeout=60), this.of("wait")
    deferred(made, this)
    expected = AirflowSensorTimeout if kind == "sensor" else AirflowFailException
    with pytest.raises(expected, match="timed out"):
        made.resume_execution("__fail__", {"error": "Trigger timeout"}, this.context())
    assert latest(connected).status.value == "STOPPED"


def test_a_deferral_that_times_out_after_the_end_is_a_success(connected: JobRepository) -> None:
    add_node(connected)
    this = Try()
    made = waiting(deferrable=True, timeout=60)
    deferred(made, this)
    finish_all(connected, latest(connected).job_execution_id)
    assert (
        made.resume_execution("__fail__", {"error": "Trigger timeout"}, this.context())["partitions"]["completed"] == 2
    )


def test_the_trigger_of_a_task_carries_its_token_and_a_watchers_does_not(connected: JobRepository) -> None:
    this = Try()
    mine: Any = deferred(waiting(deferrable=True), this).trigger
    assert mine.owner_token == str(this.id)
    elsewhere = Try(run_id="elsewhere", task_id="wait")
    theirs: Any = deferred(sensor(latest(connected).job_execution_id, deferrable=True), elsewhere).trigger
    assert theirs.owner_token is None


# --- the sensor ----------------------------------------------------------------------------------------------------


def test_a_sensor_of_the_same_run_owns_and_one_elsewhere_only_watches(connected: JobRepository) -> None:
    this = Try()
    launched = execute(operator(), this)
    elsewhere = Try(run_id="elsewhere", task_id="wait")
    with pytest.raises(AirflowSensorTimeout, match="goes on: it belongs to another run"):
        execute(sensor(launched, timeout=0.3), elsewhere)
    assert latest(connected).status.value == "STARTING"
    assert latest(connected).owner_token == str(this.id)

    with pytest.raises(AirflowSensorTimeout, match="is STOPPED"):
        execute(sensor(launched, timeout=0.3), this.of("wait"))
    assert latest(connected).status.value == "STOPPED"


def test_a_retried_sensor_restarts_once_and_one_elsewhere_never(connected: JobRepository) -> None:
    add_node(connected)
    this = Try()
    launched = execute(operator(), this)
    fail_all(connected, launched)
    first = this.of("wait", max_tries=1)
    with pytest.raises(AirflowException, match="FAILED"):
        execute(sensor(launched), first)
    with pytest.raises(AirflowException, match="FAILED"):
        execute(sensor(launched), Try(run_id="elsewhere", try_number=2, max_tries=1))
    with pytest.raises(AirflowException, match="FAILED"):
        execute(sensor(launched, restart_failed=False), first.retried())
    assert len(all_executions(connected)) == 1

    retried = first.retried()
    wait = deferred(sensor(launched, deferrable=True), retried)
    assert len(all_executions(connected)) == 2
    fail_all(connected, latest(connected).job_execution_id)
    with pytest.raises(AirflowException, match="FAILED"):
        resume(sensor(launched, deferrable=True), retried, wait)
    with pytest.raises(AirflowException, match="FAILED"):
        execute(sensor(launched, deferrable=True), retried)  # the same try once more, as after a reschedule
    assert len(all_executions(connected)) == 2


@pytest.mark.parametrize("kind", ["operator", "sensor"])
def test_a_clear_waits_until_a_stop_is_carried_out_and_restarts(connected: JobRepository, kind: str) -> None:
    add_node(connected)
    this = Try()
    launched = execute(operator(), this)
    taken = claim(connected, limit=2)
    connected.executions.stop(launched, reason="the task was killed")
    assert latest(connected).status.value == "STOPPING"
    made: Any = operator()
    if kind == "sensor":
        made, this = sensor(launched, deferrable=True), this.of("wait")

    def let_go() -> None:
        for one in taken:
            connected.settlements.stop(one)

    with meanwhile(let_go), contextlib.suppress(TaskDeferred):
        execute(made, this.cleared())
    first, second = all_executions(connected)
    assert (first.status.value, second.status.value) == ("STOPPED", "STARTING")
    assert (first.generation, second.generation) == (1, 1)
    assert statuses(connected, second.job_execution_id) == {"PENDING": 2}


class Store(dict[str, Any]):
    """What Airflow keeps of a task over its tries."""

    def set(self, key: str, value: Any) -> None:
        self[key] = value


def look(made: PartitionCompletionSensor, this: Try, store: Any) -> None:
    context: Any = {**this.context(), "task_state_store": store}
    with pytest.raises((TaskDeferred, AirflowRescheduleException)):
        made.execute(context)


MODES: dict[str, dict[str, Any]] = {"deferred": {"deferrable": True}, "reschedule": {"mode": "reschedule"}}


@pytest.mark.parametrize("mode", MODES)
def test_a_sensor_that_is_cleared_and_has_another_input_stops_what_it_waited_for(
    connected: JobRepository, mode: str
) -> None:
    add_node(connected)
    old, new = (execute(operator(), Try(map_index=map_index)) for map_index in range(2))
    this, store = Try(task_id="wait", map_index=0), Store()
    look(sensor(old, **MODES[mode]), this, store)
    look(sensor(new, **MODES[mode]), this.cleared(), store)

    stopped, other = all_executions(connected)
    assert (stopped.status.value, stopped.exit_message) == ("STOPPED", f"its sensor waits for job execution {new} now")
    assert (other.status.value, other.owner_token) == ("STARTING", store["dbpartition"]["owner_token"])


@pytest.mark.parametrize("mode", MODES)
def test_sensors_that_change_places_lose_nothing(connected: JobRepository, mode: str) -> None:
    add_node(connected)
    jobs = [execute(operator(), Try(map_index=map_index)) for map_index in range(2)]
    tries = [Try(task_id="wait", map_index=map_index) for map_index in range(2)]
    stores = [Store(), Store()]
    for job, this, store in zip(jobs, tries, stores, strict=True):
        look(sensor(job, **MODES[mode]), this, store)
    for job, this, store in zip(reversed(jobs), tries, stores, strict=True):
        look(sensor(job, **MODES[mode]), this.cleared(), store)

    active = connected.reading.recent(limit=10, active=True)
    assert {execution.job_name for execution in active} == {"dag.task"}
    assert {execution.owner_token for execution in active} == {store["dbpartition"]["owner_token"] for store in stores}


def test_a_sensor_elsewhere_stops_nothing_when_it_has_another_input(connected: JobRepository) -> None:
    add_node(connected)
    old, new = (execute(operator(), Try(map_index=map_index)) for map_index in range(2))
    this, store = Try(run_id="another", task_id="wait"), Store()
    look(sensor(old, deferrable=True), this, store)
    look(sensor(new, deferrable=True), this.cleared(), store)
    assert [execution.status.value for execution in all_executions(connected)] == ["STARTING", "STARTING"]


@pytest.mark.parametrize(
    "stored", [None, "words", {}, {"job_execution_id": "1", "owner_token": 2}, {"job_execution_id": 999}]
)
def test_a_store_that_says_nothing_of_use_changes_nothing(connected: JobRepository, stored: Any) -> None:
    add_node(connected)
    launched = execute(operator(), Try())
    look(sensor(launched, deferrable=True), Try(task_id="wait").cleared(), Store(dbpartition=stored))
    assert latest(connected).status.value == "STARTING"


def test_a_store_that_cannot_be_read_does_not_fail_the_sensor(connected: JobRepository) -> None:
    class Broken(Store):
        def get(self, *_: Any) -> Any:
            raise RuntimeError("away")

    add_node(connected)
    launched = execute(operator(), Try())
    look(sensor(launched, deferrable=True), Try(task_id="wait").cleared(), Broken())
    assert latest(connected).status.value == "STARTING"


@pytest.mark.parametrize("kind", ["operator", "sensor"])
def test_a_clear_takes_what_has_completed_in_spite_of_a_stop(connected: JobRepository, kind: str) -> None:
    add_node(connected)
    this = Try()
    launched = execute(operator(), this)
    taken = claim(connected, limit=2)
    connected.executions.stop(launched, reason="the task was killed")
    made: Any = waiting()
    if kind == "sensor":
        made, this = sensor(launched), this.of("wait")

    def finish() -> None:
        for one in taken:
            complete(connected, one)

    with meanwhile(finish):
        summary = execute(made, this.cleared())
    assert (summary["job_execution_id"], summary["partitions"]["completed"]) == (launched, 2)
    assert len(all_executions(connected)) == 1


def test_a_sensor_takes_what_somebody_else_has_restarted_and_completed(
    connected: JobRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_node(connected)
    this = Try()
    launched = execute(operator(), this)
    fail_all(connected, launched)
    restart = Launcher.restart

    def restart_too_late(launcher: Launcher, job_execution_id: int, **options: Any) -> Any:
        finish_all(connected, restart(launcher, job_execution_id).job_execution_id)
        return restart(launcher, job_execution_id, **options)

    monkeypatch.setattr(Launcher, "restart", restart_too_late)
    summary = execute(sensor(launched), this.of("wait").cleared())
    assert summary["partitions"]["completed"] == 2
    assert len(all_executions(connected)) == 2


@pytest.mark.parametrize("taken", [0, 2], ids=["pending", "claimed"])
@pytest.mark.parametrize("kind", ["operator", "sensor"])
def test_a_cleared_try_restarts_what_the_old_one_stopped_between_its_look_and_its_attaching(
    connected: JobRepository, monkeypatch: pytest.MonkeyPatch, kind: str, taken: int
) -> None:
    add_node(connected)
    this = Try()
    launched = execute(operator(), this)
    claims = claim(connected, limit=taken) if taken else []
    made: Any = operator()
    if kind == "sensor":
        made, this = sensor(launched, deferrable=True), this.of("wait")
    kind_of_executions: Any = type(connected.executions)
    attach = kind_of_executions.attach

    def attach_too_late(executions: Any, job_execution_id: int, **options: Any) -> Any:
        monkeypatch.setattr(kind_of_executions, "attach", attach)
        connected.executions.stop(job_execution_id, reason="the old try was killed")
        return attach(executions, job_execution_id, **options)

    def let_go() -> None:
        for one in claims:
            connected.settlements.stop(one)

    monkeypatch.setattr(kind_of_executions, "attach", attach_too_late)
    is_told = when(lambda: latest(connected).status.value == "STOPPING" or not claims, let_go)
    with meanwhile(is_told), contextlib.suppress(TaskDeferred):
        execute(made, this.cleared())
    first, second = all_executions(connected)
    assert (first.status.value, second.status.value) == ("STOPPED", "STARTING")
    assert statuses(connected, second.job_execution_id) == {"PENDING": 2}


def test_a_rescheduled_sensor_looks_once_and_goes(connected: JobRepository) -> None:
    add_node(connected)
    this = Try()
    launched = execute(operator(), this)
    wait = sensor(launched, mode="reschedule")
    with pytest.raises(AirflowRescheduleException) as caught:
        execute(wait, this.of("wait"))
    # Airflow fails a task that comes back before its scheduler has heard of its going.
    assert caught.value.reschedule_date > datetime.now(timezone.utc) + timedelta(seconds=4)
    finish_all(connected, launched)
    assert execute(wait, this.of("wait"))["partitions"]["completed"] == 2


@pytest.mark.parametrize(
    ("options", "error"), [({}, AirflowSensorTimeout), ({"soft_fail": True}, AirflowSkipException)]
)
def test_a_rescheduled_sensor_times_out_over_all_its_looks(
    connected: JobRepository, options: dict[str, Any], error: type[Exception]
) -> None:
    this = Try()
    launched = execute(operator(), this)
    again = this.of("wait", first_reschedule=datetime.now(timezone.utc) - timedelta(seconds=90))
    with pytest.raises(error, match="timed out after 60 s"):
        execute(sensor(launched, mode="reschedule", timeout=60, **options), again)
    assert latest(connected).status.value == "STOPPED"


@pytest.mark.parametrize("options", [{"mode": "poke"}, {"mode": "reschedule"}, {"deferrable": True}])
@pytest.mark.parametrize(
    ("how", "soft"), [({"soft_fail": True}, AirflowException), ({"never_fail": True}, AirflowSkipException)]
)
def test_soft_fail_fails_over_failed_partitions_in_every_mode_and_never_fail_skips(
    connected: JobRepository, options: dict[str, Any], how: dict[str, Any], soft: type[Exception]
) -> None:
    add_node(connected)
    launched = submit(connected, 1).job_execution_id
    fail_all(connected, launched)
    with pytest.raises(soft, match="1 of 1 partitions failed") as caught:
        execute(sensor(launched, **how, **options), Try(task_id="wait"))
    assert type(caught.value) is soft


@pytest.mark.parametrize("options", [{"mode": "poke"}, {"mode": "reschedule"}, {"deferrable": True}])
def test_an_execution_that_is_not_there_fails_the_sensor_in_every_mode(
    connected: JobRepository, options: dict[str, Any]
) -> None:
    with pytest.raises(AirflowException, match="there is no job execution 4711"):
        execute(sensor(4711, **options), Try(task_id="wait"))


def test_a_sensor_says_so_when_nobody_is_there_to_work(
    database: Database, repository: JobRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {"heartbeat_s": 0.1, "unreachable_after_s": 0.4, "remove_after_s": 0.6}
    define(monkeypatch, "repo", connection_to(database, **quick))
    launched = submit(repository, 1).job_execution_id
    with pytest.raises(AirflowException, match=r"no live node of group 'default' with the step 'work' for 0.5 s"):
        execute(sensor(launched, no_nodes_timeout=0.5), Try(task_id="wait"))
    assert statuses(repository, launched) == {"PENDING": 1}


def test_resuming_knows_airflows_own_error(connected: JobRepository) -> None:
    """The two deferral tests above stand on this: Airflow says `__fail__` with these very words."""
    from airflow.sdk import BaseOperator

    with pytest.raises(TaskDeferralTimeout):
        BaseOperator(task_id="plain").resume_execution("__fail__", {"error": "Trigger timeout"}, Try().context())
