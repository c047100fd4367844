"""The steps that workers under test run: what one does is said by its partition's context."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from airflow_dbpartition.worker import PartitionContext, step

_PATIENCE_S = 120.0  # nothing waits for ever, not even in a test that has gone wrong


def _note(ctx: PartitionContext, what: str) -> None:
    """Append one line to the trace, where the test asks for one."""
    trace = ctx.context.get("trace")
    if trace:
        line = f"{what} {ctx.partition_key} {ctx.attempt} {ctx.node_id} {ctx.idempotency_key} {os.getpid()}\n"
        with Path(trace).open("a") as file:
            file.write(line)


@step("work")
def work(ctx: PartitionContext) -> Any:
    _note(ctx, "begun")
    result = _ACTIONS[ctx.context.get("do", "answer")](ctx)
    _note(ctx, "ended")
    return result


def answer(ctx: PartitionContext) -> Any:
    return {"number": ctx.context.get("number"), "node": ctx.node_id, "pid": os.getpid()}


def wait(ctx: PartitionContext) -> Any:
    """Wait for the gate; with `polite`, end when asked to."""
    gate, polite = Path(ctx.context["gate"]), ctx.context.get("polite", True)
    deadline = time.monotonic() + _PATIENCE_S
    while not gate.exists() and time.monotonic() < deadline:
        if polite:
            ctx.raise_if_stopping()
        time.sleep(0.02)
    return answer(ctx)


def count(ctx: PartitionContext) -> Any:
    """Commit one number after the other, each in a transaction of its own; wait for the gate after the third."""
    while ctx.checkpoint.get("at", 0) < 6:
        with ctx.transaction():
            ctx.checkpoint["at"] = ctx.checkpoint.get("at", 0) + 1
            ctx.counters.write += 1
        _note(ctx, f"committed-{ctx.checkpoint['at']}")
        if ctx.checkpoint["at"] == 3:
            wait(ctx)
    return ctx.checkpoint["at"]


def fail_at_first(ctx: PartitionContext) -> Any:
    if ctx.attempt <= ctx.context.get("failures", 1):
        raise ValueError(f"attempt {ctx.attempt} fails")
    return answer(ctx)


def exit_at_once(ctx: PartitionContext) -> Any:
    os._exit(ctx.context.get("code", 7))


def crash(ctx: PartitionContext) -> Any:
    ctypes.string_at(0)


def kill_itself(ctx: PartitionContext) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def sys_exit(ctx: PartitionContext) -> Any:
    sys.exit(ctx.context.get("code", "enough"))


def raise_error(ctx: PartitionContext) -> Any:
    raise LookupError("no such flight")


class Unspeakable(BaseException):
    """Not an Exception, and its text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_base(ctx: PartitionContext) -> Any:
    raise KeyboardInterrupt("pressed by nobody")


def raise_unspeakable(ctx: PartitionContext) -> Any:
    raise Unspeakable


class Unpicklable(Exception):
    """Not even its class can be found by name."""

    __qualname__ = "nowhere"

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def raise_unpicklable(ctx: PartitionContext) -> Any:
    """With a text that was not UTF-8 before Python read it."""
    raise Unpicklable(f"no file {os.fsdecode(bytes([0x63, 0x61, 0x66, 0xE9]))}")


def recurse(ctx: PartitionContext) -> Any:
    return recurse(ctx)


def return_object(ctx: PartitionContext) -> Any:
    return {"when": object()}


def return_nan(ctx: PartitionContext) -> Any:
    return {"mean": float("nan")}


def return_itself(ctx: PartitionContext) -> Any:
    result: list[Any] = []
    result.append(result)
    return result


def return_too_much(ctx: PartitionContext) -> Any:
    return "x" * 2_000_000


def miscount(ctx: PartitionContext) -> Any:
    """Leave a counter that no column holds."""
    kind = ctx.context["kind"]
    counters: Any = ctx.counters
    counters.write = {"huge": 2**63, "nan": float("nan"), "none": None, "text": "many", "fraction": 1.5}.get(kind, 1)
    if kind == "replaced":
        ctx.counters = cast(Any, None)
    if ctx.context.get("fail"):
        raise LookupError("no such flight")
    return kind


def return_nested(ctx: PartitionContext) -> Any:
    result: Any = "inside"
    for _ in range(ctx.context["levels"]):
        result = [result]
    return result


