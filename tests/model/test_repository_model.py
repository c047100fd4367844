"""Hypothesis drives the job repository against a model in plain Python: any verb, in any order, by several nodes.

The model knows three things: which claims are good, what has ended, and who is silent. From these alone it says of
every settle whether it must be accepted or refused; and after every step the tables must keep the invariants.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import delete, select

from airflow_dbpartition.config import Timings
from airflow_dbpartition.domain import (
    Claim,
    Counters,
    ExecutionStatus,
    JobExecution,
    JobIdentity,
    JobSettings,
    NodeStatus,
    Partition,
    PartitionStatus,
    TransferPolicy,
)
from airflow_dbpartition.errors import (
    ClaimLostError,
    JobAbandonedError,
    JobAlreadyCompleteError,
    JobExecutionNotFoundError,
    JobExecutionRunningError,
    LostPartitionsError,
)
from airflow_dbpartition.recovery import Recovery
from airflow_dbpartition.repository import JobRepository, NewExecution
from tests.databases import NAMES, NotAtHandError, Servers
from tests.scenarios import STEP, add_node, claim, silence, to_nobody

EXAMPLES = round(15 * float(os.environ.get("DBPARTITION_TEST_ROUNDS", "1")))
STEPS = 50
TIMINGS = Timings(heartbeat_s=3, unreachable_after_s=10, remove_after_s=30)
DEAD_FOR_S = 45.0

LIVE = (PartitionStatus.PENDING.value, PartitionStatus.CLAIMED.value)
TERMINAL = (PartitionStatus.COMPLETED.value, PartitionStatus.FAILED.value, PartitionStatus.STOPPED.value)


@dataclass
class Model:
    """What must be so, whatever the tables say.

    Args:
        good: node and version of every claim that its owner may still settle, by step_execution_id.
        settled: claims, by id and version, that their owner has settled; the same again may be accepted.
        silent: nodes that have not been heard for longer than `remove_after`.
        gone: nodes that have been removed.
        ended: status and version of rows that have ended.
        versions: the highest version seen of a row.
    """

    good: dict[int, tuple[str, int]] = field(default_factory=dict)
    settled: set[tuple[int, int]] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    nodes: list[str] = field(default_factory=list)
    ended: dict[int, tuple[str, int]] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    purged: bool = False

    @property
    def living(self) -> list[str]:
        return [node_id for node_id in self.nodes if node_id not in self.gone]

    def may_settle(self, taken: Claim) -> bool:
        return self.good.get(taken.step_execution_id) == (taken.node_id, taken.version)

    def forget_claims_of(self, node_id: str) -> None:
        self.good = {step_id: held for step_id, held in self.good.items() if held[0] != node_id}


class Cluster(RuleBasedStateMachine):
    """Several nodes, several jobs, one repository."""

    repository: JobRepository  # set by the test: one database for all examples
    executions = Bundle("executions")
    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.recovery = Recovery(self.repository, TIMINGS)
        self.jobs = 0

    def teardown(self) -> None:
        tables = self.repository.tables
        with self.repository.engine.begin() as connection:
            for table in (tables.events, tables.partitions, tables.executions, tables.instances, tables.nodes):
                connection.execute(delete(table))

    # --- nodes -------------------------------------------------------------------------------------------------

    @initialize()
    def begins_with_two_nodes(self) -> None:
        self.a_node_joins()
        self.a_node_joins()

    @precondition(lambda self: len(self.model.living) < 4)
    @rule()
    def a_node_joins(self) -> None:
        node_id = f"n{len(self.model.nodes)}"
        add_node(self.repository, node_id)
        self.model.nodes.append(node_id)

    @precondition(lambda self: len(self.model.living) > 1)
    @rule(data=st.data(), trouble=st.sampled_from(("silence", "silence", "leaves", "drains")))
    def a_node_has_trouble(self, data: st.DataObject, trouble: str) -> None:
        node_id = data.draw(st.sampled_from(self.model.living))
        if trouble == "silence":
            silence(self.repository, node_id, DEAD_FOR_S)
            self.model.silent.add(node_id)
        elif trouble == "leaves":
            self.recovery.leave(node_id)
            self.model.gone.add(node_id)
            self.model.forget_claims_of(node_id)
        else:
            self.recovery.hand_over(node_id)

    @rule(data=st.data())
    def a_node_beats(self, data: st.DataObject) -> None:
        node_id = data.draw(st.sampled_from(self.model.nodes))
        reply = self.repository.nodes.heartbeat(node_id, current_load=0)
        if node_id in self.model.gone:
            assert reply.status is None
            return
        self.model.silent.discard(node_id)
        mine = {step_id: held[1] for step_id, held in self.model.good.items() if held[0] == node_id}
        assert reply.held == mine
        assert reply.status is NodeStatus.ACTIVE

    @rule()
    def somebody_sweeps(self) -> None:
        report = self.recovery.sweep(may_judge=True)
        assert set(report.removed) == self.model.silent - self.model.gone
        for node_id in report.removed:
            self.model.gone.add(node_id)
            self.model.forget_claims_of(node_id)

    # --- executions --------------------------------------------------------------------------------------------

    @initialize(target=executions, policy=st.sampled_from(TransferPolicy))
    def begins_with_a_job(self, policy: TransferPolicy) -> int:
        return self._submit({f"p{number}": None for number in range(4)}, policy)

    @rule(
        target=executions,
        count=st.integers(0, 4),
        policy=st.sampled_from(TransferPolicy),
        stealing=st.booleans(),
        fail_fast=st.booleans(),
        owners=st.data(),
    )
    def a_job_is_submitted(
        self, count: int, policy: TransferPolicy, stealing: bool, fail_fast: bool, owners: st.DataObject
    ) -> int:
        owner = st.sampled_from([None, *self.model.living])
        placement = {f"p{number}": owners.draw(owner) for number in range(count)}
        return self._submit(placement, policy, stealing=stealing, fail_fast=fail_fast)

    def _submit(self, placement: dict[str, str | None], policy: TransferPolicy, **options: bool) -> int:
        self.jobs += 1
        new = NewExecution(
            identity=JobIdentity(f"job{self.jobs}", {}),
            step_name=STEP,
            settings=JobSettings(
                transferable=policy.value,
                partition_retries=3,
                max_node_losses=2,
                **options,  # type: ignore[arg-type]
            ),
        )
        planned = [Partition(key) for key in placement]
        launched = self.repository.executions.submit(new, planned, placement)
        again = self.repository.executions.submit(new, planned, placement)
        assert launched.created
        assert (again.job_execution_id, again.created) == (launched.job_execution_id, False)
        return launched.job_execution_id

    @rule(target=executions, job_execution_id=executions, verb=st.sampled_from(("stop", "abandon", "restart", "purge")))
    def a_person_acts(self, job_execution_id: int, verb: str) -> Any:
        with self._unless_purged():
            before = self.repository.reading.latest_of_instance(job_execution_id)
            if verb == "stop":
                self.repository.executions.stop(job_execution_id, reason="enough")
            elif verb == "abandon":
                self._abandon(job_execution_id)
            elif verb == "purge":
                self.repository.retention.purge(older_than_s=0.0)
                self.model.purged = True
            else:
                return self._restart(before)
        return multiple()

    # --- work --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.gone)
    @rule(data=st.data())
    def a_removed_node_claims_nothing(self, data: st.DataObject) -> None:
        assert claim(self.repository, data.draw(st.sampled_from(sorted(self.model.gone))), 3, steal_after_s=0.0) == []

    @precondition(lambda self: self.model.living)
    @rule(target=claims, data=st.data(), limit=st.integers(1, 3), stealing=st.booleans())
    def a_node_claims(self, data: st.DataObject, limit: int, stealing: bool) -> Any:
        return self._claim(data.draw(st.sampled_from(self.model.living)), limit, stealing=stealing)

    def _claim(self, node_id: str, limit: int, *, stealing: bool = False) -> Any:
        taken = claim(self.repository, node_id, limit, steal_after_s=0.0 if stealing else None)
        assert len(taken) <= limit
        for one in taken:
            assert one.step_execution_id not in self.model.good, "two owners"
            self.model.good[one.step_execution_id] = (node_id, one.version)
        return multiple(*taken)

    @rule(target=claims, taken=claims)
    def a_claim_fails_and_is_tried_again_by_its_own_node(self, taken: Claim) -> Any:
        """A to A: only the version tells the old claim from the new one."""
        self._give_back(taken, released=False)
        return self._claim(taken.node_id, 10)

    @rule(taken=claims)
    def a_claim_is_completed(self, taken: Claim) -> None:
        settle = self.repository.settlements.complete
        self._settle(taken, "completed", lambda: settle(taken, counters=Counters(write=1), result={"done": True}))

    @rule(taken=claims, released=st.booleans())
    def a_claim_is_given_back(self, taken: Claim, released: bool) -> None:
        self._give_back(taken, released=released)

    def _give_back(self, taken: Claim, *, released: bool) -> None:
        settlements = self.repository.settlements
        if released:
            self._settle(taken, "pending", lambda: settlements.release(taken, message="going"))
        else:
            self._settle(taken, "pending", lambda: settlements.retry(taken, message="once more", delay_s=0.0))

    @rule(taken=claims, asked=st.booleans())
    def a_claim_ends_badly(self, taken: Claim, asked: bool) -> None:
        settlements = self.repository.settlements
        if asked:
            self._settle(taken, "stopped", lambda: settlements.stop(taken))
        else:
            self._settle(taken, "failed", lambda: settlements.fail(taken, message="broken"))

    @rule(taken=claims)
    def a_page_is_committed(self, taken: Claim) -> None:
        """A step's transaction: its writes stand exactly when its claim does."""
        settlements = self.repository.settlements
        good = self.model.may_settle(taken)
        try:
            with self.repository.engine.begin() as connection:
                settlements.checkpoint(connection, taken, checkpoint={"page": 1}, counters=Counters(read=1))
            assert good, "a zombie's transaction was committed"
        except ClaimLostError:
            assert not good, "a good claim was refused"

    @rule(taken=consumes(claims))
    def a_claim_is_forgotten(self, taken: Claim) -> None:
        """Its owner has lost it, say with a crash: only the cluster can bring it back."""
        del taken

    # --- what must be so after every step ----------------------------------------------------------------------

    @invariant()
    def the_tables_keep_the_invariants(self) -> None:
        partitions, executions = self._rows()
        claimed = {}
        for row in partitions:
            step_id = row.step_execution_id
            assert row.version >= self.model.versions.get(step_id, 0), "a version went backwards"
            self.model.versions[step_id] = row.version
            if step_id in self.model.ended:
                assert (row.status, row.version) == self.model.ended[step_id], "a terminal row moved"
            elif row.status in TERMINAL:
                self.model.ended[step_id] = (row.status, row.version)
            if row.status == PartitionStatus.CLAIMED.value:
                claimed[step_id] = (row.assigned_node, row.version)
        assert claimed == self.model.good, "the rows and the owners disagree"
        done = Counter((row.job_instance_id, row.partition_key) for row in partitions if row.status == "COMPLETED")
        assert max(done.values(), default=1) == 1, "a partition was completed twice"
        live = {row.job_execution_id for row in partitions if row.status in LIVE}
        active = [row for row in executions if ExecutionStatus(row.status).is_active]
        assert {row.job_execution_id for row in active} == live, "an execution is active exactly while work is left"
        assert {row.job_execution_id for row in executions if row.active_instance_id is not None} == live
        instances = Counter(row.job_instance_id for row in active)
        assert max(instances.values(), default=1) == 1, "an instance has two active executions"

    # --- pieces ------------------------------------------------------------------------------------------------

    def _abandon(self, job_execution_id: int) -> None:
        before = self.repository.reading.execution(job_execution_id).status
        try:
            self.repository.executions.abandon(job_execution_id)
        except JobExecutionRunningError:
            assert before.is_active
        except JobAlreadyCompleteError:
            assert before is ExecutionStatus.COMPLETED

    def _restart(self, before: JobExecution) -> Any:
        """Without a person's word first; what that refuses to run again, a person's word does."""
        for include_lost in (False, True):
            try:
                launched = self.repository.executions.restart(
                    before.job_execution_id, place=to_nobody, include_lost=include_lost
                )
            except JobAlreadyCompleteError:
                assert before.status is ExecutionStatus.COMPLETED
            except JobAbandonedError:
                assert before.status is ExecutionStatus.ABANDONED
            except LostPartitionsError:
                assert not include_lost
            else:
                assert launched.created == (not before.status.is_active)
                return launched.job_execution_id
        return multiple()

    def _settle(self, taken: Claim, what: str, write: Any) -> None:
        key = (taken.step_execution_id, taken.version)
        good = self.model.may_settle(taken)
        before = self._partition(taken.step_execution_id)
        try:
            write()
        except ClaimLostError:
            assert not good, "a good claim was refused"
            return
        if not good:  # accepted as a repetition, since the row already stands where it was to go; nothing is written
            assert key in self.model.settled, "a stale claim was settled"
            assert before.version == taken.version
            assert before.status in (what.upper(), PartitionStatus.STOPPED.value)
            assert self._partition(taken.step_execution_id) == before
        else:
            del self.model.good[taken.step_execution_id]
            self.model.settled.add(key)
            self.recovery.after_failure(taken.job_execution_id)  # as its worker does, once it has committed

    @contextmanager
    def _unless_purged(self) -> Iterator[None]:
        try:
            yield
        except JobExecutionNotFoundError:
            assert self.model.purged

    def _partition(self, step_execution_id: int) -> Any:
        p = self.repository.tables.partitions
        with self.repository.engine.connect() as connection:
            return connection.execute(select(p).where(p.c.step_execution_id == step_execution_id)).first()

    def _rows(self) -> tuple[list[Any], list[Any]]:
        tables = self.repository.tables
        with self.repository.engine.connect() as connection:
            return list(connection.execute(select(tables.partitions))), list(
                connection.execute(select(tables.executions))
            )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.timeout(900)
def test_any_order_of_verbs_keeps_the_invariants(name: str, servers: Servers) -> None:
    try:
        server = servers.get(name)
    except NotAtHandError as reason:
        pytest.skip(str(reason))
    with server.fresh() as database:
        repository = database.migrated()
        machine = type("ClusterOnOneDatabase", (Cluster,), {"repository": repository})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        repository.close()
