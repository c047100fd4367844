"""What a benchmark has to know of each peer: where it keeps its jobs, and what its settles promise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PeerFacts:
    """One peer.

    Args:
        name: of its package's project; its script is peers/with_<name>.py.
        queue_table: where enqueueing inserts a row for each job.
        finished: counts the jobs that it has completed, by its own tables.
        durable: whether a job that has ended is also committed as such.
        fenced: whether a worker that was given up can still settle what another one runs by now.
    """

    name: str
    queue_table: str
    finished: str
    durable: str
    fenced: str


PROCRASTINATE = PeerFacts(
    name="procrastinate",
    queue_table="procrastinate_jobs",
    finished="SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'",
    durable="yes, one by one",
    fenced="no",
)
PGQUEUER = PeerFacts(
    name="pgqueuer",
    queue_table="pgqueuer",
    finished="SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'",
    durable="within 0.1 s, or a batch",
    fenced="no",
)
AWA = PeerFacts(
    name="awa",
    queue_table="awa.ready_entries",
    # Completed in batches, an array each; those that took another way have a row each.
    finished=(
        "SELECT (SELECT coalesce(sum(cardinality(job_ids)), 0) FROM awa.receipt_completion_batches)"
        " + (SELECT count(*) FROM awa.done_entries WHERE state = 'completed')"
    ),
    durable="yes, in batches",
    fenced="yes, by run lease",
)
CHANCY = PeerFacts(
    name="chancy",
    queue_table="chancy_jobs",
    finished="SELECT count(*) FROM chancy_jobs WHERE state = 'succeeded'",
    durable="within 1 s",
    fenced="yes, by claim id",
)
PEERS = (PROCRASTINATE, PGQUEUER, AWA, CHANCY)
