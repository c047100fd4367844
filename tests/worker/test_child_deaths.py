"""Whatever a step does to its process: the partition says what happened, and the worker goes on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_dbpartition.demo.processes import Guard
from airflow_dbpartition.domain import JobSettings, Partition
from airflow_dbpartition.storable import MESSAGE_LIMIT_CHARS
from tests.databases import NotAtHandError, Servers
from tests.worker.processes import Fleet, Node, is_alive, wait_until


@contextlib.contextmanager
def fleet_of_one(servers: Servers, name: str, directory: Path, guard: Guard) -> Iterator[Fleet]:
    """One worker, which lives through all tests of this module."""
    try:
        server = servers.get(name)
    except NotAtHandError as reason:
        pytest.skip(str(reason))
    with server.fresh() as database:
        repository = database.migrated()
        with Fleet(database, repository, directory, guard) as fleet:
            fleet.start()
            yield fleet
        repository.close()


@pytest.fixture(scope="module")
def fleet(servers: Servers, tmp_path_factory: pytest.TempPathFactory, guard: Guard) -> Iterator[Fleet]:
    with fleet_of_one(servers, "postgresql", tmp_path_factory.mktemp("deaths"), guard) as fleet:
        yield fleet


@pytest.fixture(scope="module", params=["mysql", "sqlite"])
def other_fleet(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory, guard: Guard
) -> Iterator[Fleet]:
    with fleet_of_one(servers, request.param, tmp_path_factory.mktemp("deaths"), guard) as fleet:
        yield fleet


@pytest.fixture
def node(fleet: Fleet) -> Iterator[Node]:
    """The worker; after the test it must still be the same process, and at work."""
    (node,) = fleet.nodes
    yield node
    assert node.process.exit_code is None
    assert fleet.submit().ends() == "COMPLETED"
    assert len(node.views()) == 1


def failed(fleet: Fleet, do: str, **context: object) -> str:
    """Run a job of one partition that must fail; returns what the partition says of it."""
    job = fleet.submit(context={"do": do, **context})
    assert job.ends() == "FAILED"
    assert job.events() == ["failed"]
    return str(job.partition().exit_message)


@pytest.mark.parametrize(
    ("do", "words"),
    [
        ("exit_at_once", "exit code 7 (os._exit, or a crash of the interpreter)"),
        ("crash", "killed by signal 11 SIGSEGV (a crash in native code)"),
        ("kill_itself", "killed by signal 9 SIGKILL (out of memory, or killed by hand)"),
    ],
)
@pytest.mark.usefixtures("node")
def test_a_partition_whose_process_dies_says_how_it_died(fleet: Fleet, do: str, words: str) -> None:
    assert failed(fleet, do) == f"the process that ran this partition died: {words}"


@pytest.mark.parametrize(
    ("do", "last_line"),
    [
        ("sys_exit", "the step called sys.exit('enough'); return instead"),
        ("raise_error", "LookupError: no such flight"),
        ("raise_base", "KeyboardInterrupt: pressed by nobody"),
        ("raise_unspeakable", "Unspeakable: <exception str() failed>"),
        ("recurse", "RecursionError: maximum recursion depth exceeded"),
        ("raise_unstorable", "ValueError: nul \\0 surrogate \\ud800 emoji \U0001f6eb"),
    ],
)
@pytest.mark.usefixtures("node")
def test_a_partition_whose_step_raises_ends_with_the_error(fleet: Fleet, do: str, last_line: str) -> None:
    assert failed(fleet, do).splitlines()[-1].endswith(last_line)


@pytest.mark.parametrize(
    ("do", "last_line"),
    [
        ("return_object", "cannot be stored as JSON: result['when']: object is not JSON"),
        ("return_nan", "cannot be stored as JSON: result['mean']: nan is not a JSON number"),
        ("return_itself", "is nested deeper than 100 levels, or contains itself"),
        ("return_too_much", "the step returned a result of 2000002 bytes; at most 1048576 are stored"),
    ],
)
@pytest.mark.usefixtures("node")
def test_a_result_that_cannot_be_stored_fails_the_partition(fleet: Fleet, do: str, last_line: str) -> None:
    assert last_line in failed(fleet, do).splitlines()[-1]


@pytest.mark.usefixtures("node")
def test_of_a_huge_error_the_end_is_kept(fleet: Fleet) -> None:
    message = failed(fleet, "raise_huge")

    assert len(message) <= MESSAGE_LIMIT_CHARS
    assert message.startswith("Traceback")
    assert message.endswith("x the end")


@pytest.mark.parametrize("linger", [True, False])
@pytest.mark.usefixtures("node")
def test_a_step_that_closes_what_is_not_its_own_fails(fleet: Fleet, linger: bool) -> None:
    assert failed(fleet, "close_everything", linger=linger) == ("the step closed the descriptors of its worker process")


@pytest.mark.usefixtures("node")
def test_a_step_may_print_ten_megabytes(fleet: Fleet) -> None:
    job = fleet.submit(context={"do": "print_much"})

    assert job.ends() == "COMPLETED"
    assert job.partition().result == "printed"


@pytest.mark.usefixtures("node")
def test_a_step_may_start_processes(fleet: Fleet) -> None:
    job = fleet.submit(context={"do": "fork_and_return"})

    assert job.ends() == "COMPLETED"
    assert job.partition().result == 5


@pytest.mark.usefixtures("node")
def test_a_forgotten_process_does_not_answer_for_the_step(fleet: Fleet) -> None:
    job = fleet.submit(context={"do": "fork_and_return_twice"})

    assert job.ends() == "COMPLETED"
    assert job.partition().result == "parent"


@pytest.mark.usefixtures("node")
def test_a_death_is_noticed_though_a_process_of_the_step_lives_on_and_that_one_ends_too(
    fleet: Fleet, tmp_path: Path
) -> None:
    left = tmp_path / "left"
    assert "SIGKILL" in failed(fleet, "fork_and_die", left=str(left))
    assert not is_alive(int(left.read_text()))


def test_a_child_that_is_killed_from_outside_is_replaced(fleet: Fleet, node: Node) -> None:
    job, _gate = fleet.gated()
    job.wait_for()
    (victim,) = node.children()
    os.kill(victim, signal.SIGKILL)

    assert job.ends() == "FAILED"
    assert "SIGKILL" in str(job.partition().exit_message)


def test_an_idle_child_that_is_killed_is_replaced(fleet: Fleet, node: Node) -> None:
    (victim,) = wait_until(node.children, "there is a child")
    os.kill(victim, signal.SIGKILL)

    wait_until(lambda: len(node.children()) == 1 and node.children() != [victim], "there is another")


@pytest.mark.parametrize("do", ["exit_at_once", "raise_error", "return_nan"])
@pytest.mark.usefixtures("node")
def test_where_retries_are_left_a_death_is_one_attempt(fleet: Fleet, do: str) -> None:
    settings = JobSettings(partition_retries=1, retry_delay_s=0.01)
    job = fleet.submit(context={"do": do}, settings=settings)

    assert job.ends() == "FAILED"
    assert job.events() == ["retried", "failed"]
    assert job.partition().attempt == 2


@pytest.mark.parametrize("polite", [True, False])
@pytest.mark.usefixtures("node")
def test_a_partition_that_takes_longer_than_its_timeout_is_killed(fleet: Fleet, polite: bool) -> None:
    job, _gate = fleet.gated(polite=polite, settings=JobSettings(partition_timeout_s=0.5))

    assert job.ends() == "FAILED"
    assert job.partition().exit_message == "took longer than partition_timeout = 0.5 s, and was killed"


@pytest.mark.usefixtures("node")
def test_one_bad_partition_does_not_harm_its_siblings(fleet: Fleet) -> None:
    contexts = {"good": {}, "dead": {"do": "crash"}, "bad": {"do": "raise_error"}, "fine": {}}
    job = fleet.submit([Partition(key, context) for key, context in contexts.items()])

    assert job.ends() == "FAILED"
    assert {key: row.status.value for key, row in job.partitions().items()} == {
        "good": "COMPLETED",
        "dead": "FAILED",
        "bad": "FAILED",
        "fine": "COMPLETED",
    }


@pytest.mark.parametrize(
    ("do", "end"),
    [
        ("raise_unstorable", "ValueError: nul \\0 surrogate \\ud800 emoji \U0001f6eb"),
        ("raise_huge", "x the end"),
        ("return_nan", "nan is not a JSON number; use None or a string"),
        ("crash", "(a crash in native code)"),
    ],
)
def test_what_happened_can_be_stored_in_the_other_databases_too(other_fleet: Fleet, do: str, end: str) -> None:
    assert failed(other_fleet, do).endswith(end)
    assert other_fleet.submit().ends() == "COMPLETED"
