"""Statuses, transitions and the values that travel between the parts: no I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from enum import Enum
from typing import Any

from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.storable import JsonObject, NotStorableError, check_json, dump_json

DEFAULT_NODE_GROUP = "default"
JOB_NAME_LENGTH = 250


class _Text(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


class PartitionStatus(_Text):
    """Where a partition is. The last three are terminal."""

    PENDING = "PENDING"
    CLAIMED = "CLAIMED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


LIVE_PARTITIONS = (PartitionStatus.PENDING, PartitionStatus.CLAIMED)


class ExecutionStatus(_Text):
    """Where a job execution is."""

    STARTING = "STARTING"
    STARTED = "STARTED"
    STOPPING = "STOPPING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    ABANDONED = "ABANDONED"

    @property
    def is_active(self) -> bool:
        return self in ACTIVE_EXECUTIONS


ACTIVE_EXECUTIONS = (ExecutionStatus.STARTING, ExecutionStatus.STARTED, ExecutionStatus.STOPPING)


class NodeStatus(_Text):
    """What the cluster believes of a node."""

    ACTIVE = "ACTIVE"
    DRAINING = "DRAINING"
    UNREACHABLE = "UNREACHABLE"
    REMOVED = "REMOVED"


LIVING_NODES = (NodeStatus.ACTIVE, NodeStatus.DRAINING, NodeStatus.UNREACHABLE)


class PartitionEvent(_Text):
    """What was not the happy path."""

    LOST = "lost"
    REASSIGNED = "reassigned"
    STOLEN = "stolen"
    RETRIED = "retried"
    RELEASED = "released"
    STOPPED = "stopped"
    FAILED = "failed"


class TransferPolicy(_Text):
    """When a partition may change hands: `transferable=True`, `"until_started"` (default) or `False`."""

    ALWAYS = "always"
    UNTIL_STARTED = "until_started"
    NEVER = "never"

    @classmethod
    def parse(cls, value: object) -> TransferPolicy:
        """Read what an author writes: True, False, "until_started" or a member.

        Raises:
            ConfigurationError: for anything else.
        """
        if isinstance(value, cls):
            return value
        if value is True or value == cls.ALWAYS:
            return cls.ALWAYS
        if value is False or value == cls.NEVER:
            return cls.NEVER
        if value == cls.UNTIL_STARTED:
            return cls.UNTIL_STARTED
        raise ConfigurationError(f'expected transferable to be True, False or "until_started", got {value!r}')


@dataclass(frozen=True)
class Transition:
    """One legal move of a partition. `changes_hands` moves also grow the version, the fence."""

    name: str
    sources: tuple[PartitionStatus, ...]
    target: PartitionStatus
    changes_hands: bool = False


class Transitions:
    """Every legal move of a partition (DESIGN, section 4). Terminal rows never move again."""

    CLAIM = Transition("claim", (PartitionStatus.PENDING,), PartitionStatus.CLAIMED, changes_hands=True)
    STEAL = Transition("steal", (PartitionStatus.PENDING,), PartitionStatus.CLAIMED, changes_hands=True)
    COMPLETE = Transition("complete", (PartitionStatus.CLAIMED,), PartitionStatus.COMPLETED)
    FAIL = Transition("fail", (PartitionStatus.CLAIMED,), PartitionStatus.FAILED)
    RETRY = Transition("retry", (PartitionStatus.CLAIMED,), PartitionStatus.PENDING)
    RELEASE = Transition("release", (PartitionStatus.CLAIMED,), PartitionStatus.PENDING)
    CHECKPOINT = Transition("checkpoint", (PartitionStatus.CLAIMED,), PartitionStatus.CLAIMED)
    REASSIGN = Transition("reassign", LIVE_PARTITIONS, PartitionStatus.PENDING, changes_hands=True)
    ABANDON = Transition("abandon", LIVE_PARTITIONS, PartitionStatus.FAILED, changes_hands=True)
    STOP_PENDING = Transition("stop", (PartitionStatus.PENDING,), PartitionStatus.STOPPED)
    STOP_CLAIMED = Transition("stop", (PartitionStatus.CLAIMED,), PartitionStatus.STOPPED)


@dataclass(frozen=True)
class Partition:
    """One slice of a step, as a partitioner describes it.

    Args:
        key: its name, unique in the job instance and stable over restarts; at most 200 characters.
        context: the execution context (JSON), the step's input.
        weight: how heavy it is compared with its siblings (rows, bytes), at least 0; heaviest run first.
        transferable: True, False or "until_started"; None takes the step's own setting.
    """

    key: str
    context: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    transferable: bool | str | None = None


@dataclass
class Counters:
    """What a partition has done so far, as Spring Batch counts it."""

    read: int = 0
    write: int = 0
    filter: int = 0
    skip: int = 0
    commit: int = 0
    rollback: int = 0

    def as_columns(self) -> dict[str, int]:
        """The values under their column names, such as read_count."""
        return {f"{name}_count": value for name, value in vars(self).items()}

    @classmethod
    def from_columns(cls, row: Mapping[str, Any]) -> Counters:
        return cls(**{name: int(row[f"{name}_count"] or 0) for name in COUNTER_NAMES})


COUNTER_NAMES = tuple(item.name for item in fields(Counters))


@dataclass(frozen=True)
class NodeView:
    """A node as it stands in the database; ages are in seconds by the database's clock."""

    node_id: str
    node_group: str
    status: NodeStatus
    capacity: int
    current_load: int
    steps: tuple[str, ...]
    heartbeat_age_s: float
    host: str = ""
    pid: int = 0
    version: str = ""

    def may_be_given(self, step: str | None, *, node_group: str, within_s: float) -> bool:
        """Whether new work may be placed here: ACTIVE *and* heard within `within_s`, of the group, knowing the step."""
        return (
            self.status is NodeStatus.ACTIVE
            and self.node_group == node_group
            and self.heartbeat_age_s < within_s
            and (step is None or step in self.steps)
        )


