"""All that a partition can do wrong, in one job with healthy ones: each ends as it must, and harms no other."""

from __future__ import annotations

import contextlib
import secrets
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from airflow_dbpartition.domain import JobSettings, Partition
from tests.resilience.ledgers import STEP, STEPS, Ledgers
from tests.worker.processes import Fleet, is_alive, wait_until

WORKERS, SLOTS = 2, 3
HEALTHY = 30
UNITS = 2  # the first is written before the partition does what it does
TIMEOUT_S = 5.0
TOOK_TOO_LONG = "took longer than partition_timeout = 5 s, and was killed"
DIED = "the process that ran this partition died: "
OUT_OF_MEMORY = f"{DIED}killed by signal 9 SIGKILL (out of memory, or killed by hand)"

WELL, ILL = "COMPLETED", "FAILED"
# What it does, with what, and its end: the status, and how its exit message ends, or its result.
BAD: dict[str, tuple[dict[str, Any], str, Any]] = {
    "closes stdin and stdout": ({"do": "close_standard_streams"}, WELL, "closed"),
    "closes their descriptors": ({"do": "close_standard_streams", "descriptors": True}, WELL, "closed"),
    "closes everything": ({"do": "close_everything"}, ILL, "the step closed the descriptors of its worker process"),
    "hangs": ({"do": "wait", "polite": False}, ILL, TOOK_TOO_LONG),
    "ignores SIGTERM": ({"do": "ignore_sigterm", "polite": False}, ILL, TOOK_TOO_LONG),
    "exceeds its memory limit": ({"do": "exceed_its_memory_limit"}, ILL, "\nMemoryError"),
    "eats memory": ({"do": "eat_memory"}, ILL, OUT_OF_MEMORY),
    "crashes": ({"do": "crash"}, ILL, f"{DIED}killed by signal 11 SIGSEGV (a crash in native code)"),
    "prints 10 MB": ({"do": "print_much"}, WELL, "printed"),
    "forks": ({"do": "fork_and_return"}, WELL, 5),
    "forks, and both go on": ({"do": "fork_and_return_twice"}, WELL, "parent"),
    "forks and forgets": ({"do": "fork_and_leave"}, WELL, "forgotten"),
    "forks and dies": ({"do": "fork_and_die"}, ILL, OUT_OF_MEMORY),
    "exits": ({"do": "sys_exit", "code": 0}, ILL, "the step called sys.exit(0); return instead"),
    "exits at once": (
        {"do": "exit_at_once", "code": 0},
        ILL,
        f"{DIED}exit code 0 (os._exit, or a crash of the interpreter)",
    ),
    "raises what cannot be pickled": ({"do": "raise_unpicklable"}, ILL, "nowhere: no file caf\\udce9"),
    "raises what cannot be stored": ({"do": "raise_unstorable"}, ILL, "nul \\0 surrogate \\ud800 emoji \U0001f6eb"),
    "raises what cannot be said": ({"do": "raise_unspeakable"}, ILL, "Unspeakable: <exception str() failed>"),
    "raises what nobody catches": ({"do": "raise_base"}, ILL, "KeyboardInterrupt: pressed by nobody"),
    "recurses": ({"do": "recurse"}, ILL, "RecursionError: maximum recursion depth exceeded"),
    "returns no JSON": (
        {"do": "return_object"},
        ILL,
        "object is not JSON (use str, int, float, bool, None, list or dict)",
    ),
    "returns nan": ({"do": "return_nan"}, ILL, "nan is not a JSON number; use None or a string"),
    "returns itself": ({"do": "return_itself"}, ILL, "is nested deeper than 100 levels, or contains itself"),
    "returns too much": ({"do": "return_too_much"}, ILL, "return where they are"),
}


