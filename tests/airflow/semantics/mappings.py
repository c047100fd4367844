"""What becomes of a mapping that is cleared and comes out otherwise: each a story for any way of waiting."""

from __future__ import annotations

from tests.airflow.deployment import Deployment, Run, wait_until
from tests.airflow.semantics.ways import PLANNING, WORK, Way

TOLD = ("process", "triggerer")  # where a task that is cleared hears of it, though it never runs again


def expand_again(deployment: Deployment, way: Way) -> None:
    """Of three slices the first stays, the second becomes another, and the third is gone."""
    label = f"expand_again_{way.name}"
    waiting = {"gate": label}
    deployment.write_slices(label, [{"stays": waiting}, {"old": waiting}, {"gone": waiting}])
    run = deployment.run(f"mapped_{way.name}", label)
    for map_index in range(3):
        until_mapped_waits(run, way, map_index)
    by_key = {key: execution for execution in run.executions() for key in run.keys(execution)}
    assert set(by_key) == {"stays", "old", "gone"}

    deployment.write_slices(label, [{"stays": waiting}, {"new": waiting}])
    run.clear("slices", include_downstream=True)
    wait_until(lambda: run.begun()["new"] > 0, f"the new slice of {label} is begun")
    until_removed(run, 2)
    run.wait_for_status_of(by_key["old"], "STOPPED")
    until_mapped_waits(run, way, 0, try_number=2)
    if way.of == "operator" or not is_removed_early(run, 1):
        until_mapped_waits(run, way, 1, try_number=2)
    if way.waits_in in TOLD:
        run.wait_for_status_of(by_key["gone"], "STOPPED")
    run.open()

    assert run.ends() == "success"
    wait_until(lambda: not run.active(), f"every execution of {label} has ended")
    left_alone = {} if way.waits_in in TOLD else {"gone": 1}
    assert run.done() == {"stays": 1, "new": 1, **left_alone}
    generations = {key: execution.generation for execution in run.executions() for key in run.keys(execution)}
    assert (generations["stays"], generations["new"]) == (1, 2)


def until_mapped_waits(run: Run, way: Way, map_index: int, *, try_number: int = 1) -> None:
    """As `until_it_waits`, for one task of a mapping."""

    def is_claimed() -> bool:
        mine = [one for one in run.executions() if one.manager["map_index"] == map_index]
        return bool(mine) and run.counts(mine[-1]) == {"CLAIMED": 1}

    wait_until(is_claimed, f"slice {map_index} of {run.run_id} is begun")
    until_settled(run, way, map_index, try_number=try_number)


def until_settled(run: Run, way: Way, map_index: int, *, try_number: int) -> None:
    """Wait until this try is where it waits, and Airflow knows that."""
    if way.waits_in == "triggerer":
        run.wait_for_trigger(WORK, map_index=map_index, try_number=try_number)
    elif way.waits_in == "process":
        run.wait_for_log(WORK, "1 running", map_index=map_index, try_number=try_number)
    else:
        state = "up_for_reschedule" if way.waits_in == "schedule" else "success"
        wait_until(lambda: run.mapped_states(WORK).get(map_index) == state, f"{run.run_id}[{map_index}] is {state}")
        if way is PLANNING:
            assert run.ends() == "success"


def is_removed_early(run: Run, map_index: int) -> bool:
    """Whether Airflow has removed a sensor that has work to wait for; see the next story."""
    begun = ("running", "deferred", "up_for_reschedule")

    def state() -> str | None:
        state = run.mapped_states(WORK).get(map_index)
        return state if state in ("removed", *begun) else None

    return wait_until(state, f"the task {map_index} of {run.run_id} is begun again or removed") == "removed"


