"""What most benchmarks need, for one import line."""

from fleet import Fleet, fleet
from options import Options, alone, say
from reporting import Machine, Report, Rounds, Target, percentile
from servers import Server, libpq_url, rows, server

__all__ = [
    "Fleet",
    "Machine",
    "Options",
    "Report",
    "Rounds",
    "Server",
    "Target",
    "alone",
    "fleet",
    "libpq_url",
    "percentile",
    "rows",
    "say",
    "server",
]
