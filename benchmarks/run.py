"""Run benchmarks, one after the other, and keep what they found in benchmarks/results.

python benchmarks/run.py [name ...] [--rounds 3] [--quick] [--size N]
"""

from __future__ import annotations

import argparse
import importlib

from options import add_options, read_options, say, show

# In the order in which they run. Each is a module beside this one, with `main(options) -> list[Report]`.
BENCHMARKS = (
    "throughput",
    "plan",
    "dispatch_latency",
    "completion_latency",
    "speed_up",
    "skew",
    "idle_cost",
    "history",
    "memory",
    "airflow_mapping",
    "dag_parse",
)


def run() -> None:
    parser = argparse.ArgumentParser(description="Measure, and print tables.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(BENCHMARKS)}; none = all")
    add_options(parser)
    chosen = parser.parse_args()
    unknown = set(chosen.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    options = read_options(chosen)
    for name in chosen.names or BENCHMARKS:
        say(f"{name}:")
        # The figures of a quick run must not take the place of real ones.
        show(importlib.import_module(name).main(options), write=not options.quick)


if __name__ == "__main__":
    run()
