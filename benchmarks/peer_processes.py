"""The peers' scripts, run by the interpreter of the environment that has the peers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from options import Options
from peer_facts import PEERS, PeerFacts
from servers import libpq_url

HERE = Path(__file__).resolve().parent
PATIENCE_S = 600.0
LEAVING_S = 10.0


class PeerMissingError(Exception):
    """The peer cannot be imported where it should be installed."""


class PeerProcesses:
    """One peer, as a program.

    Args:
        facts: which one.
        python: the interpreter that has it.
    """

    def __init__(self, facts: PeerFacts, python: Path) -> None:
        self.facts = facts
        self._python = python

    def check(self) -> None:
        """Raise PeerMissingError, with the reason, if the peer is not installed."""
        if not self._python.exists():
            raise PeerMissingError("no environment with the peers: `make bench` builds it")
        asked = subprocess.run(
            [self._python, "-c", f"import {self.facts.name}"], capture_output=True, text=True, timeout=PATIENCE_S
        )
        if asked.returncode:
            raise PeerMissingError(asked.stderr.strip().splitlines()[-1])

    def prepare(self, url: str) -> None:
        """Create its tables."""
        self._run(url, "prepare")

    def fill(self, url: str, count: int, *, context_bytes: int = 0) -> dict[str, float]:
        """Enqueue many; the seconds that it took, and how many MiB its memory grew."""
        answer: dict[str, float] = json.loads(self._run(url, "fill", count, context_bytes))
        return answer

    def drip(self, url: str, count: int, apart_s: float) -> None:
        """Enqueue one after the other."""
        self._run(url, "drip", count, apart_s)

    @contextmanager
    def workers(
        self, url: str, workers: int, concurrency: int, environment: Mapping[str, str]
    ) -> Iterator[list[subprocess.Popen[str]]]:
        """Start workers that have imported everything, let them go at one time, and end them at last."""
        processes = [
            subprocess.Popen(
                self._command(url, "work", concurrency),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=self._environment(environment),
            )
            for _ in range(workers)
        ]
        try:
            for process in processes:
                assert process.stdout is not None
                if process.stdout.readline().strip() != "ready":
                    raise SystemExit(f"a worker of {self.facts.name} did not start")
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            yield processes
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                try:
                    process.wait(LEAVING_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _run(self, url: str, *words: object) -> str:
        done = subprocess.run(
            self._command(url, *words), capture_output=True, text=True, timeout=PATIENCE_S, env=self._environment({})
        )
        if done.returncode:
            raise SystemExit(f"{self.facts.name}, {words[0]}:\n{done.stderr}")
        return done.stdout

    def _command(self, url: str, *words: object) -> list[str]:
        script = HERE / "peers" / f"with_{self.facts.name}.py"
        return [str(self._python), str(script), libpq_url(url), *map(str, words)]

    def _environment(self, more: Mapping[str, str]) -> dict[str, Any]:
        return {**os.environ, "PYTHONPATH": str(HERE), **more}


def installed_peers(options: Options) -> tuple[dict[str, PeerProcesses], list[str]]:
    """Return the peers that can be run, by name, and a note about each that cannot."""
    installed, notes = {}, []
    for facts in PEERS:
        peer = PeerProcesses(facts, options.peers_python)
        try:
            peer.check()
        except PeerMissingError as error:
            notes.append(f"{facts.name} is not here: {error}.")
        else:
            installed[facts.name] = peer
    return installed, notes
