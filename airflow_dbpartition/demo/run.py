"""The demo: a real partitioned job through real Airflow, with one worker killed on the way, checked at the end."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from airflow_dbpartition.demo.flights import compare
from airflow_dbpartition.demo.processes import DemoError
from airflow_dbpartition.demo.stage import Stage
from airflow_dbpartition.demo.watching import Picture, Screen, look
from airflow_dbpartition.domain import PartitionStatus
from airflow_dbpartition.errors import DbPartitionError

DAG_ID = "reconcile_flights"
JOB_NAME = "reconcile_flights.reconcile"
PAGE_PAUSE_S = 0.2
KILL_AFTER = 0.3
RUN_TIMEOUT_S = 180.0
EXIT_ERROR = 1
EXIT_WORK_FAILED = 3


@dataclass
class Figures:
    """What the demo measured."""

    run_s: float = 0.0
    flights: int = 0
    partitions: int = 0
    killed: str | None = None
    replaced_s: float | None = None
    failover_s: float | None = None
    whole_s: float = 0.0


def run_demo(*, keep: bool = False, directory: Path | None = None, kill: bool = True) -> int:
    """Run it and return the exit code: 0, or 3 where the result is wrong or the run failed, 1 where it could not run.

    Args:
        keep: leave everything running until Ctrl-C.
        directory: where data and logs go; None = a temporary one, removed when all went well.
        kill: SIGKILL one worker in mid-run.
    """
    console = Console(highlight=False, soft_wrap=True)
    place = directory or Path(tempfile.mkdtemp(prefix="dbpartition-demo-"))
    _terminate_as_interrupt()
    began = time.monotonic()
    code = EXIT_ERROR
    try:
        console.print(f"[bold]airflow-dbpartition demo[/bold]  (logs in {place})")
        with Stage(directory=place, page_pause_s=PAGE_PAUSE_S, say=lambda line: console.print(f"  {line}")) as stage:
            figures = run_job(stage, console, kill=kill)
            figures.whole_s = time.monotonic() - began
            code = _report(stage, console, figures)
            _say_how_to_look_further(stage, console, keep=keep)
            while keep:
                signal.pause()
    except KeyboardInterrupt:
        console.print("interrupted: everything has been stopped")
        code = 0 if keep and code == 0 else 130
    except DbPartitionError as error:
        console.print(f"[red]the demo could not run:[/red] {error}", markup=True)
    if directory is None and code == 0:
        shutil.rmtree(place, ignore_errors=True)
    elif code:
        console.print(f"logs are in {place}")
    return code


def _terminate_as_interrupt() -> None:
    """`kill` cleans up like Ctrl-C."""

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, interrupt)


def run_job(stage: Stage, console: Console, *, kill: bool) -> Figures:
    """Trigger the DAG, follow its execution, kill a worker in the middle, wait for the run to end.

    Raises:
        DemoError: the run did not succeed; with what Airflow says of its tasks.
    """
    figures = Figures(flights=stage.flights)
    screen = Screen(console)
    stage.api.wait_for_dag(DAG_ID)
    stage.api.unpause(DAG_ID)
    run_id = stage.api.trigger(DAG_ID)
    began = time.monotonic()
    console.print(f"  DAG run {run_id} triggered; Airflow plans, the workers work")
    killed_at: float | None = None
    execution_id: int | None = None

    def on_poll(_run: dict[str, Any]) -> None:
        nonlocal killed_at, execution_id
        if execution_id is None:
            recent = stage.repository.reading.recent(limit=1, job_name=JOB_NAME)
            if not recent:
                return
            execution_id = recent[0].job_execution_id
        picture = look(stage.repository, execution_id)
        screen.show(picture)
        figures.partitions = picture.total
        if kill and killed_at is None and picture.part_done >= KILL_AFTER:
            victim = _choose_victim(stage, picture)
            if victim is not None:
                killed_at = stage.kill_worker(victim)
                figures.killed = victim
                screen.note(f"SIGKILL to {victim}, in the middle of its partition")
        if killed_at is not None and figures.replaced_s is None and picture.moved:
            figures.replaced_s = time.monotonic() - killed_at
            screen.note(f"its partition was given to another worker, {figures.replaced_s:.1f} s after the kill")
        if killed_at is not None and figures.failover_s is None and picture.moved_and_running:
            figures.failover_s = time.monotonic() - killed_at
            screen.note(f"it runs there, {figures.failover_s:.1f} s after the kill")

    try:
        run = _wait(stage, run_id, on_poll)
    finally:
        screen.close()
    figures.run_s = time.monotonic() - began
    if run["state"] != "success":
        states = stage.api.task_states(DAG_ID, run_id)
        failed = [task_id for task_id, state in states.items() if state in ("failed", "up_for_retry")]
        log = stage.api.task_log(DAG_ID, run_id, failed[0])[-2000:] if failed else ""
        raise DemoError(f"DAG run {run_id} ended {run['state']}: {states}\n{log}")
    return figures


def _wait(stage: Stage, run_id: str, on_poll: Any) -> dict[str, Any]:
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while True:
        run = stage.api.dag_run(DAG_ID, run_id)
        on_poll(run)
        if run["state"] in ("success", "failed"):
            return dict(run)
        if time.monotonic() > deadline:
            raise DemoError(f"DAG run {run_id} is still {run['state']} after {RUN_TIMEOUT_S:g} s")
        time.sleep(0.2)


def _choose_victim(stage: Stage, picture: Picture) -> str | None:
    """A worker that is in the middle of something."""
    running = [
        row
        for row in stage.repository.reading.partitions(picture.job_execution_id)
        if row.status is PartitionStatus.CLAIMED and row.counters.write > 0
    ]
    for row in running:
        for name in stage.workers:
            if (row.assigned_node or "").startswith(f"{name}-"):
                return name
    return None


def _report(stage: Stage, console: Console, figures: Figures) -> int:
    job = stage.repository.reading.recent(limit=1, job_name=JOB_NAME)[0]
    comparison = compare(stage.url, job_instance_id=job.job_instance_id)
    mark = "[green]✔[/green]" if comparison.equal else "[red]✘[/red]"
    console.print(f"\n{mark} against one direct SQL aggregate: {comparison.describe()}")
    console.print(
        f"  {figures.flights:,} flights in {figures.partitions} partitions, DAG run {figures.run_s:.1f} s, "
        f"{figures.flights / figures.run_s:,.0f} flights/s (each page of 1,000 rests {PAGE_PAUSE_S:g} s, for show)",
    )
    missed = False
    if figures.killed is not None:
        if figures.failover_s is None:
            missed = True
            console.print(
                f"  [red]{figures.killed} was killed, but its partition was never seen on another worker[/red]"
            )
        else:
            console.print(
                f"  failover: {figures.killed} was killed; its partition was given to another worker after "
                f"{figures.replaced_s or figures.failover_s:.1f} s (threshold: {stage.timings.remove_after_s:g} s) and "
                f"ran there, as soon as that had a free slot, after {figures.failover_s:.1f} s",
            )
    console.print(f"  the whole demo took {figures.whole_s:.0f} s")
    return 0 if comparison.equal and not missed else EXIT_WORK_FAILED


def _say_how_to_look_further(stage: Stage, console: Console, *, keep: bool) -> None:
    console.print(f"\n  Airflow UI: {stage.airflow.base_url}  (no login: everybody is admin here)")
    if not keep:
        console.print("  it ends with the demo; `make demo KEEP=1` leaves everything running")
        return
    console.print(f"  look further:\n    export DBPARTITION_DATABASE_URL={stage.url}")
    if shutil.which("dbpartition") is None:
        console.print(f"    export PATH={Path(sys.executable).parent}:$PATH")
    console.print("    dbpartition nodes; dbpartition jobs; dbpartition job 1; dbpartition partitions 1")
    console.print(f'    psql "{stage.url.replace("+psycopg2", "")}" -c "TABLE batch_job_progress"')
    console.print("  Ctrl-C stops everything and cleans up")