@pytest.fixture
def control_group() -> Iterator[Path | None]:
    """One of little memory, in which the kernel itself kills; None where this machine lets us make none."""
    for parent, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(parent, f"dbpartition-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            group.mkdir()
            if Path(group, limit).exists():
                Path(group, limit).write_text(str(64 << 20))
                yield group
                wait_until(partial(_is_empty, group), "nobody is left in it")
                group.rmdir()
                return
            group.rmdir()
    yield None


def _is_empty(group: Path) -> bool:
    return Path(group, "cgroup.procs").read_text() == ""


@pytest.mark.timeout(120)
def test_whatever_one_partition_does_the_others_are_done_once_and_no_node_is_lost(
    control_group: Path | None, own_fleet: Fleet, ledgers: Ledgers
) -> None:
    for number in range(WORKERS):
        own_fleet.start(f"n{number}", imports=STEPS, concurrency=SLOTS, wait=False)
    nodes = {node.wait_until_live().node_id: "ACTIVE" for node in own_fleet.nodes}
    job = own_fleet.submit(
        _plan(ledgers, own_fleet.directory, control_group),
        settings=JobSettings(partition_timeout_s=TIMEOUT_S),
        step=STEP,
    )
    assert job.ends(timeout_s=60) == "FAILED"

    ends = {key: row for key, row in job.partitions().items() if key in BAD}
    for key, (_, status, words) in BAD.items():
        row = ends[key]
        said = row.result if status == WELL else str(row.exit_message)[-len(words) :]
        assert (key, row.status, said) == (key, status, words), row.exit_message
    healthy = [row for row in job.partitions().values() if row.partition_key not in BAD]
    assert len(healthy) == HEALTHY
    assert [(row.partition_key, row.exit_message) for row in healthy if row.result != "printed"] == []
    verdict = ledgers.verdict([job.id])
    print(f"{len(BAD)} bad, {HEALTHY} healthy, killed by the kernel: {control_group is not None}; {verdict}")
    assert verdict.faults == []
    assert verdict.entered_again == 0

    assert {node.node_id: node.status for node in own_fleet.repository.nodes.all(include_removed=True)} == nodes
    left, dead = (int(_left(own_fleet.directory, key).read_text()) for key in ("forks and forgets", "forks and dies"))
    assert not is_alive(dead)
    wait_until(lambda: len(_children(own_fleet)) == WORKERS * SLOTS + is_alive(left), "every slot has its child again")
    everybody = {left, *_children(own_fleet), *(entry.pid for entry in ledgers.outside())}
    for node in own_fleet.nodes:
        node.send(signal.SIGTERM)
    assert [node.exits() for node in own_fleet.nodes] == [0] * WORKERS
    assert [pid for pid in everybody if is_alive(pid)] == []


def _plan(ledgers: Ledgers, directory: Path, control_group: Path | None) -> list[Partition]:
    plan: list[Partition] = []
    for key, (context, _, _) in BAD.items():
        given = {
            "gate": str(directory / "never opened"),
            "left": str(_left(directory, key)),
            "control_group": str(control_group or ""),
        }
        plan += _work(ledgers, key, "until_started", **given, **context)
    for number in range(HEALTHY):
        transferable = (True, "until_started", False)[number % 3]
        plan += _work(ledgers, f"healthy {number}", transferable, do="print_and_log")
    step = 7  # mixed, and the same each time: shares no factor with the number of them
    assert len(plan) % step
    return [plan[step * number % len(plan)] for number in range(len(plan))]


def _work(ledgers: Ledgers, key: str, transferable: bool | str, **context: Any) -> list[Partition]:
    (planned,) = ledgers.plan(1, transferable=transferable, units=UNITS, **context)
    return [Partition(key, planned.context, transferable=transferable)]


def _left(directory: Path, key: str) -> Path:
    """Where a partition notes the process that it leaves behind."""
    return directory / f"left by {key}"


def _children(fleet: Fleet) -> list[int]:
    return [pid for node in fleet.nodes for pid in node.children()]
