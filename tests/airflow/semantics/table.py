"""The table of clicks. Tests and docs/reference/airflow-semantics.md are made of it, and of nothing else."""

from __future__ import annotations

from tests.airflow.semantics import clicks, limits, losses, mappings
from tests.airflow.semantics.cells import Chapter, Row, absent, proven
from tests.airflow.semantics.ways import (
    BLOCKING,
    DEFERRING,
    IN_PROCESS,
    IN_TRIGGERER,
    OPERATORS,
    PLANNING,
    POKING,
    RESCHEDULING,
    SENSORS,
    WAITING,
    WATCHING,
    WAYS,
)

NOT_IN_TRIGGERER = tuple(way for way in WAYS if way not in IN_TRIGGERER)
frozen = losses.FrozenTriggerer()

EXPANDED = (
    "same input: the new try takes over; other input: the old execution is STOPPED, a new generation does the new work"
)

TABLE = (
    Chapter(
        "Retry and clear",
        (
            Row(
                "retry",
                "Airflow retries after partitions have failed",
                {
                    **proven(
                        WAITING,
                        "what failed is restarted, once; the task ends by what comes of it",
                        clicks.retry_after_a_failure,
                        essential=[BLOCKING],
                    ),
                    **absent([PLANNING], "has succeeded before a partition can fail"),
                },
            ),
            Row(
                "clear_completed",
                "Clear of it alone, all partitions COMPLETED",
                {
                    **proven(
                        OPERATORS,
                        "a new generation: all of it is planned and done again",
                        clicks.clear_of_a_completed_operator,
                        essential=[BLOCKING],
                    ),
                    **proven(
                        SENSORS,
                        "nothing is done again; succeeds with the same summary",
                        clicks.clear_of_a_sensor_that_has_succeeded,
                    ),
                },
            ),
            Row(
                "clear_failed",
                "Clear of it alone, partitions FAILED",
                proven(
                    WAYS,
                    "what failed is restarted, in the same generation; what was done stays",
                    clicks.clear_of_what_has_failed,
                    essential=[POKING],
                ),
            ),
            Row(
                "clear_downstream",
                "Clear of the operator with its sensor",
                {
                    **absent((BLOCKING, DEFERRING), "has no sensor: as a clear of it alone"),
                    **absent([PLANNING], "see the sensors"),
                    **proven(
                        SENSORS,
                        "a new generation; the sensor waits for that",
                        clicks.clear_of_the_operator_with_its_sensor,
                    ),
                },
            ),
            Row(
                "clear_waiting",
                "Clear while the partitions are being worked on",
                {
                    **proven(
                        WAITING,
                        "the new try takes the execution over; if it was stopped first, what is not done is "
                        "restarted. Nothing is done twice, none is lost",
                        clicks.clear_while_it_waits,
                        essential=[DEFERRING],
                    ),
                    **proven(
                        [PLANNING],
                        "the new try attaches to the execution, which goes on",
                        clicks.clear_of_a_plan_whose_work_runs,
                    ),
                },
            ),
            Row(
                "clear_planning",
                "Clear while the partitioner runs",
                {
                    **proven(OPERATORS, "nothing was written yet; the new try plans", clicks.clear_while_it_plans),
                    **absent(SENSORS, "plans nothing"),
                },
            ),
            Row(
                "clear_lingering",
                "Clear after the launch, before the task waits",
                proven(
                    WAYS,
                    "the new try takes the execution over, as above; the old one neither succeeds nor defers",
                    losses.clear_before_it_leaves_its_slot,
                ),
            ),
        ),
    ),
    Chapter(
        "Marks",
        (
            Row(
                "mark_failed",
                "Mark failed while the partitions are being worked on",
                {
                    **proven(
                        WAITING,
                        "execution and partitions STOPPED; the task is failed, and no retry undoes it",
                        clicks.mark_failed_while_it_waits,
                        essential=[BLOCKING, DEFERRING, RESCHEDULING],
                    ),
                    **proven(
                        [PLANNING],
                        "execution and partitions STOPPED; the task is failed; a run that has ended keeps its state",
                        clicks.mark_failed_while_it_waits,
                    ),
                },
            ),
            Row(
                "mark_plan_failed",
                "Mark the operator failed while its sensor waits",
                {
                    **absent((BLOCKING, DEFERRING), "has no sensor"),
                    **absent([PLANNING], "see the sensors"),
                    **proven(
                        [POKING],
                        "Airflow makes the sensor `upstream_failed`; execution and partitions STOPPED",
                        clicks.mark_the_operator_failed_while_its_sensor_waits,
                    ),
                    **proven(
                        (RESCHEDULING, WATCHING),
                        "Airflow makes the sensor `upstream_failed` and tells nobody; the execution ends by itself: "
                        "mark the sensor to stop it",
                        clicks.mark_the_operator_failed_while_its_sensor_waits,
                    ),
                },
            ),
            Row(
                "mark_and_clear",
                "Mark failed, and clear later",
                proven(
                    WAYS,
                    "what was stopped is restarted, in the same generation",
                    clicks.mark_failed_and_clear_later,
                ),
            ),
            Row(
                "mark_success",
                "Mark success while the partitions are being worked on",
                {
                    **proven(
                        WAITING,
                        "execution and partitions STOPPED; the task is a success because a person said so, and "
                        "returns nothing",
                        clicks.mark_success_while_it_waits,
                        essential=[POKING],
                    ),
                    **proven(
                        [PLANNING],
                        "Airflow refuses: it is a success already; the execution goes on",
                        clicks.mark_success_of_a_plan_whose_work_runs,
                    ),
                },
            ),
            Row(
                "run_failed",
                "Mark the DAG run failed while the partitions are being worked on",
                {
                    **proven(
                        WAITING,
                        "execution and partitions STOPPED; the task is failed, and no retry undoes it",
                        clicks.mark_the_run_failed,
                        essential=[WATCHING],
                    ),
                    **proven(
                        [PLANNING],
                        "Airflow leaves a task that has ended alone; the execution goes on: `dbpartition stop` ends it",
                        clicks.mark_the_run_of_a_plan_failed,
                    ),
                },
            ),
            Row(
                "paused",
                "The DAG is paused while the partitions are being worked on",
                {
                    **proven(IN_PROCESS, "nothing: the task waits on and succeeds", clicks.pause_while_it_waits),
                    **proven(
                        (DEFERRING, RESCHEDULING, WATCHING),
                        "the execution goes on; Airflow lets the task see its end once the DAG is unpaused",
                        clicks.pause_while_it_waits,
                    ),
                    **proven([PLANNING], "nothing: the execution goes on", clicks.pause_while_it_waits),
                },
            ),
            Row(
                "expand_again",
                "A mapping is cleared and expands otherwise: other input, fewer tasks",
                {
                    **proven(
                        (BLOCKING, DEFERRING),
                        f"{EXPANDED}; task removed: its execution is STOPPED",
                        mappings.expand_again,
                    ),
                    **proven(
                        [PLANNING],
                        f"{EXPANDED}; task removed: Airflow tells nobody, and its execution ends by itself",
                        mappings.expand_again,
                    ),
                    **proven(
                        (POKING, WATCHING),
                        f"{EXPANDED}; sensor removed: its execution is STOPPED",
                        mappings.expand_again,
                    ),
                    **proven(
                        [RESCHEDULING],
                        f"{EXPANDED}; sensor removed: Airflow tells nobody, and its execution ends by itself",
                        mappings.expand_again,
                    ),
                },
            ),
            Row(
                "expand_early",
                "The same, and one of the operators plans for longer than another",
                {
                    **absent((BLOCKING, DEFERRING), "waits itself, and is removed with its input only"),
                    **absent([PLANNING], "see the sensors"),
                    **proven(
                        SENSORS,
                        "Airflow 3.3 removes the sensor of the slow one as well: nobody waits for its execution, which "
                        "ends by itself, and the run may succeed over partitions that failed. Clear the sensor once "
                        "all operators have ended: it is back, and restarts what failed; or map operators that wait",
                        mappings.expand_again_around_a_slow_operator,
                    ),
                },
            ),
            Row(
                "expand_ended",
                "A mapping in which all has ended is cleared and expands to fewer tasks",
                proven(
                    WAYS,
                    "what is left begins a new generation; task removed: its execution stays as it has ended, FAILED "
                    "for instance, and the run no longer fails for it",
                    mappings.expand_to_fewer_once_all_has_ended,
                ),
            ),
            Row(
                "choose_fewer",
                "A task that lists executions is cleared and lists fewer, at other indexes of the mapped sensor",
                {
                    **absent(OPERATORS, "waits for what it has launched itself"),
                    **proven(
                        SENSORS,
                        "each sensor takes over what its index has now, or restarts it where it was stopped first: "
                        "nothing is lost; an execution that no sensor has any longer is STOPPED",
                        mappings.choose_fewer,
                    ),
                },
            ),
        ),
    ),
    Chapter(
        "Limits of time",
        (
            Row(
                "execution_timeout",
                "`execution_timeout`",
                {
                    **proven(
                        IN_PROCESS,
                        "execution STOPPED; the task fails, and may be retried",
                        limits.execution_timeout_of_a_wait,
                    ),
                    **proven(
                        IN_TRIGGERER,
                        "nothing: Airflow does not look at it while a task is deferred; use `timeout`",
                        limits.execution_timeout_that_nobody_watches,
                    ),
                    **proven(
                        [PLANNING],
                        "limits the partitioner: nothing is written, the task fails",
                        limits.execution_timeout_of_a_plan,
                    ),
                    **proven(
                        [RESCHEDULING],
                        "nothing: it limits each look by itself; use `timeout`",
                        limits.execution_timeout_that_nobody_watches,
                    ),
                },
            ),
            Row(
                "timeout",
                "`timeout`",
                {
                    **proven(
                        (BLOCKING, DEFERRING),
                        "execution STOPPED; the task fails without a retry",
                        limits.timeout_of_an_operator,
                    ),
                    **proven(
                        [PLANNING],
                        "stored with the execution: its sensor stops it then, and fails without a retry",
                        limits.timeout_of_a_plan,
                    ),
                    **proven(
                        SENSORS,
                        "execution STOPPED; the task fails without a retry",
                        limits.timeout_of_a_sensor,
                        essential=[WATCHING],
                    ),
                },
            ),
            Row(
                "soft_timeout",
                "`timeout` with `soft_fail`",
                {
                    **absent(OPERATORS, "only sensors have `soft_fail`"),
                    **proven(SENSORS, "execution STOPPED; the task is skipped", limits.soft_timeout_of_a_sensor),
                },
            ),
            Row(
                "soft_fail",
                "Partitions fail, with `soft_fail`",
                {
                    **absent(OPERATORS, "only sensors have `soft_fail`"),
                    **proven(
                        SENSORS,
                        "the task fails: failed partitions are never skipped over",
                        limits.soft_fail_over_failed_partitions,
                        essential=[WATCHING],
                    ),
                },
            ),
        ),
    ),
    Chapter(
        "The task's own process is lost",
        (
            Row(
                "killed_planning",
                "SIGKILL before the plan is committed",
                {
                    **proven(OPERATORS, "nothing was written; the retry plans", losses.task_killed_before_the_plan),
                    **absent(SENSORS, "plans nothing"),
                },
            ),
            Row(
                "killed_lingering",
                "SIGKILL after the plan is committed",
                {
                    **proven(
                        OPERATORS,
                        "the execution goes on; the retry attaches to it",
                        losses.task_killed_after_the_plan,
                        essential=[PLANNING],
                    ),
                    **proven(
                        SENSORS,
                        "the execution goes on; the retry waits on",
                        losses.task_killed_after_the_plan,
                    ),
                },
            ),
            Row(
                "drained",
                "SIGTERM, as a drained pod gets it",
                {
                    **proven(
                        IN_PROCESS,
                        "the execution goes on; the task fails, and the retry attaches to it "
                        '(`on_sigterm="stop"`: STOPPED)',
                        losses.drain_while_it_waits,
                        essential=[BLOCKING],
                    ),
                    **proven(
                        IN_TRIGGERER,
                        "before it defers: it defers all the same, and no retry is spent",
                        losses.drain_before_it_leaves_its_slot,
                    ),
                    **proven(
                        [PLANNING],
                        "after the launch: it succeeds all the same, and no retry is spent",
                        losses.drain_before_it_leaves_its_slot,
                    ),
                    **proven(
                        [RESCHEDULING],
                        "during a look: it is rescheduled all the same, and no retry is spent",
                        losses.drain_before_it_leaves_its_slot,
                    ),
                },
            ),
        ),
    ),
    Chapter(
        "One of Airflow's processes is lost",
        (
            Row(
                "triggerer_killed",
                "Triggerer killed, and another started",
                {
                    **absent(NOT_IN_TRIGGERER, "is not in the triggerer"),
                    **proven(IN_TRIGGERER, "nothing: the same try waits on", losses.triggerer_killed),
                },
                harms=(losses.kill_and_start_the_triggerer,),
            ),
            Row(
                "triggerer_restarted",
                "Triggerer restarted",
                {
                    **absent(NOT_IN_TRIGGERER, "is not in the triggerer"),
                    **proven(
                        IN_TRIGGERER,
                        "nothing: the same try waits on",
                        losses.triggerer_restarted,
                        essential=[DEFERRING],
                    ),
                },
                harms=(losses.restart_the_triggerer,),
            ),
            Row(
                "triggerer_frozen",
                "Triggerer frozen until another has taken over, and comes back",
                {
                    **absent(NOT_IN_TRIGGERER, "is not in the triggerer"),
                    **proven(
                        IN_TRIGGERER,
                        "nothing: the same try waits on, although Airflow calls `on_kill`",
                        losses.triggerer_frozen,
                        essential=[DEFERRING],
                    ),
                },
                harms=(frozen.freeze, frozen.thaw, frozen.end),
            ),
            Row(
                "mark_failed_alone",
                "Mark failed while no triggerer runs",
                {
                    **absent(NOT_IN_TRIGGERER, "is not in the triggerer"),
                    **proven(
                        IN_TRIGGERER,
                        "execution and partitions STOPPED at once, by the API server",
                        losses.mark_failed_without_triggerer,
                        essential=[WATCHING],
                    ),
                },
                harms=(losses.kill_the_triggerer, losses.start_the_triggerer),
            ),
            Row(
                "mark_success_alone",
                "Mark success while no triggerer runs",
                {
                    **absent(NOT_IN_TRIGGERER, "is not in the triggerer"),
                    **proven(
                        IN_TRIGGERER,
                        "execution and partitions STOPPED at once, by the API server",
                        losses.mark_success_without_triggerer,
                    ),
                },
                harms=(losses.kill_the_triggerer, losses.start_the_triggerer),
            ),
            Row(
                "run_failed_alone",
                "Mark the DAG run failed while no triggerer runs",
                {
                    **absent(NOT_IN_TRIGGERER, "is not in the triggerer"),
                    **proven(
                        IN_TRIGGERER,
                        "execution and partitions STOPPED at once, by the API server",
                        losses.mark_the_run_failed_without_triggerer,
                    ),
                },
                harms=(losses.kill_the_triggerer, losses.start_the_triggerer),
            ),
            Row(
                "clear_alone",
                "Clear while no triggerer runs",
                {
                    **absent(NOT_IN_TRIGGERER, "is not in the triggerer"),
                    **proven(
                        IN_TRIGGERER,
                        "the new try takes the execution over, which goes on",
                        losses.clear_without_triggerer,
                    ),
                },
                harms=(losses.kill_the_triggerer, losses.start_the_triggerer),
            ),
            Row(
                "scheduler_killed",
                "Scheduler killed with the tasks in its slots (LocalExecutor), and another started",
                {
                    **proven(
                        IN_PROCESS,
                        "the execution goes on; Airflow starts a new try without spending a retry, which takes it over",
                        losses.scheduler_killed,
                    ),
                    **proven(
                        (DEFERRING, RESCHEDULING, WATCHING), "nothing: the same try waits on", losses.scheduler_killed
                    ),
                    **proven(
                        [PLANNING],
                        "after the launch: the execution goes on; Airflow starts a new try, which attaches to it",
                        losses.scheduler_killed_after_the_plan,
                    ),
                },
                harms=(losses.kill_the_scheduler,),
            ),
            Row(
                "api_server_restarted",
                "API server restarted",
                {
                    **proven(IN_TRIGGERER, "nothing: the same try waits on", losses.api_server_restarted),
                    **proven(
                        (*IN_PROCESS, RESCHEDULING),
                        "the execution goes on; a try that Airflow cannot hear (`max_failed_heartbeats`) or start "
                        "meanwhile fails, and a retry waits on: give it some, with a delay",
                        losses.api_server_restarted_under_a_process,
                    ),
                    **proven(
                        [PLANNING],
                        "while the partitioner runs: the plan is written once, by this try or by a retry",
                        losses.api_server_restarted_while_it_plans,
                    ),
                },
                harms=(losses.restart_the_api_server,),
            ),
        ),
    ),
)
