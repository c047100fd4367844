"""`dbpartition submit | stop | restart | abandon | drain | purge`: act without Airflow."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from airflow_dbpartition.cli.given import read_object, read_partitions, read_text
from airflow_dbpartition.cli.looking import ExecutionId
from airflow_dbpartition.cli.options import (
    LARGEST_INT,
    TIMES,
    AsJson,
    DatabaseUrl,
    Heartbeat,
    RemoveAfter,
    Schema,
    UnreachableAfter,
    UsageError,
    open_repository,
    seconds,
    usage_errors,
)
from airflow_dbpartition.cli.output import print_json
from airflow_dbpartition.config import Timings
from airflow_dbpartition.domain import DEFAULT_NODE_GROUP, JobIdentity, JobSettings, TransferPolicy
from airflow_dbpartition.launching import Job, Launcher
from airflow_dbpartition.repository import JobRepository

_TRANSFERABLE = {"true": True, "false": False, "until_started": "until_started"}


def add_to(app: typer.Typer) -> None:
    for command in (submit, stop, restart, abandon, drain, purge):
        app.command()(command)


def submit(
    step: Annotated[str, typer.Argument(metavar="STEP", help="The step's registered name.")],
    partitions: Annotated[
        str, typer.Option("--partitions", help="File of JSON (list, object of key: context, or lines); - = stdin.")
    ],
    database_url: DatabaseUrl = "",
    schema: Schema = "",
    job_name: Annotated[str, typer.Option(help="The job's name; empty = the step's.")] = "",
    parameters: Annotated[
        str, typer.Option(help="JSON object of identifying parameters; empty = a job of its own each time.")
    ] = "",
    node_group: Annotated[str, typer.Option(envvar="DBPARTITION_NODE_GROUP")] = DEFAULT_NODE_GROUP,
    transferable: Annotated[str, typer.Option(help="true, false or until_started.")] = "until_started",
    retries: Annotated[
        int, typer.Option(min=0, max=LARGEST_INT, help="Further attempts at a partition after an error.")
    ] = 0,
    priority: Annotated[int, typer.Option(min=-LARGEST_INT, max=LARGEST_INT, help="Higher runs first.")] = 0,
    heartbeat: Heartbeat = TIMES.heartbeat_s,
    unreachable_after: UnreachableAfter = TIMES.unreachable_after_s,
    remove_after: RemoveAfter = TIMES.remove_after_s,
    as_json: AsJson = False,
) -> None:
    """Write a job for the workers; prints its job execution id.

    The same parameters name the same job: while it runs, this attaches to it; when it has completed, its id is printed;
    what failed of it is restarted, with the partitions that are stored.
    """
    if transferable not in _TRANSFERABLE:
        raise UsageError(f"expected --transferable to be true, false or until_started, got {transferable!r}")
    policy = TransferPolicy.parse(_TRANSFERABLE[transferable])
    identifying = read_object(parameters, "--parameters") if parameters else {"submitted": secrets.token_hex(8)}
    items = read_partitions(read_text(partitions), default_transferable=policy)
    timings = _timings(heartbeat, unreachable_after, remove_after)
    with usage_errors():
        job = Job(
            identity=JobIdentity(job_name or step, identifying),
            step_name=step,
            partitioner=lambda _grid_size: items,
            node_group=node_group,
            priority=priority,
            settings=JobSettings(transferable=policy.value, partition_retries=retries),
            manager={"launched_by": "dbpartition submit"},
            owner_token=secrets.token_hex(16),
        )
    with open_repository(database_url, schema) as repository:
        launched = _launcher(repository, timings).launch(job)
    if as_json:
        print_json(
            {
                "job_execution_id": launched.job_execution_id,
                "status": launched.status.value,
                "created": launched.created,
            }
        )
    else:
        typer.echo(launched.job_execution_id)


def _timings(heartbeat: float, unreachable_after: float, remove_after: float) -> Timings:
    """What "live" means; the workers' own, or a slower cluster's nodes would look dead."""
    with usage_errors():
        return Timings(heartbeat_s=heartbeat, unreachable_after_s=unreachable_after, remove_after_s=remove_after)


def _launcher(repository: JobRepository, timings: Timings) -> Launcher:
    return Launcher(repository, timings=timings, log=lambda line: typer.echo(line, err=True))


def stop(job_execution_id: ExecutionId, database_url: DatabaseUrl = "", schema: Schema = "") -> None:
    """Stop a job execution: waiting partitions at once, running ones when they end or after their grace."""
    with open_repository(database_url, schema) as repository:
        status = repository.executions.stop(job_execution_id, reason="stopped by `dbpartition stop`")
    typer.echo(f"job execution {job_execution_id} is {status}")


def restart(
    job_execution_id: ExecutionId,
    database_url: DatabaseUrl = "",
    schema: Schema = "",
    include_lost: Annotated[
        bool, typer.Option("--include-lost", help="Also what may have run and was lost while not transferable.")
    ] = False,
    heartbeat: Heartbeat = TIMES.heartbeat_s,
    unreachable_after: UnreachableAfter = TIMES.unreachable_after_s,
    remove_after: RemoveAfter = TIMES.remove_after_s,
    as_json: AsJson = False,
) -> None:
    """Run again what did not complete; prints the new job execution's id."""
    timings = _timings(heartbeat, unreachable_after, remove_after)
    with open_repository(database_url, schema) as repository:
        launched = _launcher(repository, timings).restart(job_execution_id, include_lost=include_lost)
    if as_json:
        print_json({"job_execution_id": launched.job_execution_id, "created": launched.created})
    else:
        typer.echo(launched.job_execution_id)


def abandon(job_execution_id: ExecutionId, database_url: DatabaseUrl = "", schema: Schema = "") -> None:
    """Say that a failed or stopped job execution is never to be restarted."""
    with open_repository(database_url, schema) as repository:
        repository.executions.abandon(job_execution_id)
    typer.echo(f"job execution {job_execution_id} is ABANDONED")


def drain(
    node_id: Annotated[str, typer.Argument(metavar="NODE", help="The node's id.")],
    database_url: DatabaseUrl = "",
    schema: Schema = "",
) -> int:
    """Ask a node to take no more work, finish what it runs, and leave."""
    with open_repository(database_url, schema) as repository:
        found = repository.nodes.drain(node_id)
        known = [node.node_id for node in repository.nodes.all()]
    if not found:
        typer.echo(f"error: there is no live node {node_id!r} (live: {', '.join(known) or 'none'})", err=True)
        return 1
    typer.echo(f"node {node_id} is asked to drain")
    return 0


def purge(
    older_than: Annotated[
        str, typer.Option("--older-than", help="Age since the end, with its unit: s, m, h, d or w, as in 30d.")
    ],
    database_url: DatabaseUrl = "",
    schema: Schema = "",
    as_json: AsJson = False,
) -> None:
    """Delete finished jobs and removed nodes; never an active instance."""
    age_s = seconds(older_than, "--older-than")
    with open_repository(database_url, schema) as repository:
        purged = repository.retention.purge(older_than_s=age_s)
    if as_json:
        print_json(vars(purged))
    else:
        typer.echo(
            f"deleted {purged.instances} job instances, {purged.executions} executions, "
            f"{purged.partitions} partitions, {purged.nodes} removed nodes"
        )
