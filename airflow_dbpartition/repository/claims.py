"""Statements by which a node takes partitions: its own, nobody's, and (when idle) another's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Integer,
    Row,
    Select,
    Update,
    and_,
    any_,
    bindparam,
    exists,
    func,
    select,
    true,
    union_all,
    update,
)
from sqlalchemy.engine import Connection
from sqlalchemy.exc import NoResultFound

from airflow_dbpartition.dialects import db_later, db_now
from airflow_dbpartition.domain import (
    COUNTER_NAMES,
    Claim,
    Counters,
    ExecutionStatus,
    JobSettings,
    NodeStatus,
    PartitionEvent,
    PartitionStatus,
    TransferPolicy,
    Transitions,
)
from airflow_dbpartition.repository.moves import move, moving, record, started_transferability
from airflow_dbpartition.repository.transactions import Transactions
from airflow_dbpartition.schema import Tables


@dataclass(frozen=True)
class _ExecutionFacts:
    """What a claim needs of its execution; none of it ever changes."""

    settings: JobSettings
    job_name: str
    job_key: str
    generation: int


@dataclass(frozen=True)
class _Claimer:
    """Who claims, and what it can run."""

    node_id: str
    node_group: str
    steps: tuple[str, ...]


_MOST = "most"  # the parameter of a claim's statement
_CACHED_EXECUTIONS = 1000
_CLAIM_COLUMNS = (  # the counters last: see _COUNTERS
    "step_execution_id",
    "job_execution_id",
    "job_instance_id",
    "partition_key",
    "step_name",
    "assigned_node",
    "transfer_policy",
    "version",
    "priority",
    "attempt",
    "execution_context",
    "checkpoint",
    *(f"{name}_count" for name in COUNTER_NAMES),
)
_COUNTERS = slice(len(_CLAIM_COLUMNS) - len(COUNTER_NAMES), len(_CLAIM_COLUMNS))


def _for_a_claim(candidates: Select[Any], limit: ColumnElement[int] | int) -> Select[Any]:
    """The first of them, locked; what others are about to take is passed over."""
    return candidates.limit(limit).with_for_update(skip_locked=True)


class Claims:
    """Taking partitions. A claim is repeated by nobody: if its commit is in doubt, the heartbeat finds it."""

    def __init__(self, tables: Tables, transactions: Transactions) -> None:
        self._tables = tables
        self._transactions = transactions
        self._dialect = transactions.engine.dialect.name
        self._facts: dict[int, _ExecutionFacts] = {}
        self._statements: dict[_Claimer, Update] = {}

    def claim(
        self,
        *,
        node_id: str,
        node_group: str,
        steps: Iterable[str],
        limit: int,
        steal_after_s: float | None = None,
    ) -> list[Claim]:
        """Take at most `limit` partitions: the node's own first, then nobody's, then (if allowed) another node's.

        Args:
            steps: names that this node has registered; nothing else is taken.
            steal_after_s: take another node's transferable, not started work that has waited so many seconds for
                its own node; None = never.

        Returns:
            What really moved, in the order in which it is to be run.
        """
        claimer = _Claimer(node_id, node_group, tuple(sorted(steps)))
        if limit < 1 or not claimer.steps:
            return []
        if self._dialect == "postgresql":
            taken = self._take_at_once(claimer, limit)
            if taken or steal_after_s is None or not self._is_any_stealable(claimer, steal_after_s):
                return taken

        def work(connection: Connection) -> list[Claim]:
            taken: list[Claim] = []
            if self._dialect != "postgresql":
                taken = self._take(connection, claimer, self._mine(claimer), limit)
                if len(taken) < limit:
                    taken += self._take(connection, claimer, self._nobodys(claimer), limit - len(taken))
            if not taken and steal_after_s is not None:
                taken = self._take(connection, claimer, self._others(claimer, steal_after_s), limit, stealing=True)
            return taken

        return self._transactions.run(work, repeatable=False, conflicts=True)

    def waiting(self, *, node_id: str, node_group: str, steps: Iterable[str]) -> bool:
        """Whether any PENDING partition is left that this node could run now, later or by stealing."""

        def work(connection: Connection) -> bool:
            p, e = self._tables.partitions.c, self._tables.executions.c
            pending = (
                p.status == PartitionStatus.PENDING.value,
                p.node_group == node_group,
                p.step_name.in_(sorted(steps)),
                p.job_execution_id == e.job_execution_id,
                e.stop_requested == 0,
            )
            # One question for each of the three partial indexes, in its order: else all of history may be read.
            reachable = (
                p.assigned_node == node_id,
                p.assigned_node.is_(None),
                p.assigned_node.is_not(None) & (p.is_transferable == 1) & (e.stealing == 1),
            )
            first = (
                select(p.step_execution_id).where(*pending).order_by(p.priority.desc(), p.step_execution_id).limit(1)
            )
            return any(connection.execute(first.where(condition)).first() for condition in reachable)

        return self._transactions.run(work)

    def waiting_for_others(self, *, node_group: str, steps: Iterable[str]) -> list[str]:
        """Other steps than these, for which nobody's partitions of the group are PENDING."""

        def work(connection: Connection) -> list[str]:
            p = self._tables.partitions.c
            query = (
                select(p.step_name)
                .distinct()
                .where(
                    p.status == PartitionStatus.PENDING.value,
                    p.assigned_node.is_(None),
                    p.node_group == node_group,
                    p.step_name.not_in(sorted(steps)),
                )
            )
            return sorted(connection.execute(query).scalars())

        return self._transactions.run(work)

    def mark_started(self, job_execution_id: int) -> None:
        """STARTING → STARTED at the first claim; apart from it, since executions are locked before partitions."""

        def work(connection: Connection) -> None:
            e = self._tables.executions.c
            connection.execute(
                update(self._tables.executions)
                .where(e.job_execution_id == job_execution_id, e.status == ExecutionStatus.STARTING.value)
                .values(status=ExecutionStatus.STARTED.value, start_time=db_now(), last_updated=db_now())
            )

        self._transactions.run(work)

    def _take_at_once(self, claimer: _Claimer, limit: int) -> list[Claim]:
        """The node's own and nobody's, by one statement of PostgreSQL."""
        if claimer not in self._statements:
            self._statements = {claimer: self._claiming(claimer)}  # a node has one name at a time
        statement = self._statements[claimer]

        def work(connection: Connection) -> Sequence[Row[Any]]:
            return connection.execute(statement, {_MOST: limit}).all()

        rows = self._transactions.run(work, repeatable=False, atomic=False)
        # Apart from the claim, which has been committed: what is tried again must not claim again.
        execution_ids = {row.job_execution_id for row in rows}
        if not execution_ids <= self._facts.keys():
            self._transactions.run(lambda connection: self._learn(connection, execution_ids), atomic=False)
        in_order = sorted(rows, key=lambda row: (not row.was_mine, -row.priority, row.step_execution_id))
        return [self._claim(row, claimer.node_id, read_before=False) for row in in_order]

    def _claiming(self, claimer: _Claimer) -> Update:
        p = self._tables.partitions.c
        most = bindparam(_MOST, type_=Integer)
        # Chosen once, whatever the plan, and joined as an array: as rows they could be more than the limit.
        candidates = partial(self._candidates, claimer, columns=[p.step_execution_id])
        mine = _for_a_claim(candidates(self._mine(claimer)), most).cte("mine")
        room = most - select(func.count()).select_from(mine).scalar_subquery()
        nobodys = _for_a_claim(candidates(self._nobodys(claimer)), room).cte("nobodys")
        chosen = union_all(select(mine.c.step_execution_id), select(nobodys.c.step_execution_id))
        was_mine = p.step_execution_id == any_(func.array(select(mine.c.step_execution_id).scalar_subquery()))
        claiming = moving(
            self._dialect,
            self._tables,
            Transitions.CLAIM,
            p.step_execution_id == any_(func.array(chosen.scalar_subquery())),
            values=self._changes(claimer),
            by_id=True,
        )
        return claiming.returning(*self._columns, was_mine.label("was_mine"))

    def _is_any_stealable(self, claimer: _Claimer, steal_after_s: float) -> bool:
        """Whether a theft is worth its transaction."""
        p = self._tables.partitions.c

        def work(connection: Connection) -> bool:
            others = self._others(claimer, steal_after_s)
            query = self._candidates(claimer, others, columns=[p.step_execution_id], stealing=True)
            return connection.execute(query.limit(1)).first() is not None

        return self._transactions.run(work, atomic=False)

    def _take(
        self,
        connection: Connection,
        claimer: _Claimer,
        whose: ColumnElement[bool],
        limit: int,
        *,
        stealing: bool = False,
    ) -> list[Claim]:
        """Read and lock, then move: also for databases that return nothing from an UPDATE."""
        p = self._tables.partitions.c
        candidates = self._candidates(claimer, whose, columns=self._columns, stealing=stealing)
        rows = connection.execute(_for_a_claim(candidates, limit)).all()
        if not rows:
            return []
        chosen = p.step_execution_id.in_([row.step_execution_id for row in rows])
        if stealing:
            message = f"taken by idle node {claimer.node_id}"
            record(connection, self._tables, PartitionEvent.STOLEN, chosen, message=message)
        transition = Transitions.STEAL if stealing else Transitions.CLAIM
        moved = move(connection, self._tables, transition, chosen, values=self._changes(claimer), by_id=True)
        if moved != len(rows):  # the rows are locked by us, so this is a database whose row locks are none
            raise NoResultFound(f"only {moved} of {len(rows)} partitions could be claimed")
        self._learn(connection, {row.job_execution_id for row in rows})
        return [
            self._claim(row, claimer.node_id, read_before=True, stolen_from=row.assigned_node if stealing else None)
            for row in rows
        ]

    def _changes(self, claimer: _Claimer) -> dict[Any, Any]:
        """What a claim writes beside the status."""
        p = self._tables.partitions.c
        return {
            p.assigned_node: claimer.node_id,
            p.attempt: p.attempt + 1,
            p.claim_time: db_now(),
            p.is_transferable: started_transferability(self._tables),
        }

    def _mine(self, claimer: _Claimer) -> ColumnElement[bool]:
        return self._tables.partitions.c.assigned_node == claimer.node_id

    def _nobodys(self, claimer: _Claimer) -> ColumnElement[bool]:
        p = self._tables.partitions.c
        return p.assigned_node.is_(None) & (p.node_group == claimer.node_group)

    def _others(self, claimer: _Claimer, steal_after_s: float) -> ColumnElement[bool]:
        p = self._tables.partitions.c
        return and_(
            p.assigned_node.is_not(None),
            p.assigned_node != claimer.node_id,
            p.node_group == claimer.node_group,
            p.is_transferable == 1,
            p.last_updated <= db_later(-steal_after_s),
        )

    def _candidates(
        self,
        claimer: _Claimer,
        whose: ColumnElement[bool],
        *,
        columns: Sequence[ColumnElement[Any]],
        stealing: bool = False,
    ) -> Select[Any]:
        """What may be taken, in order; to be locked `_for_a_claim`."""
        p, e, n = self._tables.partitions.c, self._tables.executions.c, self._tables.nodes.c
        runnable = [
            e.job_execution_id == p.job_execution_id,
            e.stop_requested == 0,
            e.status.in_((ExecutionStatus.STARTING.value, ExecutionStatus.STARTED.value)),
        ]
        if stealing:
            runnable.append(e.stealing == 1)
        runs: ColumnElement[bool] = exists().where(*runnable)
        if self._dialect in ("mysql", "mariadb"):
            # A bare EXISTS becomes a join that sorts, and so locks, every row: other claimers would find nothing.
            runs = runs.is_(true())
        return (
            select(*columns)
            .where(
                p.status == PartitionStatus.PENDING.value,
                whose,
                p.available_at <= db_now(),
                p.step_name.in_(claimer.steps),
                runs,
                # A node that was removed must not claim under its old name.
                exists().where(n.node_id == claimer.node_id, n.status == NodeStatus.ACTIVE.value),
            )
            .order_by(p.priority.desc(), p.step_execution_id)
        )

    @property
    def _columns(self) -> list[ColumnElement[Any]]:
        """What a claim is made of."""
        return [self._tables.partitions.c[name] for name in _CLAIM_COLUMNS]

    def _learn(self, connection: Connection, execution_ids: set[int]) -> None:
        unknown = execution_ids - self._facts.keys()
        if not unknown:
            return
        if len(self._facts) > _CACHED_EXECUTIONS:
            self._facts.clear()
            unknown = execution_ids
        e, i = self._tables.executions.c, self._tables.instances.c
        query = (
            select(e.job_execution_id, e.settings, i.job_name, i.job_key, i.generation)
            .join_from(self._tables.executions, self._tables.instances, e.job_instance_id == i.job_instance_id)
            .where(e.job_execution_id.in_(unknown))
        )
        for row in connection.execute(query):
            self._facts[row.job_execution_id] = _ExecutionFacts(
                JobSettings.from_json(row.settings), row.job_name, row.job_key, row.generation
            )

    def _claim(self, row: Row[Any], node_id: str, *, read_before: bool, stolen_from: str | None = None) -> Claim:
        """The claim of a row that was read before it was claimed, or after."""
        facts = self._facts[row.job_execution_id]
        return Claim(
            step_execution_id=row.step_execution_id,
            job_execution_id=row.job_execution_id,
            job_instance_id=row.job_instance_id,
            node_id=node_id,
            version=row.version + read_before,
            partition_key=row.partition_key,
            step_name=row.step_name,
            attempt=row.attempt + read_before,
            context=row.execution_context,
            checkpoint=row.checkpoint,
            counters=Counters(*row[_COUNTERS]),
            settings=facts.settings,
            transfer_policy=TransferPolicy(row.transfer_policy),
            job_name=facts.job_name,
            job_key=facts.job_key,
            generation=facts.generation,
            stolen_from=stolen_from,
        )
