"""A database that refuses or does not answer for a while: the worker comes back to work, and loses no result."""

from __future__ import annotations

import time

import pytest

from airflow_dbpartition.worker import messages
from tests.databases import run_sql
from tests.worker.processes import Fleet, is_alive, wait_until
from tests.worker.proxy import Proxy


def test_a_removed_worker_that_cannot_register_again_at_once_does_so_later(postgres_fleet: Fleet) -> None:
    node = postgres_fleet.start()
    run_sql(
        postgres_fleet.database,
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''not now''; END'",
        "CREATE TRIGGER refuse BEFORE INSERT ON batch_nodes FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    postgres_fleet.repository.losses.deregister(node.node_id)
    node.says("registering again failed")
    run_sql(postgres_fleet.database, "DROP TRIGGER refuse ON batch_nodes")

    wait_until(lambda: len(node.views(include_removed=False)) == 1, "it has a new life", logs=[node.log_path])
    assert postgres_fleet.submit().ends() == "COMPLETED"


@pytest.mark.slow
@pytest.mark.resilience_long
def test_a_large_result_waits_for_a_worker_whose_statement_is_not_answered(postgres_fleet: Fleet) -> None:
    with Proxy(postgres_fleet.database.url) as proxy:
        postgres_fleet.start(url=proxy.url)
        job, gate = postgres_fleet.gated(do="wait_then_return_much")
        begun = postgres_fleet.wait_for_note("begun")
        proxy.freeze(b"dbpartition worker")
        gate.touch()
        postgres_fleet.wait_for_note("ended")
        until = time.monotonic() + messages.SEND_TIMEOUT_S + 1
        wait_until(lambda: not is_alive(begun.pid) or time.monotonic() > until, "the result has waited", timeout_s=60)
        proxy.restore()

        assert job.ends() == "COMPLETED"
        assert len(job.partition().result) == 900_000
