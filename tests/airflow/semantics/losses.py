"""What the loss of a process does: of the task's own (stories), and of Airflow's (tales, with the harms)."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from airflow_dbpartition.demo.processes import SessionProcess, family, send_signal
from tests.airflow.deployment import Deployment, wait_until
from tests.airflow.semantics.clicks import assert_stopped_by_a_person
from tests.airflow.semantics.ways import (
    WORK,
    Way,
    assert_done_once_by_one_execution,
    launch,
    launch_and_wait,
    until_all_is_done,
    until_it_waits,
    until_lingering,
    until_planning,
)

# --- the task's own process -----------------------------------------------------------------------------------------


def task_killed_before_the_plan(deployment: Deployment, way: Way) -> None:
    run = launch(deployment, way, "killed_planning", variant="held")
    until_planning(run)

    os.kill(run.process_of(WORK), signal.SIGKILL)
    until_planning(run, times=2)
    assert run.executions() == []
    run.let_plan()

    until_all_is_done(run, way)
    assert_done_once_by_one_execution(run)


def task_killed_after_the_plan(deployment: Deployment, way: Way) -> None:
    run = launch(deployment, way, "killed_lingering", variant="lingering")
    until_lingering(run)

    os.kill(run.process_of(WORK), signal.SIGKILL)
    until_it_waits(run, way, try_number=2)
    assert run.execution().status.value == "STARTED"

    until_all_is_done(run, way)
    assert_done_once_by_one_execution(run)


def drain_while_it_waits(deployment: Deployment, way: Way) -> None:
    run = launch_and_wait(deployment, way, "drained", variant="retrying")

    os.kill(run.process_of(WORK), signal.SIGTERM)
    until_it_waits(run, way, try_number=2)
    assert "goes on without this task; a retry attaches to it" in run.log(WORK, try_number=1)
    assert run.execution().status.value == "STARTED"

    until_all_is_done(run, way)
    assert_done_once_by_one_execution(run)


def drain_before_it_leaves_its_slot(deployment: Deployment, way: Way) -> None:
    run = launch(deployment, way, "drained", variant="lingering")
    until_lingering(run)

    os.kill(run.process_of(WORK), signal.SIGTERM)
    until_it_waits(run, way)

    until_all_is_done(run, way)
    assert run.task(WORK)["try_number"] == 1
    assert_done_once_by_one_execution(run)


def clear_before_it_leaves_its_slot(deployment: Deployment, way: Way) -> None:
    """The old try is still in its process, and must neither succeed nor defer."""
    run = launch(deployment, way, "clear_lingering", variant="lingering")
    until_lingering(run)

    run.clear(WORK)
    until_it_waits(run, way, try_number=2)

    until_all_is_done(run, way)
    assert run.done() == {"p0": 1, "p1": 1}
    assert {execution.generation for execution in run.executions()} == {1}


# --- harms to what all share ----------------------------------------------------------------------------------------


def kill_the_scheduler(deployment: Deployment) -> None:
    """With every task that runs, as the loss of its host would."""
    deployment.airflow.kill("scheduler")
    deployment.airflow.start(["scheduler"])
    deployment.airflow.wait_until_healthy()


def kill_the_triggerer(deployment: Deployment) -> None:
    deployment.airflow.kill("triggerer")


def start_the_triggerer(deployment: Deployment) -> None:
    deployment.airflow.start(["triggerer"])
    deployment.airflow.wait_until_healthy()


def kill_and_start_the_triggerer(deployment: Deployment) -> None:
    kill_the_triggerer(deployment)
    start_the_triggerer(deployment)


def restart_the_triggerer(deployment: Deployment) -> None:
    deployment.airflow.restart("triggerer")


def restart_the_api_server(deployment: Deployment) -> None:
    deployment.airflow.restart("api-server")


class FrozenTriggerer:
    """The triggerer stands still for longer than Airflow waits for it, while a second one takes over."""

    def __init__(self) -> None:
        self._frozen: list[int] = []
        self._second: SessionProcess | None = None

    def freeze(self, deployment: Deployment) -> None:
        self._frozen = family(deployment.airflow.pid("triggerer"))
        for pid in self._frozen:
            send_signal(pid, signal.SIGSTOP)
        self._second = SessionProcess(
            [sys.executable, "-m", "airflow", "triggerer", "--skip-serve-logs"],
            log_path=deployment.airflow.log_path("second-triggerer"),
            environment=deployment.airflow.environment(),
            cwd=deployment.airflow.home,
        )

    def thaw(self, _deployment: Deployment) -> None:
        for pid in self._frozen:
            send_signal(pid, signal.SIGCONT)

    def end(self, deployment: Deployment) -> None:
        self.thaw(deployment)
        if self._second is not None:
            self._second.kill()


# --- tales: what comes before the harm, and what must hold after it --------------------------------------------------


def still_waits_after(deployment: Deployment, way: Way, label: str) -> Iterator[None]:
    """Nothing is stopped, the same try waits on, and the work is done once."""
    run = launch_and_wait(deployment, way, label)
    yield
    assert run.execution().status.value == "STARTED"
    until_all_is_done(run, way)
    assert run.task(WORK)["try_number"] == 1
    assert_done_once_by_one_execution(run)


def triggerer_killed(deployment: Deployment, way: Way) -> Iterator[None]:
    yield from still_waits_after(deployment, way, "triggerer_killed")


def triggerer_restarted(deployment: Deployment, way: Way) -> Iterator[None]:
    yield from still_waits_after(deployment, way, "triggerer_restarted")


def api_server_restarted(deployment: Deployment, way: Way) -> Iterator[None]:
    yield from still_waits_after(deployment, way, "api_server_restarted")


def api_server_restarted_under_a_process(deployment: Deployment, way: Way) -> Iterator[None]:
    """Whether Airflow gives the process up depends on how long the server is away; the work does not."""
    run = launch_and_wait(deployment, way, "api_server_restarted", variant="persistent")
    yield
    assert run.execution().status.value == "STARTED"
    until_all_is_done(run, way)
    assert_done_once_by_one_execution(run)


def api_server_restarted_while_it_plans(deployment: Deployment, way: Way) -> Iterator[None]:
    run = launch(deployment, way, "api_server_restarted", variant="persistent")
    until_planning(run)
    yield
    run.let_plan()
    until_all_is_done(run, way)
    assert_done_once_by_one_execution(run)


def scheduler_killed(deployment: Deployment, way: Way) -> Iterator[None]:
    """Only what ran in the scheduler's own slots is lost with it, and comes back as a new try."""
    run = launch_and_wait(deployment, way, "scheduler_killed")
    yield
    if way.waits_in == "process":
        until_it_waits(run, way, try_number=2)
    assert run.execution().status.value == "STARTED"
    until_all_is_done(run, way)
    if way.waits_in == "triggerer":
        assert run.task(WORK)["try_number"] == 1
    assert_done_once_by_one_execution(run)


