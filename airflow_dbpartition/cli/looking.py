"""`dbpartition nodes | jobs | job | partitions`: look."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from airflow_dbpartition.cli.options import LARGEST_ID, LARGEST_INT, AsJson, DatabaseUrl, Schema, open_repository
from airflow_dbpartition.cli.output import print_json, print_rows
from airflow_dbpartition.domain import ExecutionStatus, JobExecution, PartitionStatus
from airflow_dbpartition.failure_texts import headline
from airflow_dbpartition.repository import JobRepository

EXIT_WORK_FAILED = 3
ExecutionId = Annotated[int, typer.Argument(metavar="ID", min=1, max=LARGEST_ID, help="The job execution's id.")]


def add_to(app: typer.Typer) -> None:
    for command in (nodes, jobs, job, partitions):
        app.command()(command)


def nodes(
    database_url: DatabaseUrl = "",
    schema: Schema = "",
    everything: Annotated[bool, typer.Option("--all", help="Removed nodes too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the nodes with their heartbeats and load."""
    with open_repository(database_url, schema) as repository:
        rows = [
            {
                "node": node.node_id,
                "group": node.node_group,
                "status": node.status.value,
                "heartbeat_age_s": round(node.heartbeat_age_s, 1),
                "load": node.current_load,
                "capacity": node.capacity,
                "steps": list(node.steps),
                "host": node.host,
                "pid": node.pid,
                "version": node.version,
            }
            for node in repository.nodes.all(include_removed=everything)
        ]
    print_rows(rows, as_json=as_json, empty="no nodes: start one with `dbpartition worker --import …`")


def jobs(
    database_url: DatabaseUrl = "",
    schema: Schema = "",
    limit: Annotated[int, typer.Option(min=1, max=LARGEST_INT, help="How many, newest first.")] = 20,
    job_name: Annotated[str, typer.Option(help="Only of this job.")] = "",
    active: Annotated[bool, typer.Option("--active", help="Only what has not ended.")] = False,
    as_json: AsJson = False,
) -> None:
    """List job executions, newest first."""
    with open_repository(database_url, schema) as repository:
        executions = repository.reading.recent(limit=limit, job_name=job_name or None, active=active)
        progress = repository.reading.progress([execution.job_execution_id for execution in executions])
        rows = [_execution_row(execution, progress[execution.job_execution_id].counts) for execution in executions]
    print_rows(rows, as_json=as_json, empty="no job executions")


def _execution_row(execution: JobExecution, counts: dict[PartitionStatus, int]) -> dict[str, Any]:
    return {
        "id": execution.job_execution_id,
        "job": execution.job_name,
        "generation": execution.generation,
        "step": execution.step_name,
        "status": execution.status.value,
        "partitions": execution.partition_count,
        **{status.value.lower(): counts.get(status, 0) for status in PartitionStatus},
        "created": execution.create_time.isoformat(timespec="seconds"),
    }


def job(
    job_execution_id: ExecutionId,
    database_url: DatabaseUrl = "",
    schema: Schema = "",
    watch: Annotated[bool, typer.Option("--watch", help="Follow it to its end with a progress bar.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show one job execution; with --watch exit 3 if it fails."""
    with open_repository(database_url, schema) as repository:
        execution = repository.reading.execution(job_execution_id)
        if watch and execution.status.is_active:
            _watch(repository, job_execution_id)
            execution = repository.reading.execution(job_execution_id)
        _show(repository, execution, as_json=as_json)
    return EXIT_WORK_FAILED if watch and execution.status is not ExecutionStatus.COMPLETED else 0


def _show(repository: JobRepository, execution: JobExecution, *, as_json: bool) -> None:
    summary = repository.reading.summary(execution.job_execution_id)
    counts = repository.reading.progress([execution.job_execution_id])[execution.job_execution_id].counts
    failures = repository.reading.failures(execution.job_execution_id)
    events = repository.reading.events(execution.job_execution_id, limit=50)
    latest = repository.reading.latest_of_instance(execution.job_execution_id).job_execution_id
    data = {
        **_execution_row(execution, counts),
        "parameters_hash": execution.job_key,
        "node_group": execution.node_group,
        "manager": execution.manager,
        "settings": execution.settings.to_json(),
        "restarted_as": None if latest == execution.job_execution_id else latest,
        "started": execution.start_time,
        "ended": execution.end_time,
        "deadline": execution.deadline,
        "stop_requested": execution.stop_requested,
        "message": execution.exit_message,
        "instance": summary.to_json(),
        "failures": [vars(failure) for failure in failures],
        "events": [vars(event) for event in events],
    }
    if as_json:
        print_json(data)
        return
    for name, value in data.items():
        if name not in ("failures", "events", "instance", "manager", "settings") and value is not None:
            typer.echo(f"{name.replace('_', ' '):<16} {value}")
    if events:
        typer.echo("\nwhat was not the happy path:")
        for event in events:
            what = f"{event.event:<10} {event.partition_key:<20} {headline(event.message)}"
            typer.echo(f"  {event.seconds_ago:8.1f} s ago  {what}")
    for failure in failures:
        typer.echo(
            f"\nfailed: {failure.partition_key} on {failure.node_id} (attempt {failure.attempt})\n{failure.message}"
        )


def _watch(repository: JobRepository, job_execution_id: int) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"job execution {job_execution_id}", total=None, detail="")
        while True:
            now = repository.reading.progress([job_execution_id])[job_execution_id]
            running, failed = now.counts.get(PartitionStatus.CLAIMED, 0), now.counts.get(PartitionStatus.FAILED, 0)
            detail = f"{running} running" + (f", {failed} failed" if failed else "")
            bar.update(task, total=now.total, completed=now.done, detail=detail)
            if not now.status.is_active:
                return
            time.sleep(0.5)


def partitions(
    job_execution_id: ExecutionId,
    database_url: DatabaseUrl = "",
    schema: Schema = "",
    failed: Annotated[bool, typer.Option("--failed", help="Only those that failed.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=LARGEST_INT, help="How many at most.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """List the partitions of one job execution."""
    with open_repository(database_url, schema) as repository:
        repository.reading.execution(job_execution_id)  # says so where there is none
        statuses = [PartitionStatus.FAILED] if failed else []
        rows = [
            {
                "id": row.step_execution_id,
                "key": row.partition_key,
                "status": row.status.value,
                "node": row.assigned_node,
                "attempt": row.attempt,
                "lost_nodes": row.node_losses,
                "read": row.counters.read,
                "write": row.counters.write,
                "skip": row.counters.skip,
                **(
                    {
                        "context": row.context,
                        "checkpoint": row.checkpoint,
                        "result": row.result,
                        "message": row.exit_message,
                    }
                    if as_json
                    else {"message": headline(row.exit_message)}
                ),
            }
            for row in repository.reading.partitions(job_execution_id, statuses=statuses, limit=limit)
        ]
    print_rows(rows, as_json=as_json, empty="no such partitions")