@dataclass(frozen=True)
class JobIdentity:
    """What is to be done once: a job name and its identifying parameters."""

    job_name: str
    parameters: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.job_name or len(self.job_name) > JOB_NAME_LENGTH:
            raise ConfigurationError(
                f"expected job_name to have 1 to {JOB_NAME_LENGTH} characters, got {self.job_name!r}"
            )

    @property
    def job_key(self) -> str:
        """A hash of the identifying parameters, independent of their order.

        Raises:
            ConfigurationError: the parameters are not JSON.
        """
        try:
            canonical = dump_json(check_json(self.parameters, "job parameters"), sort_keys=True)
        except NotStorableError as error:
            raise ConfigurationError(str(error)) from None
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class JobSettings:
    """How an execution is to be run; stored with it as JSON, so that any node's sweep can follow it.

    Args:
        transferable: the step's transfer policy where a partition has none of its own.
        assignment: JSON form of the assignment strategy, used again when work is re-placed.
        stealing: whether an idle node may take a transferable, not started partition of a busy one.
        partition_retries: further attempts after an exception (0 = none).
        retry_delay_s, retry_max_delay_s: exponential backoff, first and longest wait in seconds.
        max_node_losses: how many owners a partition may lose before it is called poison.
        partition_timeout_s: seconds that one attempt may take; None = no limit.
        fail_fast: stop the execution at its first failed partition.
    """

    transferable: str = TransferPolicy.UNTIL_STARTED.value
    assignment: JsonObject = field(default_factory=lambda: {"name": "round_robin"})
    stealing: bool = True
    partition_retries: int = 0
    retry_delay_s: float = 1.0
    retry_max_delay_s: float = 300.0
    max_node_losses: int = 3
    partition_timeout_s: float | None = None
    fail_fast: bool = False

    def __post_init__(self) -> None:
        TransferPolicy.parse(self.transferable)
        for name, least in (("partition_retries", 0), ("max_node_losses", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"expected {name} to be an integer of at least {least}, got {value!r}")
        for name in ("retry_delay_s", "retry_max_delay_s"):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(f"expected {name} to be a number of at least 0, got {getattr(self, name)!r}")
        if self.partition_timeout_s is not None and not self.partition_timeout_s > 0:
            raise ConfigurationError(
                f"expected partition_timeout to be a positive number of seconds, got {self.partition_timeout_s!r}"
            )

    def to_json(self) -> JsonObject:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> JobSettings:
        """Read stored settings; what this version does not know or cannot read is left at its default.

        Rolling deploys write such rows, and one of them must not stop every claim and every sweep.
        """
        known = {item.name for item in fields(cls)}
        return cls(**{name: item for name, item in value.items() if name in known and cls._can_read(name, item)})

    @classmethod
    def _can_read(cls, name: str, item: object) -> bool:
        try:
            cls(**{name: item})  # type: ignore[arg-type]
        except (ConfigurationError, TypeError):
            return False
        return name != "assignment" or isinstance(item, dict)


@dataclass(frozen=True)
class Claim:
    """A partition that a node holds. (step_execution_id, node_id, version) is the fence of every write."""

    step_execution_id: int
    job_execution_id: int
    job_instance_id: int
    node_id: str
    version: int
    partition_key: str
    step_name: str
    attempt: int
    context: JsonObject
    checkpoint: JsonObject | None
    counters: Counters
    settings: JobSettings
    transfer_policy: TransferPolicy
    job_name: str
    job_key: str
    generation: int
    stolen_from: str | None = None

    @property
    def idempotency_key(self) -> str:
        """The same over attempts and restarts of a generation, different for everything else."""
        text = "\x1f".join((self.job_name, self.job_key, str(self.generation), self.partition_key))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    @property
    def retries_left(self) -> int:
        return max(0, self.settings.partition_retries + 1 - self.attempt)


@dataclass(frozen=True)
class JobExecution:
    """A job execution as it stands in the database."""

    job_execution_id: int
    job_instance_id: int
    job_name: str
    job_key: str
    generation: int
    step_name: str
    node_group: str
    status: ExecutionStatus
    partition_count: int
    manager: JsonObject
    settings: JobSettings
    owner_token: str | None
    stop_requested: bool
    exit_message: str | None
    create_time: datetime
    start_time: datetime | None
    end_time: datetime | None
    deadline: datetime | None
    run_partition_key: str | None = None


@dataclass(frozen=True)
class Progress:
    """Counts of one execution's partitions by status, and the instance's totals over its restarts."""

    job_execution_id: int
    status: ExecutionStatus
    stop_requested: bool
    counts: dict[PartitionStatus, int]
    deadline_passed: bool = False

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def done(self) -> int:
        return self.total - self.live

    @property
    def live(self) -> int:
        return sum(self.counts.get(status, 0) for status in LIVE_PARTITIONS)
