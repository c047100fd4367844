"""Settings: small frozen classes that refuse what cannot work, and the environment variables that feed them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from airflow_dbpartition.domain import DEFAULT_NODE_GROUP
from airflow_dbpartition.errors import ConfigurationError

ENVIRONMENT_PREFIX = "DBPARTITION_"


def environment(name: str, source: Mapping[str, str] | None = None) -> str | None:
    """The value of DBPARTITION_<name>, or None where it is unset or empty."""
    return (os.environ if source is None else source).get(ENVIRONMENT_PREFIX + name) or None


def positive(name: str, value: float) -> float:
    """Return `value`, or say that it is not a positive number (units stand in the name).

    Raises:
        ConfigurationError: for zero, negative and non-finite numbers, and for other types.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ConfigurationError(f"expected {name} to be a positive number, got {value!r}")
    return value


@dataclass(frozen=True)
class DatabaseConfig:
    """How to reach the job repository.

    Args:
        url: an SQLAlchemy URL; `postgresql://` and `postgres://` mean psycopg2, `mysql://` means PyMySQL.
        schema: the database schema of the tables; None = the connection's own.
        connect_timeout_s: seconds for one connection attempt.
        statement_timeout_s: seconds for one statement of ours; None = no limit (user transactions).
        lock_timeout_s: seconds that one of our statements may wait for a lock.
        pool_size: connections kept open, 0 = none is kept.
        application_name: what PostgreSQL's pg_stat_activity shows.
    """

    url: str
    schema: str | None = None
    connect_timeout_s: float = 10.0
    statement_timeout_s: float | None = 30.0
    lock_timeout_s: float = 10.0
    pool_size: int = 1
    application_name: str = "dbpartition"

    def __post_init__(self) -> None:
        if not self.url:
            raise ConfigurationError(
                "no database URL: set DBPARTITION_DATABASE_URL or pass --database-url "
                "(for example postgresql://user:password@host/database)"
            )
        if self.pool_size < 0:
            raise ConfigurationError(f"expected pool_size to be at least 0, got {self.pool_size!r}")
        positive("connect_timeout_s", self.connect_timeout_s)
        positive("lock_timeout_s", self.lock_timeout_s)
        if self.statement_timeout_s is not None:
            positive("statement_timeout_s", self.statement_timeout_s)

    @classmethod
    def from_environment(cls) -> DatabaseConfig:
        return cls(url=environment("DATABASE_URL") or "", schema=environment("SCHEMA"))


@dataclass(frozen=True)
class Timings:
    """The cluster's clockwork, in seconds. Every worker of a cluster should have the same.

    Args:
        heartbeat_s: between two heartbeats of a node.
        unreachable_after_s: silence after which a node is UNREACHABLE (gets no new work).
        remove_after_s: silence after which a node is REMOVED and its partitions are re-placed.
        sweep_s: between two sweeps of the whole fleet, however many nodes it has.
        poll_s: between two looks for work where no notification arrives.
        steal_after_s: how long a partition waits for its own node before an idle one may take it.
        fence_margin_s: how long before remove_after_s a node that cannot be heard kills its own work.
    """

    heartbeat_s: float = 3.0
    unreachable_after_s: float = 10.0
    remove_after_s: float = 30.0
    sweep_s: float = 1.0
    poll_s: float = 1.0
    steal_after_s: float = 1.0
    fence_margin_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "unreachable_after_s", "remove_after_s", "sweep_s", "poll_s", "steal_after_s"):
            positive(name, getattr(self, name))
        if self.unreachable_after_s < 3 * self.heartbeat_s:
            raise ConfigurationError(
                f"expected unreachable_after to be at least 3 x heartbeat ({3 * self.heartbeat_s:g} s), "
                f"got {self.unreachable_after_s:g} s: one late heartbeat must not look like a dead node"
            )
        if self.remove_after_s <= self.unreachable_after_s:
            raise ConfigurationError(
                f"expected remove_after to be more than unreachable_after ({self.unreachable_after_s:g} s), "
                f"got {self.remove_after_s:g} s"
            )
        if not 0 < self.fence_after_s < self.remove_after_s:
            raise ConfigurationError(
                f"expected fence_margin to be between 0 and remove_after ({self.remove_after_s:g} s), "
                f"got {self.fence_margin_s!r} s"
            )

    @property
    def fence_after_s(self) -> float:
        """Silence after which a node kills its own work: before anybody else may run it again."""
        margin = self.fence_margin_s
        if margin is None:
            margin = min(5.0, (self.remove_after_s - self.unreachable_after_s) / 2)
        return self.remove_after_s - margin


