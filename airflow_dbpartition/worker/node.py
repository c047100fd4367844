"""The worker: a node that registers, claims, runs, settles, sweeps, drains and fences itself."""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import secrets
import select
import signal
import socket
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any

import structlog

from airflow_dbpartition.config import DatabaseConfig, WorkerConfig
from airflow_dbpartition.domain import Claim, NodeStatus, PartitionEvent
from airflow_dbpartition.errors import ClaimLostError, ConfigurationError, DbPartitionError
from airflow_dbpartition.recovery import Recovery, SweepReport
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.revision import require_current
from airflow_dbpartition.worker.attention import Attention
from airflow_dbpartition.worker.executors import Executor, ThreadExecutor
from airflow_dbpartition.worker.feeding import ClaimKey, key_of
from airflow_dbpartition.worker.health import HealthServer
from airflow_dbpartition.worker.heartbeat import Beat, Heartbeat
from airflow_dbpartition.worker.lifeline import Lifeline
from airflow_dbpartition.worker.logs import ids_of
from airflow_dbpartition.worker.metrics import Metrics
from airflow_dbpartition.worker.processes import ProcessExecutor
from airflow_dbpartition.worker.runner import FAILED, INTERRUPTED
from airflow_dbpartition.worker.settling import Settling

log = structlog.get_logger("dbpartition.worker")

EXIT_WELL = 0
EXIT_WORK_FAILED = 3
EXIT_FENCED = 75

_DEEP_SWEEP_EVERY = 30
_LONGEST_WAIT_S = 1.0
_LOOP_STUCK_S = 600.0  # more than a hung database holds it for: or an outage would restart the whole fleet
_INTERRUPT_PATIENCE_S = 2.0
_FINAL_FLUSH_S = 5.0


def package_version() -> str:
    try:
        return version("airflow-dbpartition")
    except PackageNotFoundError:
        return "unknown"


def new_node_id(prefix: str | None) -> str:
    """`<prefix>-<random>`: new at every start, never reused, so that a name never stands for two lives."""
    base = prefix or re.sub(r"[^\w.-]", "-", socket.gethostname())[:150] or "node"
    return f"{base}-{secrets.token_hex(4)}"


@dataclass
class _Running:
    claim: Claim
    acquired: float
    stop_requested: bool = False
    asked_at: float | None = None
    kill_at: float | None = None


