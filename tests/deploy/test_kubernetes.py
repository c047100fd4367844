"""deploy/kubernetes: manifests that name variables, flags and columns that there are, and leave time to drain."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from airflow_dbpartition.domain import JobIdentity, Partition
from airflow_dbpartition.repository import JobRepository, NewExecution
from tests.deploy.files import dockerfile, manifests
from tests.docs import commands

PODS = ("Deployment", "CronJob")


def only(kind: str) -> dict[str, Any]:
    (found,) = [manifest for manifest in manifests() if manifest["kind"] == kind]
    return found


def pod(kind: str) -> dict[str, Any]:
    spec: dict[str, Any] = only(kind)["spec"]
    if kind == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    found: dict[str, Any] = spec["template"]["spec"]
    return found


def container(kind: str) -> dict[str, Any]:
    (found,) = pod(kind)["containers"]
    return dict(found)


def values(kind: str) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container(kind)["env"]}


@pytest.mark.parametrize("kind", PODS)
def test_variables_and_flags_are_ones_that_a_worker_has(kind: str) -> None:
    assert set(values(kind)) <= commands.environment_variables()
    assert commands.parse(container(kind)["args"]) == "worker"
    assert "command" not in container(kind), "the image's entrypoint is kept"


@pytest.mark.parametrize("kind", PODS)
def test_the_pod_is_killed_later_than_the_worker_drains(kind: str) -> None:
    assert pod(kind)["terminationGracePeriodSeconds"] >= float(values(kind)["DBPARTITION_GRACE"]) + 20


@pytest.mark.parametrize("kind", PODS)
def test_the_password_is_a_secret_and_the_pod_no_root(kind: str) -> None:
    assert values(kind)["DBPARTITION_DATABASE_URL"] == {"secretKeyRef": {"name": "dbpartition", "key": "database-url"}}
    context = pod(kind)["securityContext"]
    assert context["runAsNonRoot"] is True
    assert str(context["runAsUser"]) == dockerfile("worker").user
    assert container(kind)["resources"]["limits"]["memory"]


@pytest.mark.parametrize("kind", PODS)
def test_the_node_is_named_after_the_pod(kind: str) -> None:
    assert values(kind)["DBPARTITION_NODE_PREFIX"] == {"fieldRef": {"fieldPath": "metadata.name"}}


def test_probes_look_where_the_worker_answers() -> None:
    worker = container("Deployment")
    ports = {port["name"]: port["containerPort"] for port in worker["ports"]}
    assert str(ports["health"]) == values("Deployment")["DBPARTITION_HEALTH_PORT"]
    probes = {name: worker[name]["httpGet"] for name in ("livenessProbe", "readinessProbe", "startupProbe")}
    assert {probe["port"] for probe in probes.values()} == {"health"}
    assert probes["livenessProbe"]["path"] == "/livez"
    assert probes["readinessProbe"]["path"] == "/readyz"


def test_selectors_find_the_pods() -> None:
    spec = only("Deployment")["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert only("ScaledObject")["spec"]["scaleTargetRef"]["name"] == only("Deployment")["metadata"]["name"]


def test_the_cron_job_drains_and_does_not_pile_up() -> None:
    assert "--drain" in container("CronJob")["args"]
    assert only("CronJob")["spec"]["concurrencyPolicy"] == "Forbid"
    assert pod("CronJob")["restartPolicy"] == "Never"
    assert only("CronJob")["spec"]["jobTemplate"]["spec"]["backoffLimit"] == 0


def test_the_scaling_query_counts_what_waits_and_runs(repository: JobRepository) -> None:
    (trigger,) = only("ScaledObject")["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    if repository.schema:
        query = query.replace("batch_job_progress", f"{repository.schema}.batch_job_progress")
    assert trigger["metadata"]["targetQueryValue"] == values("Deployment")["DBPARTITION_CONCURRENCY"]
    with repository.engine.connect() as connection:
        assert int(connection.execute(text(query)).scalar_one()) == 0
    partitions = [Partition(f"partition{number}") for number in range(3)]
    for group in ("default", "another"):
        repository.executions.submit(
            NewExecution(JobIdentity(f"job of {group}"), "step", node_group=group), partitions, {}
        )
    with repository.engine.connect() as connection:
        assert int(connection.execute(text(query)).scalar_one()) == 3