def expand_again_around_a_slow_operator(deployment: Deployment, way: Way) -> None:
    """Of three slices the third is gone, and the first is planned long before the second, which is another one now."""
    label = f"expand_early_{way.name}"
    waiting = {"gate": label}
    deployment.write_slices(label, [{"stays": waiting}, {"old": waiting}, {"gone": waiting}])
    run = deployment.run(f"mapped_held_{way.name}", label)
    for map_index in range(3):
        until_mapped_waits(run, way, map_index)

    deployment.write_slices(label, [{"stays": waiting}, {"new": {**waiting, "fails": 1}}])
    run.clear("slices", include_downstream=True)
    until_removed(run, 1, 2)
    run.let_plan()
    until_mapped_waits(run, way, 0, try_number=2)
    run.open()

    assert run.ends() == "success"
    wait_until(lambda: not run.active(), f"every execution of {label} has ended")
    assert statuses(run, "new") == ["FAILED"]
    assert run.mapped_states(WORK) == {0: "success", 1: "removed", 2: "removed"}

    run.clear(WORK)
    assert run.ends() == "success"
    assert statuses(run, "new") == ["FAILED", "COMPLETED"]
    assert run.mapped_states(WORK) == {0: "success", 1: "success", 2: "removed"}
    assert statuses(run, "gone") == (["STOPPED"] if way.waits_in in TOLD else ["COMPLETED"])
    assert (run.done()["stays"], run.done()["new"], run.done()["old"]) == (1, 1, 0)


def expand_to_fewer_once_all_has_ended(deployment: Deployment, way: Way) -> None:
    """Of two slices one has failed, and is gone."""
    label = f"expand_ended_{way.name}"
    deployment.write_slices(label, [{"stays": {}}, {"gone": {"fails": 1}}])
    run = deployment.run(f"mapped_{way.name}", label)
    assert run.ends() == ("success" if way is PLANNING else "failed")
    wait_until(lambda: len(run.executions()) == 2 and not run.active(), f"both executions of {label} have ended")

    deployment.write_slices(label, [{"stays": {}}])
    run.clear("slices", include_downstream=True)

    assert run.ends() == "success"
    wait_until(lambda: not run.active(), f"every execution of {label} has ended")
    assert run.mapped_states(WORK) == {0: "success", 1: "removed"}
    assert (statuses(run, "stays"), statuses(run, "gone")) == (["COMPLETED", "COMPLETED"], ["FAILED"])
    assert run.begun() == {"stays": 2, "gone": 1}


def choose_fewer(deployment: Deployment, way: Way) -> None:
    """Of three executions the first is not waited for any longer, and those that stay have another sensor each."""
    label = f"choose_fewer_{way.name}"
    waiting = {"gate": label}
    deployment.write_slices(label, [{key: waiting} for key in ("gone", "second", "third")])
    deployment.write_chosen(label, [0, 1, 2])
    run = deployment.run(f"chosen_{way.name}", label)
    for map_index in range(3):
        until_mapped_waits(run, way, map_index)
    (gone,) = [execution for execution in run.executions() if run.keys(execution) == ["gone"]]

    deployment.write_chosen(label, [1, 2])
    run.clear("chosen", include_downstream=True)
    until_removed(run, 2)
    run.wait_for_status_of(gone, "STOPPED")
    for map_index in range(2):
        until_settled(run, way, map_index, try_number=2)
    run.open()

    assert run.ends() == "success"
    wait_until(lambda: not run.active(), f"every execution of {label} has ended")
    assert run.mapped_states(WORK) == {0: "success", 1: "success", 2: "removed"}
    assert statuses(run, "gone") == ["STOPPED"]
    assert run.done() == {"second": 1, "third": 1}
    assert {execution.generation for execution in run.executions()} == {1}
    waited_for = [run.xcom(WORK, map_index=map_index)["job_execution_id"] for map_index in range(2)]
    completed = {
        key: execution.job_execution_id
        for execution in run.executions()
        if execution.status.value == "COMPLETED"
        for key in run.keys(execution)
    }
    assert waited_for == [completed["second"], completed["third"]]


def statuses(run: Run, key: str) -> list[str]:
    """How the executions that have a partition of this key stand, oldest first."""
    return [execution.status.value for execution in run.executions() if key in run.keys(execution)]


def until_removed(run: Run, *map_indexes: int) -> None:
    """Wait until Airflow has taken these tasks out of the mapping."""

    def are_removed() -> bool:
        states = run.mapped_states(WORK)
        return all(states.get(map_index) == "removed" for map_index in map_indexes)

    wait_until(are_removed, f"the tasks {map_indexes} of {run.run_id} are removed")