def wait_then_return_much(ctx: PartitionContext) -> Any:
    wait(ctx)
    return "x" * 900_000


def raise_huge(ctx: PartitionContext) -> Any:
    raise ValueError("x" * 3_000_000 + " the end")


def raise_unstorable(ctx: PartitionContext) -> Any:
    raise ValueError("nul \x00 surrogate \ud800 emoji \U0001f6eb")


def close_everything(ctx: PartitionContext) -> Any:
    os.closerange(0, 256)
    if ctx.context.get("linger"):
        time.sleep(_PATIENCE_S)


def close_standard_streams(ctx: PartitionContext) -> Any:
    """As daemons do, who have no use for them."""
    if ctx.context.get("descriptors"):
        for descriptor in range(3):
            os.close(descriptor)
    else:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.close()
    return "closed"


def print_and_log(ctx: PartitionContext) -> Any:
    print("z" * 10_000, flush=True)
    ctx.log.info("printed")
    return "printed"


def ignore_sigterm(ctx: PartitionContext) -> Any:
    """Wait for the gate, and be deaf to whoever asks to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return wait(ctx)


def exceed_its_memory_limit(ctx: PartitionContext) -> Any:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), limits[1]))
    try:
        return len(bytearray(1 << 30))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def eat_memory(ctx: PartitionContext) -> Any:
    """Eat more than the control group holds that the test gives; where it gives none, die as if it had."""
    if ctx.context.get("control_group"):
        Path(ctx.context["control_group"], "cgroup.procs").write_text(str(os.getpid()))
    eaten = [b"x" * (1 << 20) for _ in range(200)]
    if not ctx.context.get("control_group"):
        os.kill(os.getpid(), signal.SIGKILL)
    return len(eaten)


def print_much(ctx: PartitionContext) -> Any:
    for _ in range(1000):
        print("y" * 10_000)
    return "printed"


def fork_and_die(ctx: PartitionContext) -> Any:
    """Leave a process behind that holds all that was open, and die."""
    child = os.fork()
    if child == 0:
        time.sleep(_PATIENCE_S)
        os._exit(0)
    Path(ctx.context["left"]).write_text(str(child))
    os.kill(os.getpid(), signal.SIGKILL)


def fork_and_leave(ctx: PartitionContext) -> Any:
    """End well, but forget a process that lives on."""
    child = os.fork()
    if child == 0:
        time.sleep(_PATIENCE_S)
        os._exit(0)
    Path(ctx.context["left"]).write_text(str(child))
    return "forgotten"


def fork_and_return_twice(ctx: PartitionContext) -> Any:
    """Both processes come back from here, as after a forgotten os._exit."""
    parent = os.getpid()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return "parent" if os.getpid() == parent else "child"


def fork_and_return(ctx: PartitionContext) -> Any:
    """A well-behaved one: the process that it starts does its part and is waited for."""
    child = os.fork()
    if child == 0:
        os._exit(5)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def wait_asynchronously(ctx: PartitionContext) -> Any:
    return "awaited"


def log_a_secret(ctx: PartitionContext) -> Any:
    url = "postgresql://reader:hunter2@warehouse/flights"
    ctx.log.info("connecting", target=url)
    ctx.log.info("fields masked", password="hunter2", tried=[url], options={"pwd": "hunter2"}, said="token=hunter2")
    try:
        raise ConnectionError(f"cannot reach {url}")
    except ConnectionError as error:
        ctx.log.exception("cannot connect", cause=error)
        logging.getLogger("driver").warning("cannot reach %s with secret=hunter2", url)
        raise


_ACTIONS: dict[str, Callable[[PartitionContext], Any]] = {
    function.__name__: function
    for function in (
        answer,
        wait,
        count,
        fail_at_first,
        exit_at_once,
        crash,
        kill_itself,
        sys_exit,
        raise_error,
        raise_base,
        raise_unspeakable,
        raise_unpicklable,
        recurse,
        return_object,
        return_nan,
        return_itself,
        return_too_much,
        miscount,
        return_nested,
        wait_then_return_much,
        raise_huge,
        raise_unstorable,
        close_everything,
        close_standard_streams,
        print_and_log,
        ignore_sigterm,
        exceed_its_memory_limit,
        eat_memory,
        print_much,
        fork_and_die,
        fork_and_leave,
        fork_and_return,
        fork_and_return_twice,
        wait_asynchronously,
        log_a_secret,
    )
}