def scheduler_killed_after_the_plan(deployment: Deployment, way: Way) -> Iterator[None]:
    run = launch(deployment, way, "scheduler_killed", variant="lingering")
    until_lingering(run)
    yield
    run.wait_for(WORK, "success", try_number=2)
    assert "attached to job execution" in run.log(WORK, try_number=2)
    until_all_is_done(run, way)
    assert_done_once_by_one_execution(run)


def triggerer_frozen(deployment: Deployment, way: Way) -> Iterator[None]:
    """Airflow 3.3 then calls `on_kill` on a healthy task; a later Airflow may not."""
    run = launch_and_wait(deployment, way, "triggerer_frozen")
    starts = f"trigger {run.dag_id}/{run.run_id}/{WORK}"
    yield
    wait_until(lambda: run.log(WORK).count(starts) > 1, "the second triggerer has taken over", every_s=0.7)
    yield
    with contextlib.suppress(AssertionError):  # where Airflow does not call it, there is nothing to see
        wait_until(lambda: "the task is still deferred" in run.log(WORK), "on_kill", timeout_s=20, every_s=0.7)
    assert run.execution().status.value == "STARTED"
    until_all_is_done(run, way)
    assert run.task(WORK)["try_number"] == 1
    assert_done_once_by_one_execution(run)
    yield


def mark_failed_without_triggerer(deployment: Deployment, way: Way) -> Iterator[None]:
    run = launch_and_wait(deployment, way, "mark_failed_alone")
    yield
    run.mark_failed(WORK)
    assert_stopped_by_a_person(run)
    assert run.ends() == "failed"
    yield
    assert_stopped_by_a_person(run)


def mark_success_without_triggerer(deployment: Deployment, way: Way) -> Iterator[None]:
    run = launch_and_wait(deployment, way, "mark_success_alone")
    yield
    run.mark(WORK, "success")
    assert_stopped_by_a_person(run)
    assert run.ends() == "success"
    yield
    assert_stopped_by_a_person(run)


def mark_the_run_failed_without_triggerer(deployment: Deployment, way: Way) -> Iterator[None]:
    run = launch_and_wait(deployment, way, "run_failed_alone")
    yield
    run.mark_run("failed")
    assert_stopped_by_a_person(run)
    yield
    assert run.state(WORK) == "failed"


def clear_without_triggerer(deployment: Deployment, way: Way) -> Iterator[None]:
    """Nobody tells of a clear but the new try, which takes the execution over."""
    run = launch_and_wait(deployment, way, "clear_alone")
    before = run.execution().owner_token
    yield
    run.clear(WORK)
    run.wait_for(WORK, "deferred", try_number=2)
    assert run.execution().status.value == "STARTED"
    assert run.execution().owner_token not in (None, before)
    yield
    run.wait_for_trigger(WORK, try_number=2)
    until_all_is_done(run, way)
    assert_done_once_by_one_execution(run)