class Worker:
    """One node. `run` returns when it has drained.

    Args:
        database: the job repository.
        config: behaviour.
        logging: arguments of `configure_logging`, handed on to child processes.
    """

    def __init__(
        self, database: DatabaseConfig, config: WorkerConfig, *, logging: dict[str, str] | None = None
    ) -> None:
        self._database = database
        self._config = config
        timings = config.timings
        self._timings = timings
        self.metrics = Metrics()
        self._repository = JobRepository.connect(
            DatabaseConfig(
                url=database.url,
                schema=database.schema,
                connect_timeout_s=database.connect_timeout_s,
                statement_timeout_s=database.statement_timeout_s,
                lock_timeout_s=database.lock_timeout_s,
                application_name="dbpartition worker",
            ),
            deadline_s=(database.statement_timeout_s or 30.0) * 2,
        )
        self._recovery = Recovery(self._repository, timings)
        self._settling = Settling(self._repository, self._recovery, self.metrics)
        self._lifeline = Lifeline.create()
        self._wake_read, self._wake_write = os.pipe()
        self._is_woken = False
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
            weakref.finalize(self, os.close, fd)  # not before: a thread of the user's may still wake us
        self._executor = self._make_executor(logging or {})
        self._heartbeat = Heartbeat(
            database,
            timings,
            listen=config.listen,
            lifeline=self._lifeline,
            on_fence=self._fence,
            wake=self._wake,
        )
        self.metrics.heartbeat_age.set_function(lambda: self._heartbeat.silent_for_s)
        self.node_id = ""
        self.steps: tuple[str, ...] = ()
        self._running: dict[ClaimKey, _Running] = {}
        self._started_executions: set[int] = set()
        self._signals = 0
        self._drain_since: float | None = None
        self._grace_until = 0.0
        self._interrupted_at: float | None = None
        self._attention = Attention(timings, time.monotonic())
        self._claim_failures = 0
        self._idle_since: float | None = None
        self._fleet: tuple[int, int, float] = (0, 1, 0.0)  # rank, size, database clock minus ours
        self._swept_at = -math.inf
        self._sweeps = 0
        self._turned = time.monotonic()

    def _make_executor(self, logging: dict[str, str]) -> Executor:
        config = self._config
        users = DatabaseConfig(
            url=self._database.url,
            schema=self._database.schema,
            connect_timeout_s=self._database.connect_timeout_s,
            statement_timeout_s=None,  # how long the user's statements take is the user's business
            lock_timeout_s=max(self._database.lock_timeout_s, 60.0),
            application_name="dbpartition step",
            pool_size=1 if config.executor == "process" else config.concurrency,
        )
        if config.executor == "thread":
            return ThreadExecutor(
                slots=config.concurrency, imports=config.imports, database=users, prefetch=config.prefetch
            )
        return ProcessExecutor(
            slots=config.concurrency,
            imports=config.imports,
            database=users,
            lifeline=self._lifeline,
            logging=logging,
            max_partitions=config.max_partitions_per_child,
            prefetch=config.prefetch,
        )

    # --- life --------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run until drained; returns the exit code: 0, or 3 where `drain` is set and a partition failed.

        Raises:
            ConfigurationError, SchemaError, DatabaseError: it could not start.
        """
        health = None
        with self._handled_signals():
            try:
                require_current(self._repository.engine, self._database.schema)
                self.steps = self._executor.start(self._wake)
                if not self.steps:
                    raise ConfigurationError(
                        f"no step is registered by {', '.join(self._config.imports) or 'any entry point'}: "
                        'decorate a function with @step("name") and name its module with --import'
                    )
                if self._config.health_port is not None:
                    health = HealthServer(
                        self._config.health_port, live=self._is_live, ready=self._is_ready, metrics=self.metrics
                    )
                self._register()
                self._heartbeat.start(self.node_id, lambda: len(self._running))
                try:
                    while not self._turn():
                        pass
                finally:
                    self._leave()  # also when the loop itself broke: nobody has to wait for a sweep
            finally:
                if health is not None:
                    health.close()
                self._executor.close()
                self._heartbeat.close()
                self._repository.close()
        failed = self._config.drain and self._settling.any_failed
        return EXIT_WORK_FAILED if failed else EXIT_WELL

    @contextlib.contextmanager
    def _handled_signals(self) -> Iterator[None]:
        def handle(signum: int, _frame: FrameType | None) -> None:
            self._signals += 1
            del signum

        before = {}
        wakeup = -1
        in_main_thread = True
        try:
            wakeup = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
            for signum in (signal.SIGTERM, signal.SIGINT):
                before[signum] = signal.signal(signum, handle)
        except ValueError:  # not the main thread: tests and embedders stop us by `stop()`
            in_main_thread = False
        try:
            yield
        finally:
            if in_main_thread:
                signal.set_wakeup_fd(wakeup)
                for signum, previous in before.items():
                    signal.signal(signum, previous)

    def stop(self) -> None:
        """Do what SIGTERM does; callable from any thread, and again to shorten the wait."""
        self._signals += 1
        self._wake()

    def _wake(self) -> None:
        if self._is_woken:
            return  # and has yet to look at what there is
        self._is_woken = True
        with contextlib.suppress(OSError):  # full = already awake; closed = gone
            os.write(self._wake_write, b"w")

    def _register(self) -> None:
        node_id = new_node_id(self._config.node_prefix)
        self._repository.nodes.register(
            node_id=node_id,
            node_group=self._config.node_group,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=package_version()[:50],
            capacity=self._config.concurrency,
            steps=self.steps,
        )
        self.node_id = node_id  # not before: the beats of the old one are what makes us try again
        log.info(
            "node registered",
            node_id=self.node_id,
            node_group=self._config.node_group,
            concurrency=self._config.concurrency,
            executor=self._config.executor,
            steps=list(self.steps),
        )

    def _is_live(self) -> tuple[bool, str]:
        stuck_s = time.monotonic() - self._turned
        return (stuck_s < _LOOP_STUCK_S, f"loop turned {stuck_s:.1f} s ago")

    def _is_ready(self) -> tuple[bool, str]:
        silent_s = self._heartbeat.silent_for_s
        if self._drain_since is not None:
            return (False, "draining")
        well = silent_s < self._timings.unreachable_after_s
        return (well, f"node {self.node_id}, heartbeat answered {silent_s:.1f} s ago")

    # --- one turn of the loop ----------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Handle what has happened, start what can be started, sleep until something is due; True = done."""
        self._turned = time.monotonic()
        self._take_signals()
        self._take_beats()
        self._take_outcomes()
        self._settling.write_due()
        self._enforce_limits()
        claimed = self._claim()
        self._settling.end_executions({running.claim.job_execution_id for running in self._running.values()})
        self._sweep()
        self.metrics.running.set(len(self._running))
        if self._drained():
            return True
        self._sleep(0.0 if claimed and self._executor.free_slots > 0 else self._time_to_sleep())
        return False

    def _sleep(self, seconds: float) -> None:
        watched = [self._wake_read, *self._executor.watched()]
        with contextlib.suppress(InterruptedError):
            readable, _, _ = select.select(watched, [], [], seconds)
            if self._wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
        self._is_woken = False  # before anything is looked at: what comes from here on wakes us again

    def _time_to_sleep(self) -> float:
        now = time.monotonic()
        moments = [now + _LONGEST_WAIT_S, self._next_turn()]
        if self._wants_work():
            moments.append(min(self._attention.next_look, self._settling.next_retry))
        if not self._settling.is_idle:
            moments.append(now + 0.25)
        for running in self._running.values():
            if running.kill_at is not None:
                moments.append(running.kill_at)
        if self._drain_since is not None:
            moments.append(now + 0.2)
        return max(0.0, min(moments) - now)

    # --- signals and drain -------------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        if self._signals and self._drain_since is None:
            self._begin_drain("asked to stop", grace_s=self._config.grace_s)
        if self._signals > 1 and self._drain_since is not None and self._interrupted_at is None:
            log.warning("asked to stop again: not waiting any longer", node_id=self.node_id)
            self._grace_until = 0.0

    def _begin_drain(self, why: str, *, grace_s: float) -> None:
        self._drain_since = time.monotonic()
        self._grace_until = self._drain_since + grace_s
        log.info("draining", node_id=self.node_id, reason=why, running=len(self._running), grace_s=grace_s)
        self._heartbeat.drain()
        self._give_back_unstarted(self._executor.withdraw(), f"node {self.node_id} is draining")
        self._settling.flush()
        with self._tolerating("handing over waiting partitions"):
            self._repository.nodes.drain(self.node_id)
            self._recovery.hand_over(self.node_id)

    def _drained(self) -> bool:
        if self._config.drain and self._drain_since is None and self._nothing_left():
            log.info("no work is left", node_id=self.node_id)
            self._warn_of_unknown_steps()
            self._begin_drain("no work is left", grace_s=0.0)
        if self._drain_since is None:
            return False
        now = time.monotonic()
        if not self._running:
            return self._settling.is_idle or now > self._grace_until + _FINAL_FLUSH_S
        if now >= self._grace_until and self._interrupted_at is None:
            self._interrupted_at = now
            for key in list(self._running):
                self._ask_to_end(key, patience_s=_INTERRUPT_PATIENCE_S)
        # Threads cannot be killed: what has not ended by now is left to the fence.
        return self._interrupted_at is not None and now > self._interrupted_at + _INTERRUPT_PATIENCE_S + _FINAL_FLUSH_S

    def _warn_of_unknown_steps(self) -> None:
        with self._tolerating("looking for work of other steps"):
            group = self._config.node_group
            others = self._repository.claims.waiting_for_others(node_group=group, steps=self.steps)
            if others:
                log.warning(
                    "partitions wait for steps that this worker does not know: another worker's work, or a wrong name",
                    node_id=self.node_id,
                    node_group=group,
                    steps=others,
                )

    def _nothing_left(self) -> bool:
        if self._running or not self._settling.is_idle:
            self._idle_since = None
            return False
        now = time.monotonic()
        if self._idle_since is None:
            self._idle_since = now
        if now < self._idle_since + self._config.idle_timeout_s or self._attention.next_look <= now:
            return False
        with self._tolerating("looking for waiting work"):
            waiting = self._repository.claims.waiting(
                node_id=self.node_id, node_group=self._config.node_group, steps=self.steps
            )
            if waiting:
                self._idle_since = None
            return not waiting
        return False

    def _leave(self) -> None:
        why = f"node {self.node_id} is leaving"
        self._give_back_unstarted(self._executor.withdraw(), why)
        for key, running in list(self._running.items()):
            self._executor.kill(key, INTERRUPTED, why)
            self._running.pop(key)
            self._settling.give_back(running.claim, why=why, started=True)
        self._settling.flush()
        with self._tolerating("deregistering (a sweep will do it)"):
            self._recovery.leave(self.node_id)
            log.info("node left", node_id=self.node_id)

    @contextlib.contextmanager
    def _tolerating(self, what: str) -> Iterator[None]:
        try:
            yield
        except DbPartitionError as error:
            log.warning(f"{what} failed", node_id=self.node_id, error=str(error))

    # --- heartbeat ---------------------------------------------------------------------------------------------

    def _take_beats(self) -> None:
        while not self._heartbeat.beats.empty():
            beat = self._heartbeat.beats.get()
            if beat.node_id == self.node_id:
                self._reconcile(beat)

    def _reconcile(self, beat: Beat) -> None:
        reply = beat.reply
        if reply.status is None:
            self._evicted()
            return
        self._fleet = (reply.rank, reply.fleet_size, reply.db_epoch_s - beat.answered)
        self._attention.heard(reply, beat.sent, is_told=self._heartbeat.is_listening)
        if reply.status is NodeStatus.DRAINING and self._drain_since is None:
            self._begin_drain("asked to drain", grace_s=self._config.grace_s)
        for key, running in list(self._running.items()):
            step_execution_id, held_version = key
            # A claim made after the beat was sent is not in its answer.
            if running.acquired < beat.sent and reply.held.get(step_execution_id) != held_version:
                log.warning("claim lost, killing its work", **ids_of(running.claim))
                self.metrics.claims_lost.inc()
                del self._running[key]
                self._executor.interrupt(key)
                self._executor.kill(key, "lost", "the claim was lost")
            elif step_execution_id in reply.stopping and not running.stop_requested:
                running.stop_requested = True
                self._ask_to_end(key, patience_s=self._config.stop_grace_s)
        settled = self._settling.written_since(beat.sent)
        for step_execution_id, held_version in reply.held.items():
            key = (step_execution_id, held_version)
            if not (key in self._running or key in settled or self._settling.holds(*key)):
                self._release_unheld(step_execution_id, held_version)

    def _release_unheld(self, step_execution_id: int, held_version: int) -> None:
        """The row says that we hold it, and we do not: a claim was committed but its answer was lost on the way."""
        log.warning(
            "releasing a partition whose claim was answered to nobody",
            node_id=self.node_id,
            step_execution_id=step_execution_id,
            version=held_version,
        )
        with self._tolerating("releasing it"), contextlib.suppress(ClaimLostError):
            self._repository.settlements.release_unheld(
                node_id=self.node_id, step_execution_id=step_execution_id, version=held_version
            )

    def _evicted(self) -> None:
        """Others took us for dead: everything we hold is theirs now. Begin a new life under a new id."""
        log.error("this node was removed by others; dropping all work", node_id=self.node_id)
        if not self._executor.kill_all("the node was removed") and self._running:
            self._exit_fenced("threads cannot be killed")
        for key, running in list(self._running.items()):
            self.metrics.claims_lost.inc()
            log.warning("claim lost, work dropped", **ids_of(running.claim))
            del self._running[key]
        self._executor.withdraw()
        self._settling.forget_all()
        if self._drain_since is None:
            with self._tolerating("registering again"):
                self._register()
                self._heartbeat.renamed(self.node_id)

    def _fence(self) -> None:
        """Called by the heartbeat's watching thread: nobody has heard us for so long that others may take our work."""
        log.error(
            "not heard by the database for too long: killing all running work before others take it",
            node_id=self.node_id,
            silent_for_s=round(self._heartbeat.silent_for_s, 1),
        )
        if not self._executor.kill_all("the database could not be reached for too long"):
            self._exit_fenced("threads cannot be killed")

    def _exit_fenced(self, why: str) -> None:
        log.error("ending the process", node_id=self.node_id, reason=why)
        os._exit(EXIT_FENCED)

    # --- work --------------------------------------------------------------------------------------------------

    def _take_outcomes(self) -> None:
        for finished in self._executor.finished():
            running = self._running.pop(finished.key, None)
            if running is None:
                continue  # lost, and reported already
            self.metrics.duration.observe(time.monotonic() - running.acquired)
            self._settling.settle(running.claim, finished.outcome, stop_requested=running.stop_requested)
            self._attention.look_now()

    def _give_back_unstarted(self, keys: list[ClaimKey], why: str) -> None:
        for key in keys:
            running = self._running.pop(key, None)
            if running is not None:
                self._settling.give_back(running.claim, why=why, started=False)

    def _enforce_limits(self) -> None:
        self._give_back_unstarted(
            self._executor.withdraw_overdue(), "it waited for a slot behind partitions that took longer than others"
        )
        now = time.monotonic()
        for key, running in list(self._running.items()):
            limit_s = running.claim.settings.partition_timeout_s
            if limit_s is not None and running.kill_at is None:
                since = self._executor.started(key)
                running.kill_at = None if since is None else since + limit_s
            if running.kill_at is None or now < running.kill_at:
                continue
            running.kill_at = now + 3600.0  # asked once
            if running.asked_at is not None:
                self._executor.kill(key, INTERRUPTED, "did not end when it was asked to, and was killed")
            else:
                self._executor.kill(key, FAILED, f"took longer than partition_timeout = {limit_s:g} s, and was killed")

    def _ask_to_end(self, key: ClaimKey, *, patience_s: float) -> None:
        running = self._running[key]
        running.asked_at = time.monotonic()
        running.kill_at = running.asked_at + patience_s
        log.info("asking a partition to end", patience_s=patience_s, **ids_of(running.claim))
        self._executor.interrupt(key)

    def _wants_work(self) -> bool:
        return (
            self._drain_since is None
            and self._executor.free_slots > 0
            and self._heartbeat.silent_for_s < self._timings.unreachable_after_s
        )

    def _claim(self) -> bool:
        now = time.monotonic()
        if self._heartbeat.notified.is_set():
            self._heartbeat.notified.clear()
            self._attention.announced(now)
        if self._settling.take_due_retries(now):
            self._attention.look_now()
        if not self._wants_work() or now < self._attention.next_look:
            return False
        try:
            claims = self._repository.claims.claim(
                node_id=self.node_id,
                node_group=self._config.node_group,
                steps=self.steps,
                limit=self._executor.free_slots,
                steal_after_s=self._timings.steal_after_s,
            )
        except DbPartitionError as error:
            self._claim_failures += 1
            wait = min(5.0, self._timings.poll_s * 2 ** min(self._claim_failures, 4)) * random.uniform(0.5, 1.0)
            self._attention.wait(time.monotonic(), wait)
            log.warning("claiming failed", node_id=self.node_id, error=str(error), retry_in_s=round(wait, 2))
            return False
        self._claim_failures = 0
        acquired = time.monotonic()
        for claim in claims:
            self._running[key_of(claim)] = _Running(claim, acquired)
            how = "stolen" if claim.stolen_from else "claimed"
            self.metrics.claimed.labels(how).inc()
            extra: dict[str, Any] = {"stolen_from": claim.stolen_from} if claim.stolen_from else {}
            log.info(f"partition {how}", node_id=self.node_id, **ids_of(claim), **extra)
            self._mark_started(claim.job_execution_id)
            self._executor.run(claim)
        if not claims:
            self._attention.found_nothing(time.monotonic())
        return bool(claims)

    def _mark_started(self, job_execution_id: int) -> None:
        if job_execution_id in self._started_executions:
            return
        with self._tolerating("marking the execution as started"):
            self._repository.claims.mark_started(job_execution_id)
            if len(self._started_executions) > 10_000:
                self._started_executions.clear()
            self._started_executions.add(job_execution_id)

    # --- sweeping ----------------------------------------------------------------------------------------------

    def _next_turn(self) -> float:
        """The next moment at which a sweep is ours: two nodes a slot, in turn, so that one may be dead."""
        rank, size, offset = self._fleet
        length_s = self._attention.sweep_every_s
        slot = (time.monotonic() + offset) // length_s
        if self._swept_at > -math.inf:
            slot = max(slot, (self._swept_at + offset) // length_s + 1)
        while size > 2 and (slot - rank) % size > 1:
            slot += 1
        return slot * length_s - offset

    def _sweep(self) -> None:
        if self._heartbeat.silent_for_s > self._timings.unreachable_after_s or time.monotonic() < self._next_turn():
            return
        self._swept_at = time.monotonic()
        self._sweeps += 1
        with self._tolerating("sweeping"):
            report = self._recovery.sweep(
                may_judge=self._heartbeat.continuity.may_judge,
                until=self._heartbeat.continuity.until,
                observer=self.node_id if self._heartbeat.is_present else None,
                deep=self._sweeps % _DEEP_SWEEP_EVERY == 0,
            )
            self._log_sweep(report)

    def _log_sweep(self, report: SweepReport) -> None:
        for node_id in report.vanished:
            log.warning("node is unreachable: its session has ended", lost_node=node_id)
        for node_id in report.unreachable:
            log.warning("node is unreachable", lost_node=node_id)
        for node_id in report.removed:
            self.metrics.nodes_removed.inc()
            log.warning("node removed", lost_node=node_id)
        for node_id, rehomed in report.rehomed:
            self.metrics.reassigned.inc(rehomed.reassigned)
            log.warning(
                f"partitions {PartitionEvent.REASSIGNED.value}",
                lost_node=node_id,
                job_execution_id=rehomed.job_execution_id,
                reassigned=rehomed.reassigned,
                failed=rehomed.failed,
                stopped=rehomed.stopped,
            )
            self._attention.look_now()
        for job_execution_id, status in report.finalised.items():
            log.info("job execution ended", job_execution_id=job_execution_id, status=status.value)
