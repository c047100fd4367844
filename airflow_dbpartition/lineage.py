"""What a task tells OpenLineage of its job, where Airflow's provider for that is installed.

The provider calls a task's method by its name when the task has ended, in the task's own process. So what it is told is
what the task knew by then: no database is asked, and where there is no provider nothing is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage

    from airflow_dbpartition.storable import JsonObject

FACET = "dbpartition_jobExecution"


class NamesItsJob:
    """What an operator that has to do with one job has on top of BaseOperator."""

    _job_facts: JsonObject | None = None

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage | None:  # noqa: ARG002
        """A facet of the run with the job execution, and its summary if the task has seen the end; also of a failure.

        Returns:
            None where the task has ended before it knew of a job.
        """
        if self._job_facts is None:
            return None
        from airflow.providers.openlineage.extractors import OperatorLineage
        from openlineage.client.facet_v2 import RunFacet

        return OperatorLineage(run_facets={FACET: RunFacet().with_additional_properties(**self._job_facts)})
