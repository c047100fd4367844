"""`dbpartition worker`: run a node."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from airflow_dbpartition.cli.options import (
    TIMES,
    DatabaseUrl,
    Heartbeat,
    RemoveAfter,
    Schema,
    UnreachableAfter,
    database_config,
    from_the_environment,
    own_process,
    usage_errors,
)
from airflow_dbpartition.config import DatabaseConfig, LogConfig, Timings, WorkerConfig
from airflow_dbpartition.domain import DEFAULT_NODE_GROUP
from airflow_dbpartition.worker_process import become_worker

_DEFAULTS = WorkerConfig()


def add_to(app: typer.Typer) -> None:
    app.command("worker")(worker)


def worker(
    database_url: DatabaseUrl = "",
    schema: Schema = "",
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import", envvar="DBPARTITION_IMPORT", help="Module or .py file that registers steps; repeatable."
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(envvar="DBPARTITION_CONCURRENCY", help="Partitions run at once.")
    ] = _DEFAULTS.concurrency,
    node_group: Annotated[
        str, typer.Option(envvar="DBPARTITION_NODE_GROUP", help="Work for executions of this group.")
    ] = DEFAULT_NODE_GROUP,
    node_prefix: Annotated[
        str, typer.Option(envvar="DBPARTITION_NODE_PREFIX", help="What the node id starts with; empty = the host name.")
    ] = "",
    executor: Annotated[
        str, typer.Option(envvar="DBPARTITION_EXECUTOR", help="process, or thread for steps that mostly wait.")
    ] = _DEFAULTS.executor,
    grace: Annotated[
        float, typer.Option(envvar="DBPARTITION_GRACE", help="Seconds that running partitions get after SIGTERM.")
    ] = _DEFAULTS.grace_s,
    stop_grace: Annotated[
        float,
        typer.Option(envvar="DBPARTITION_STOP_GRACE", help="Seconds that a partition gets to end when stopped."),
    ] = _DEFAULTS.stop_grace_s,
    drain: Annotated[
        bool, typer.Option("--drain", envvar="DBPARTITION_DRAIN", help="Exit when no work is left (3 if some failed).")
    ] = False,
    idle_timeout: Annotated[
        float, typer.Option(envvar="DBPARTITION_IDLE_TIMEOUT", help="With --drain: seconds to wait for work first.")
    ] = _DEFAULTS.idle_timeout_s,
    prefetch: Annotated[
        int, typer.Option(envvar="DBPARTITION_PREFETCH", help="Partitions claimed ahead of the free slots.")
    ] = _DEFAULTS.prefetch,
    max_partitions_per_child: Annotated[
        int,
        typer.Option(envvar="DBPARTITION_MAX_PARTITIONS_PER_CHILD", help="Replace a child after so many; 0 = never."),
    ] = 0,
    health_port: Annotated[
        int, typer.Option(envvar="DBPARTITION_HEALTH_PORT", help="Serve /livez, /readyz, /metrics there; 0 = not.")
    ] = 0,
    listen: Annotated[
        bool, typer.Option("--listen/--no-listen", envvar="DBPARTITION_LISTEN", help="Be woken by PostgreSQL's NOTIFY.")
    ] = True,
    heartbeat: Heartbeat = TIMES.heartbeat_s,
    unreachable_after: UnreachableAfter = TIMES.unreachable_after_s,
    remove_after: RemoveAfter = TIMES.remove_after_s,
    fence_margin: Annotated[
        float,
        typer.Option(
            envvar="DBPARTITION_FENCE_MARGIN",
            help="Seconds before --remove-after at which a node that is not heard kills its work; 0 = by default.",
        ),
    ] = 0.0,
    sweep: Annotated[
        float, typer.Option(envvar="DBPARTITION_SWEEP", help="Seconds between sweeps of the whole fleet.")
    ] = TIMES.sweep_s,
    poll: Annotated[
        float, typer.Option(envvar="DBPARTITION_POLL", help="Seconds between looks for work.")
    ] = TIMES.poll_s,
    steal_after: Annotated[
        float, typer.Option(envvar="DBPARTITION_STEAL_AFTER", help="Seconds before an idle node takes another's work.")
    ] = TIMES.steal_after_s,
    log_format: Annotated[str, typer.Option(envvar="DBPARTITION_LOG_FORMAT", help="console or json.")] = "console",
    log_level: Annotated[
        str, typer.Option(envvar="DBPARTITION_LOG_LEVEL", help="debug, info, warning or error.")
    ] = "info",
) -> int:
    """Run a node: claim partitions and run their steps, until SIGTERM (or, with --drain, until no work is left)."""
    with usage_errors():
        database = DatabaseConfig(url=database_url, schema=schema or None)
        logging = LogConfig(log_format, log_level)
        config = WorkerConfig(
            imports=tuple(imports or ()),
            concurrency=concurrency,
            node_group=node_group,
            node_prefix=node_prefix or None,
            executor=executor,
            grace_s=grace,
            stop_grace_s=stop_grace,
            drain=drain,
            idle_timeout_s=idle_timeout,
            prefetch=prefetch,
            max_partitions_per_child=max_partitions_per_child or None,
            health_port=health_port or None,
            listen=listen,
            timings=Timings(
                heartbeat_s=heartbeat,
                unreachable_after_s=unreachable_after,
                remove_after_s=remove_after,
                sweep_s=sweep,
                poll_s=poll,
                steal_after_s=steal_after,
                fence_margin_s=fence_margin or None,
            ),
        )
    own = own_process()
    if own is not None:
        url_from = from_the_environment("database URL")
        become_worker(database, config, logging=logging, url_from=url_from, verbose=own.verbose)
    from airflow_dbpartition.worker.logs import configure_logging
    from airflow_dbpartition.worker.node import Worker

    database = database_config(database_url, schema)
    configure_logging(**asdict(logging))
    return Worker(database, config, logging=asdict(logging)).run()
