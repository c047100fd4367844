"""What every benchmark can be asked for, on its command line and by run.py."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from reporting import Report

PEERS_PYTHON = Path(__file__).resolve().parent.parent / ".venv-bench" / "bin" / "python"


@dataclass(frozen=True)
class Options:
    """How long and beside whom.

    Args:
        rounds: times that each figure is measured.
        quick: small sizes, to see that it works; its figures mean nothing.
        size: how many partitions (or runs) a round has; None = what the benchmark says.
        peers_python: the interpreter that has the peers installed; without it they are left out.
    """

    rounds: int = 3
    quick: bool = False
    size: int | None = None
    peers_python: Path = PEERS_PYTHON

    def sized(self, normal: int, quick: int) -> int:
        """Return `size`, or the size that fits `quick`."""
        return self.size or (quick if self.quick else normal)


Benchmark = Callable[[Options], list[Report]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all have."""
    parser.add_argument("--rounds", type=int, default=Options.rounds)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--size", type=int, help="partitions or runs in a round")
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON)


def read_options(chosen: argparse.Namespace) -> Options:
    return Options(
        rounds=chosen.rounds, quick=chosen.quick, size=chosen.size, peers_python=chosen.peers_python.absolute()
    )


def show(reports: Sequence[Report], *, write: bool) -> None:
    """Print the tables; write them where they are worth keeping."""
    for report in reports:
        print(report.markdown(), flush=True)
        if write:
            report.write()


def alone(benchmark: Benchmark, description: str | None) -> None:
    """Run one benchmark by itself. It writes no results: those are run.py's."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    add_options(parser)
    show(benchmark(read_options(parser.parse_args())), write=False)


def say(words: str) -> None:
    """Tell the person who waits what is measured now."""
    print(words, file=sys.stderr, flush=True)
