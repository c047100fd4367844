"""Statements about job executions: submit, attach, restart, stop, abandon, finalise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from sqlalchemy import func, insert, literal, select, update
from sqlalchemy.engine import Connection, CursorResult, Row
from sqlalchemy.exc import IntegrityError

from airflow_dbpartition.dialects import db_later, db_now
from airflow_dbpartition.domain import (
    ACTIVE_EXECUTIONS,
    COUNTER_NAMES,
    DEFAULT_NODE_GROUP,
    LIVE_PARTITIONS,
    ExecutionStatus,
    JobIdentity,
    JobSettings,
    Partition,
    PartitionEvent,
    PartitionStatus,
    TransferPolicy,
    Transitions,
)
from airflow_dbpartition.errors import (
    InvalidPartitionError,
    JobAbandonedError,
    JobAlreadyCompleteError,
    JobExecutionNotFoundError,
    JobExecutionRunningError,
    LostPartitionsError,
    OwnershipLostError,
    WaitTimeoutError,
)
from airflow_dbpartition.failure_texts import headline
from airflow_dbpartition.repository.copying import copy_rows
from airflow_dbpartition.repository.moves import move, record, restored_transferability
from airflow_dbpartition.repository.transactions import Transactions, notify
from airflow_dbpartition.schema import DONE_CHANNEL, WORK_CHANNEL, Tables
from airflow_dbpartition.storable import JsonObject, storable_text

INSERT_BATCH_ROWS = 2000
UPDATE_BATCH_ROWS = 500
NAMED_FAILURES = 10
STOP_PAYLOAD = "stop"

Placement = Mapping[str, "str | None"]
InTurn = Sequence[str]  # node ids to whom partitions are dealt in their order; none = anybody's
Place = Callable[[Sequence[Partition]], Placement]


@dataclass(frozen=True)
class NewExecution:
    """Everything about an execution but its partitions.

    Args:
        identity: the job's name and identifying parameters.
        step_name: the registered step; only this name travels.
        generation: 1, or more where a completed job is to be done again from the start.
        manager: who launched it, for show (DAG, run, task, map index, try).
        owner_token: fences stop requests: only the newest owner's are heard.
        timeout_s: seconds until the deadline, which is stored as a moment and never reopened; None = none.
        run_partition_key: Airflow's own partition key of the run, for show.
    """

    identity: JobIdentity
    step_name: str
    generation: int = 1
    node_group: str = DEFAULT_NODE_GROUP
    settings: JobSettings = field(default_factory=JobSettings)
    manager: JsonObject = field(default_factory=dict)
    owner_token: str | None = None
    priority: int = 0
    timeout_s: float | None = None
    run_partition_key: str | None = None


@dataclass(frozen=True)
class Launched:
    """What a submit or restart led to: `created` is False where an execution was found and attached to."""

    job_execution_id: int
    status: ExecutionStatus
    created: bool


_ACTIVE = tuple(status.value for status in ACTIVE_EXECUTIONS)
_LIVE = tuple(status.value for status in LIVE_PARTITIONS)


def _row_of(partition: Partition, node_id: str | None, default: TransferPolicy) -> dict[str, Any]:
    """What is a partition's own of its row."""
    policy = default if partition.transferable is None else TransferPolicy.parse(partition.transferable)
    return {
        "partition_key": partition.key,
        "assigned_node": node_id,
        "is_transferable": int(policy is not TransferPolicy.NEVER),
        "transfer_policy": policy.value,
        "weight": partition.weight,
        "execution_context": partition.context,
    }


def _with_plain_context(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "execution_context": dict(row["execution_context"])}


def _node_of(placement: Placement | InTurn, position: int, key: str) -> str | None:
    if isinstance(placement, Mapping):
        return placement.get(key)
    return placement[position % len(placement)] if placement else None


def _refuse_repeated_keys(partitions: Collection[Partition]) -> None:
    seen: set[str] = set()
    for partition in partitions:
        if partition.key in seen:
            raise InvalidPartitionError(f"partition key {partition.key!r} comes more than once; keys must be unique")
        seen.add(partition.key)


