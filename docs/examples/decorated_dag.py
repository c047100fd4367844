"""A function says what the partitions are."""

from __future__ import annotations

# [start dag]
from airflow.sdk import DAG, task

with DAG("greet_by_function", schedule=None, catchup=False):

    @task.partitioned_step(step="greet", transferable=True, wait_for_completion=True, deferrable=True)
    def people(names, grid_size):
        """One partition for each node and place: some names each."""
        return {f"part{place}": {"person": ", ".join(names[place::grid_size])} for place in range(grid_size)}

    @task
    def invited():
        return ["Ada", "Grace", "Edsger"]

    people(invited())
# [end dag]
