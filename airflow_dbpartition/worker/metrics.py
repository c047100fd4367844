"""What a worker counts, in Prometheus' terms."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """One worker's counters, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.settled = Counter(
            "dbpartition_partitions", "Partitions settled by this worker", ["outcome"], registry=self.registry
        )
        self.claimed = Counter(
            "dbpartition_claims", "Partitions claimed by this worker", ["how"], registry=self.registry
        )
        self.claims_lost = Counter(
            "dbpartition_claims_lost", "Claims that went to another node", registry=self.registry
        )
        self.nodes_removed = Counter(
            "dbpartition_nodes_removed", "Silent nodes that this worker's sweeps removed", registry=self.registry
        )
        self.reassigned = Counter(
            "dbpartition_partitions_reassigned",
            "Partitions that this worker's sweeps re-placed",
            registry=self.registry,
        )
        self.running = Gauge("dbpartition_running", "Partitions running in this worker", registry=self.registry)
        self.heartbeat_age = Gauge(
            "dbpartition_heartbeat_age_seconds", "Seconds since the last answered heartbeat", registry=self.registry
        )
        self.duration = Histogram(
            "dbpartition_partition_seconds",
            "Seconds that an attempt at a partition took",
            registry=self.registry,
            buckets=(0.01, 0.1, 1, 10, 60, 300, 1800, 7200),
        )
