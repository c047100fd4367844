"""What supervisor and child say to each other: one JSON object a line over a socket pair. No pickle."""

from __future__ import annotations

import json
import select
import socket
from functools import lru_cache
from typing import Any

from airflow_dbpartition.domain import Claim, Counters, JobSettings, TransferPolicy
from airflow_dbpartition.storable import JsonObject, dump_json
from airflow_dbpartition.worker.feeding import ClaimKey

SEND_TIMEOUT_S = 10.0
ROOMY_BYTES = 32 * 1024  # a socket is called writable while much more than this is free

# supervisor -> child
START = "start"  # database, imports
RUN = "run"  # claim
STOP = "stop"  # the running partition is asked to end
RETURN = "return"  # a claim that has not begun is not to begin: it is reported as unstarted
# child -> supervisor
READY = "ready"  # step names
UNUSABLE = "unusable"  # the imports failed
DONE = "done"  # step_execution_id, version, outcome, took_s, spent: the child is not fit for another one


class Channel:
    """One end of the socket pair. Read it when it is readable.

    Args:
        sock: the socket.
        send_timeout_s: the deadline for writing one message; None = wait for as long as the other end lives.
    """

    def __init__(self, sock: socket.socket, *, send_timeout_s: float | None = SEND_TIMEOUT_S) -> None:
        self.socket = sock
        self._buffer = bytearray()
        sock.settimeout(send_timeout_s)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, kind: str, **values: Any) -> None:
        """Send one message.

        Raises:
            OSError: the other end is gone, or has not read for too long.
        """
        self.send_line(line_of(kind, **values))

    def send_line(self, line: bytes) -> None:
        """Send what `line_of` has made; raises as `send`."""
        self.socket.sendall(line)

    @property
    def is_roomy(self) -> bool:
        """Whether a line of `ROOMY_BYTES` can be sent without waiting for the other end to read."""
        return bool(select.select([], [self.socket], [], 0)[1])

    def receive(self) -> list[JsonObject] | None:
        """The messages that have arrived (call it when readable); None = the other end is gone."""
        try:
            data = self.socket.recv(1 << 16)
        except (BlockingIOError, InterruptedError, TimeoutError):
            return []
        except OSError:
            return None
        if not data:
            return None
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.socket.close()


def line_of(kind: str, **values: Any) -> bytes:
    """A message as it is sent."""
    return dump_json({"kind": kind, **values}).encode() + b"\n"


def key_of(told: JsonObject) -> ClaimKey:
    """The claim that a message speaks of, or that a claim in a message is."""
    return (told["step_execution_id"], told["version"])


def claim_to_json(claim: Claim) -> JsonObject:
    return {
        **vars(claim),
        "counters": vars(claim.counters),
        "settings": vars(claim.settings),
        "transfer_policy": claim.transfer_policy.value,
    }


@lru_cache(maxsize=16)
def _settings(text: str) -> JobSettings:
    """Those of one claim are mostly those of the last one, and take long to check."""
    return JobSettings.from_json(json.loads(text))


def claim_from_json(value: JsonObject) -> Claim:
    return Claim(
        **{
            **value,
            "counters": Counters(**value["counters"]),
            "settings": _settings(dump_json(value["settings"])),
            "transfer_policy": TransferPolicy(value["transfer_policy"]),
        }
    )