LOG_FORMATS = ("console", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class LogConfig:
    """How a worker's lines look, and which of them there are.

    Raises:
        ConfigurationError: for an unknown format or level.
    """

    log_format: str = "console"
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name, known in (("log_format", LOG_FORMATS), ("log_level", LOG_LEVELS)):
            given = getattr(self, name)
            if given not in known:
                raise ConfigurationError(
                    f"expected {name.replace('_', ' ')} to be one of {', '.join(known)}, got {given!r}"
                )


@dataclass(frozen=True)
class WorkerConfig:
    """How one worker behaves.

    Args:
        imports: modules that register steps when imported.
        concurrency: partitions run at once.
        node_group: the label whose executions this node works for.
        node_prefix: what the node id starts with; None = the host name.
        executor: "process" (default) or "thread" (for steps that mostly wait for I/O).
        grace_s: seconds that running partitions may still take after SIGTERM.
        drain: exit when no work is left.
        idle_timeout_s: with `drain`, how long to wait for work before leaving.
        prefetch: partitions claimed ahead of the free slots, however long they may wait there. What was short so far is
            claimed ahead by itself, and given back where it waits.
        stop_grace_s: seconds that a partition whose execution is asked to stop may take to end by itself.
        listen: be woken by PostgreSQL's NOTIFY; polling goes on beside it.
        health_port: port of /livez, /readyz and /metrics; None = not served.
        max_partitions_per_child: a child process is replaced after so many partitions; None = never.
    """

    imports: tuple[str, ...] = ()
    concurrency: int = 1
    node_group: str = DEFAULT_NODE_GROUP
    node_prefix: str | None = None
    executor: str = "process"
    grace_s: float = 30.0
    stop_grace_s: float = 10.0
    listen: bool = True
    drain: bool = False
    idle_timeout_s: float = 0.0
    prefetch: int = 0
    health_port: int | None = None
    max_partitions_per_child: int | None = None
    timings: Timings = field(default_factory=Timings)

    def __post_init__(self) -> None:
        if isinstance(self.concurrency, bool) or not isinstance(self.concurrency, int) or self.concurrency < 1:
            raise ConfigurationError(f"expected concurrency to be an integer of at least 1, got {self.concurrency!r}")
        if self.prefetch < 0:
            raise ConfigurationError(f"expected prefetch to be at least 0, got {self.prefetch!r}")
        if self.executor not in ("process", "thread"):
            raise ConfigurationError(f'expected executor to be "process" or "thread", got {self.executor!r}')
        if not self.node_group or len(self.node_group) > 100:
            raise ConfigurationError(f"expected node_group to have 1 to 100 characters, got {self.node_group!r}")
        if self.node_prefix is not None and not 0 < len(self.node_prefix) <= 150:
            raise ConfigurationError(f"expected node_prefix to have 1 to 150 characters, got {self.node_prefix!r}")
        for name in ("grace_s", "idle_timeout_s", "stop_grace_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(f"expected {name} to be a number of at least 0, got {value!r}")
        if self.max_partitions_per_child is not None and self.max_partitions_per_child < 1:
            raise ConfigurationError(
                f"expected max_partitions_per_child to be at least 1, got {self.max_partitions_per_child!r}"
            )