class Executions:
    """The life of a job execution."""

    def __init__(self, tables: Tables, transactions: Transactions) -> None:
        self._tables = tables
        self._transactions = transactions

    # --- beginning ---------------------------------------------------------------------------------------------

    def submit(self, new: NewExecution, partitions: Collection[Partition], placement: Placement | InTurn) -> Launched:
        """Write instance, execution and all partitions in one transaction; or attach to what is already there.

        Submitting is idempotent: whoever comes second, and whoever repeats a submit whose answer was lost, gets the
        execution of the first. An instance that has an execution never gets a second one here (see `restart`).

        Args:
            partitions: read once for each try of the transaction, some thousands at a time.
            placement: the node of each key (None, or left out = anybody's), or whom all are dealt to in turn.

        Raises:
            InvalidPartitionError: a key comes more than once; nothing was written.
        """

        def work(connection: Connection) -> Launched:
            found = self._latest_row(connection, new.identity, new.generation)
            if found is not None:
                return self._attach_to(connection, found, new.owner_token, new.manager)
            instance_id = self._instance_id(connection, new)
            execution_id = self._insert_execution(connection, new, instance_id, len(partitions))
            self._insert_partitions(connection, new, instance_id, execution_id, partitions, placement)
            notify(connection, WORK_CHANNEL, new.node_group[:100])
            if len(partitions) == 0:
                notify(connection, DONE_CHANNEL, str(execution_id))
            status = ExecutionStatus.STARTING if len(partitions) else ExecutionStatus.COMPLETED
            return Launched(execution_id, status, created=True)

        return self._transactions.run(work, conflicts=True)

    def attach(
        self, job_execution_id: int, *, owner_token: str | None, manager: JsonObject | None = None
    ) -> ExecutionStatus:
        """Take ownership of an execution (if it is active); stop requests of earlier owners are ignored from now on.

        Without a token nothing is taken: a person who attaches must not deafen the execution to its owner.
        """

        def work(connection: Connection) -> ExecutionStatus:
            row = self._locked(connection, job_execution_id)
            return self._attach_to(connection, row, owner_token, manager).status

        return self._transactions.run(work)

    def restart(
        self,
        job_execution_id: int,
        *,
        place: Place,
        owner_token: str | None = None,
        manager: JsonObject | None = None,
        include_lost: bool = False,
        timeout_s: float | None = None,
        keep_deadline: bool = False,
    ) -> Launched:
        """Run again what did not complete, from its checkpoint, with the stored plan: never re-partitioned.

        Args:
            job_execution_id: any execution of the instance; the latest one is what is restarted.
            place: gives a node to each partition (by key), or None for anybody.
            include_lost: also what may have run and was lost while not transferable: a person's decision.
            timeout_s: seconds until the new execution's deadline.
            keep_deadline: take over the old execution's deadline, if it has one, instead of beginning a new window.

        Returns:
            The new execution, or the active one where somebody was faster.

        Raises:
            JobAlreadyCompleteError, JobAbandonedError: nothing is to be restarted.
            LostPartitionsError: `include_lost` is needed.
            WaitTimeoutError: the deadline that is to be kept has passed.
        """

        def work(connection: Connection) -> Launched:
            named = self._locked(connection, job_execution_id)
            old = self._latest_of_instance(connection, named.job_instance_id)
            status = ExecutionStatus(old.status)
            if status.is_active:
                return self._attach_to(connection, old, owner_token, manager)
            if status is ExecutionStatus.COMPLETED:
                raise JobAlreadyCompleteError(f"{_called(job_execution_id, old)} is COMPLETED: nothing to restart")
            if status is ExecutionStatus.ABANDONED:
                raise JobAbandonedError(f"{_called(job_execution_id, old)} was abandoned: it is never restarted")
            if not include_lost:
                self._refuse_lost(connection, old.job_execution_id)
            deadline: Any = None if timeout_s is None else db_later(timeout_s)
            if keep_deadline and old.deadline is not None:
                self._refuse_late(connection, old.job_execution_id)
                deadline = old.deadline
            return self._copy_unfinished(connection, old, place, owner_token, manager, deadline)

        return self._transactions.run(work, conflicts=True)

    # --- ending ------------------------------------------------------------------------------------------------

    def stop(self, job_execution_id: int, *, owner_token: str | None = None, reason: str) -> ExecutionStatus:
        """PENDING partitions stop at once, CLAIMED ones when their owners hear of it; returns the status then.

        Args:
            owner_token: the asking owner; None = a person, who is always heard.

        Raises:
            OwnershipLostError: a newer try owns the execution.
            JobExecutionNotFoundError: there is no such execution.
        """

        def work(connection: Connection) -> ExecutionStatus:
            row = self._locked(connection, job_execution_id)
            status = ExecutionStatus(row.status)
            if not status.is_active:
                return status
            if owner_token is not None and row.owner_token != owner_token:
                raise OwnershipLostError(
                    f"job execution {job_execution_id} belongs to a newer try: this stop request is ignored"
                )
            e = self._tables.executions.c
            if not row.stop_requested:
                connection.execute(
                    update(self._tables.executions)
                    .where(e.job_execution_id == job_execution_id)
                    .values(
                        status=ExecutionStatus.STOPPING.value,
                        stop_requested=1,
                        exit_message=storable_text(reason),
                        last_updated=db_now(),
                    )
                )
            self._stop_pending(connection, job_execution_id, reason)
            notify(connection, WORK_CHANNEL, STOP_PAYLOAD)
            return ExecutionStatus.STOPPING

        status = self._transactions.run(work)
        if status is ExecutionStatus.STOPPING:
            return self.finalise(job_execution_id) or status
        return status

    def abandon(self, job_execution_id: int) -> None:
        """A person's word for "never restart this".

        Raises:
            JobExecutionRunningError: it is active; stop it first.
        """

        def work(connection: Connection) -> None:
            row = self._locked(connection, job_execution_id)
            if ExecutionStatus(row.status).is_active:
                raise JobExecutionRunningError(
                    f"job execution {job_execution_id} is {row.status}: stop it before abandoning it"
                )
            if row.status == ExecutionStatus.COMPLETED.value:
                raise JobAlreadyCompleteError(f"job execution {job_execution_id} is COMPLETED: nothing to abandon")
            e = self._tables.executions.c
            connection.execute(
                update(self._tables.executions)
                .where(e.job_execution_id == job_execution_id)
                .values(status=ExecutionStatus.ABANDONED.value, last_updated=db_now())
            )

        self._transactions.run(work)

    def finalise(self, job_execution_id: int) -> ExecutionStatus | None:
        """End the execution if no partition of it is live; idempotent, and safe for any number of callers.

        Call it *after* the settling transaction has committed: of two last settlers at READ COMMITTED neither sees
        the other's uncommitted settle, but the one that commits later sees both.

        Returns:
            The final status, or None while work is left.
        """

        def work(connection: Connection) -> ExecutionStatus | None:
            if self._has_live(connection, job_execution_id) and not self._is_stopping(connection, job_execution_id):
                return None
            row = self._locked(connection, job_execution_id)
            status = ExecutionStatus(row.status)
            if not status.is_active:
                return status
            if row.stop_requested:
                self._stop_pending(connection, job_execution_id, row.exit_message or "stopped on request")
            if self._has_live(connection, job_execution_id):
                return None
            final, message = self._verdict(connection, row)
            e = self._tables.executions.c
            connection.execute(
                update(self._tables.executions)
                .where(e.job_execution_id == job_execution_id)
                .values(
                    status=final.value,
                    active_instance_id=None,
                    end_time=db_now(),
                    last_updated=db_now(),
                    exit_message=message,
                )
            )
            notify(connection, DONE_CHANNEL, str(job_execution_id))
            return final

        return self._transactions.run(work)

    def unfinished_business(self) -> list[int]:
        """Active executions that could be finalised: nothing live, or stopping with PENDING strays."""

        def work(connection: Connection) -> list[int]:
            e, p = self._tables.executions.c, self._tables.partitions.c
            of_it = p.job_execution_id == e.job_execution_id
            live = select(p.step_execution_id).where(of_it, p.status.in_(_LIVE)).exists()
            stray = select(p.step_execution_id).where(of_it, p.status == PartitionStatus.PENDING.value).exists()
            query = select(e.job_execution_id).where(
                e.active_instance_id.is_not(None), ~live | ((e.stop_requested == 1) & stray)
            )
            return list(connection.execute(query).scalars())

        return self._transactions.run(work)

    def failing_fast(self) -> list[int]:
        """Active executions that a failed partition is to stop, and that nobody has stopped yet."""

        def work(connection: Connection) -> list[int]:
            e, p = self._tables.executions.c, self._tables.partitions.c
            failed = (p.job_execution_id == e.job_execution_id) & (p.status == PartitionStatus.FAILED.value)
            query = select(e.job_execution_id, e.settings).where(
                e.active_instance_id.is_not(None),
                e.stop_requested == 0,
                select(p.step_execution_id).where(failed).exists(),
            )
            rows = connection.execute(query).all()
            return [row.job_execution_id for row in rows if JobSettings.from_json(row.settings).fail_fast]

        return self._transactions.run(work)

    # --- pieces ------------------------------------------------------------------------------------------------

    def _locked(self, connection: Connection, job_execution_id: int) -> Row[Any]:
        e = self._tables.executions
        row = connection.execute(select(e).where(e.c.job_execution_id == job_execution_id).with_for_update()).first()
        if row is None:
            raise JobExecutionNotFoundError(f"there is no job execution {job_execution_id}")
        return row

    def _latest_row(self, connection: Connection, identity: JobIdentity, generation: int) -> Row[Any] | None:
        i = self._tables.instances.c
        instance_id = connection.execute(
            select(i.job_instance_id).where(
                i.job_name == identity.job_name, i.job_key == identity.job_key, i.generation == generation
            )
        ).scalar()
        return None if instance_id is None else self._latest_of_instance(connection, instance_id)

    def _latest_of_instance(self, connection: Connection, job_instance_id: int) -> Row[Any]:
        e = self._tables.executions
        query = (
            select(e)
            .where(e.c.job_instance_id == job_instance_id)
            .order_by(e.c.job_execution_id.desc())
            .limit(1)
            .with_for_update()
        )
        return connection.execute(query).one()

    def _attach_to(
        self, connection: Connection, row: Row[Any], owner_token: str | None, manager: JsonObject | None
    ) -> Launched:
        status = ExecutionStatus(row.status)
        created = owner_token is not None and row.owner_token == owner_token
        if status.is_active and owner_token is not None and not created:
            e = self._tables.executions.c
            values: dict[str, Any] = {"owner_token": owner_token, "last_updated": db_now()}
            if manager:
                values["manager"] = manager
            connection.execute(
                update(self._tables.executions).where(e.job_execution_id == row.job_execution_id).values(values)
            )
        return Launched(row.job_execution_id, status, created=created)

    def _instance_id(self, connection: Connection, new: NewExecution) -> int:
        statement = insert(self._tables.instances).values(
            job_name=new.identity.job_name,
            job_key=new.identity.job_key,
            generation=new.generation,
            parameters=new.identity.parameters,
            created_time=db_now(),
        )
        return _new_id(connection.execute(statement))

    def _insert_execution(
        self, connection: Connection, new: NewExecution, job_instance_id: int, partition_count: int
    ) -> int:
        empty = partition_count == 0
        statement = insert(self._tables.executions).values(
            job_instance_id=job_instance_id,
            active_instance_id=None if empty else job_instance_id,
            step_name=new.step_name,
            node_group=new.node_group,
            status=(ExecutionStatus.COMPLETED if empty else ExecutionStatus.STARTING).value,
            manager=new.manager,
            settings=new.settings.to_json(),
            stealing=int(new.settings.stealing),
            partition_count=partition_count,
            owner_token=new.owner_token,
            deadline=None if new.timeout_s is None else db_later(new.timeout_s),
            run_partition_key=new.run_partition_key,
            create_time=db_now(),
            start_time=db_now() if empty else None,
            end_time=db_now() if empty else None,
            last_updated=db_now(),
            stop_requested=0,
            exit_message="no partitions: nothing to do" if empty else None,
        )
        return _new_id(connection.execute(statement))

    def _insert_partitions(
        self,
        connection: Connection,
        new: NewExecution,
        job_instance_id: int,
        job_execution_id: int,
        partitions: Collection[Partition],
        placement: Placement | InTurn,
    ) -> None:
        of_all = {
            "job_execution_id": job_execution_id,
            "job_instance_id": job_instance_id,
            "step_name": new.step_name,
            "node_group": new.node_group,
            "status": PartitionStatus.PENDING.value,
            "version": 0,
            "priority": new.priority,
            "attempt": 0,
            "node_losses": 0,
            "available_at": db_now(),
            "create_time": db_now(),
            "last_updated": db_now(),
        }
        default = TransferPolicy.parse(new.settings.transferable)
        rows = (
            _row_of(partition, _node_of(placement, position, partition.key), default)
            for position, partition in enumerate(partitions)
        )
        try:
            if connection.dialect.name == "postgresql":
                copy_rows(connection, self._tables.partitions, of_all, rows)
            else:
                while batch := [_with_plain_context(row) for row in islice(rows, INSERT_BATCH_ROWS)]:
                    connection.execute(insert(self._tables.partitions).values(of_all), batch)
        except IntegrityError:
            _refuse_repeated_keys(partitions)
            raise

    def _copy_unfinished(
        self,
        connection: Connection,
        old: Row[Any],
        place: Place,
        owner_token: str | None,
        manager: JsonObject | None,
        deadline: Any,
    ) -> Launched:
        p = self._tables.partitions.c
        unfinished = (p.job_execution_id == old.job_execution_id) & (p.status != PartitionStatus.COMPLETED.value)
        rows = connection.execute(
            select(p.partition_key, p.weight).where(unfinished).order_by(p.step_execution_id)
        ).all()
        values = dict(old._mapping)
        del values["job_execution_id"]
        values.update(
            active_instance_id=old.job_instance_id,
            status=ExecutionStatus.STARTING.value,
            manager=manager or old.manager,
            partition_count=len(rows),
            owner_token=owner_token,
            deadline=deadline,
            create_time=db_now(),
            start_time=None,
            end_time=None,
            last_updated=db_now(),
            stop_requested=0,
            exit_message=None,
        )
        result = connection.execute(insert(self._tables.executions).values(values))
        execution_id = _new_id(result)
        copied = [
            "job_instance_id",
            "partition_key",
            "step_name",
            "node_group",
            "transfer_policy",
            "priority",
            "weight",
        ]
        copied += ["execution_context", "checkpoint", *(f"{name}_count" for name in COUNTER_NAMES)]
        fresh: dict[str, Any] = {
            "job_execution_id": literal(execution_id),
            "status": literal(PartitionStatus.PENDING.value),
            "version": literal(0),
            "attempt": literal(0),
            "node_losses": literal(0),
            "available_at": db_now(),
            "create_time": db_now(),
            "last_updated": db_now(),
            "is_transferable": restored_transferability(self._tables),
        }
        source = select(*(p[name] for name in copied), *fresh.values()).where(unfinished).order_by(p.step_execution_id)
        connection.execute(insert(self._tables.partitions).from_select([*copied, *fresh], source))
        self._place(connection, execution_id, place([Partition(row.partition_key, weight=row.weight) for row in rows]))
        notify(connection, WORK_CHANNEL, old.node_group)
        return Launched(execution_id, ExecutionStatus.STARTING, created=True)

    def _place(self, connection: Connection, job_execution_id: int, placement: Placement) -> None:
        p = self._tables.partitions.c
        keys_of: dict[str, list[str]] = {}
        for key, node_id in placement.items():
            if node_id is not None:
                keys_of.setdefault(node_id, []).append(key)
        for node_id, keys in keys_of.items():
            for start in range(0, len(keys), UPDATE_BATCH_ROWS):
                connection.execute(
                    update(self._tables.partitions)
                    .where(
                        p.job_execution_id == job_execution_id,
                        p.partition_key.in_(keys[start : start + UPDATE_BATCH_ROWS]),
                    )
                    .values(assigned_node=node_id)
                )

    def _refuse_late(self, connection: Connection, job_execution_id: int) -> None:
        e = self._tables.executions.c
        late = select(e.deadline < db_now()).where(e.job_execution_id == job_execution_id)
        if connection.execute(late).scalar():
            raise WaitTimeoutError(
                f"the deadline of job execution {job_execution_id} has passed, and a retry opens no new one: "
                "clear the task in Airflow to run what is left"
            )

    def _refuse_lost(self, connection: Connection, job_execution_id: int) -> None:
        p = self._tables.partitions.c
        lost = list(
            connection.execute(
                select(p.partition_key)
                .where(p.job_execution_id == job_execution_id, self.was_lost())
                .order_by(p.step_execution_id)
            ).scalars()
        )
        if lost:
            named = ", ".join(lost[:NAMED_FAILURES]) + (", …" if len(lost) > NAMED_FAILURES else "")
            raise LostPartitionsError(
                f"{len(lost)} partition(s) of job execution {job_execution_id} were lost while running and may have "
                f"done their work, wholly or in part: {named}. They are not transferable, so they are not run again "
                "by themselves: clear the task in Airflow, or run "
                f"`dbpartition restart {job_execution_id} --include-lost`, if that is safe"
            )

    def was_lost(self) -> Any:
        """The condition for "failed because its owner was lost, and may have run": only claimed rows count losses."""
        p = self._tables.partitions.c
        return (
            (p.status == PartitionStatus.FAILED.value)
            & (p.transfer_policy != TransferPolicy.ALWAYS.value)
            & (p.node_losses > 0)
        )

    def _stop_pending(self, connection: Connection, job_execution_id: int, reason: str) -> None:
        p = self._tables.partitions.c
        pending = (p.job_execution_id == job_execution_id) & (p.status == PartitionStatus.PENDING.value)
        ids = select(p.step_execution_id).where(pending).order_by(p.step_execution_id).with_for_update()
        if connection.execute(ids).first() is None:
            return
        record(connection, self._tables, PartitionEvent.STOPPED, pending, message=reason)
        move(
            connection,
            self._tables,
            Transitions.STOP_PENDING,
            p.job_execution_id == job_execution_id,
            values={p.exit_message: storable_text(reason)},
        )

    def _has_live(self, connection: Connection, job_execution_id: int) -> bool:
        p = self._tables.partitions.c
        query = select(p.step_execution_id).where(p.job_execution_id == job_execution_id, p.status.in_(_LIVE)).limit(1)
        return connection.execute(query).first() is not None

    def _is_stopping(self, connection: Connection, job_execution_id: int) -> bool:
        e = self._tables.executions.c
        query = select(e.stop_requested).where(e.job_execution_id == job_execution_id)
        return bool(connection.execute(query).scalar())

    def _verdict(self, connection: Connection, row: Row[Any]) -> tuple[ExecutionStatus, str | None]:
        """FAILED if anything failed, else STOPPED if anything was stopped, else COMPLETED; and why."""
        p = self._tables.partitions.c
        query = select(p.status, func.count()).where(p.job_execution_id == row.job_execution_id).group_by(p.status)
        counts: dict[str, int] = {row[0]: row[1] for row in connection.execute(query)}
        failed = counts.get(PartitionStatus.FAILED.value, 0)
        stopped = counts.get(PartitionStatus.STOPPED.value, 0)
        if failed:
            query = (
                select(p.partition_key, p.assigned_node, p.exit_message)
                .where(p.job_execution_id == row.job_execution_id, p.status == PartitionStatus.FAILED.value)
                .order_by(p.step_execution_id)
                .limit(NAMED_FAILURES)
            )
            lines = [f"{failed} of {row.partition_count} partitions failed"]
            for failure in connection.execute(query):
                said = headline(failure.exit_message) or "no message"
                lines.append(f"{failure.partition_key} on {failure.assigned_node}: {said}")
            return ExecutionStatus.FAILED, storable_text("\n".join(lines))
        if stopped:
            return ExecutionStatus.STOPPED, row.exit_message
        return ExecutionStatus.COMPLETED, None


def _called(job_execution_id: int, latest: Row[Any]) -> str:
    if latest.job_execution_id == job_execution_id:
        return f"job execution {job_execution_id}"
    return f"job execution {job_execution_id} was restarted as {latest.job_execution_id}, which"


def _new_id(result: CursorResult[Any]) -> int:
    key = result.inserted_primary_key
    assert key is not None
    return int(key[0])
