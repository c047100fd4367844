"""pgbench: the bare statements that claim and settle, and nothing else, as fast as the server takes them."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

from sqlalchemy import make_url

from airflow_dbpartition.demo.embedded import find_installation

NODE = "pgbench"
CLIENTS = 4
# One array each way: LIMIT inside ARRAY() can claim no more than it says, whatever the plan.
SCRIPT = """
WITH moved AS (
  UPDATE batch_partitions
  SET status = 'CLAIMED', assigned_node = '{node}', version = version + 1, attempt = attempt + 1,
      claim_time = now(), last_updated = now(), is_transferable = 0
  WHERE step_execution_id = ANY(ARRAY(
    SELECT step_execution_id FROM batch_partitions
    WHERE status = 'PENDING' AND assigned_node IS NULL AND node_group = 'default' AND available_at <= now()
    ORDER BY priority DESC, step_execution_id LIMIT {batch} FOR UPDATE SKIP LOCKED))
  RETURNING step_execution_id)
SELECT array_agg(step_execution_id) AS claimed FROM moved \\gset
UPDATE batch_partitions
SET status = 'COMPLETED', end_time = now(), last_updated = now()
WHERE step_execution_id = ANY(:claimed::bigint[]) AND status = 'CLAIMED' AND assigned_node = '{node}' AND version = 1;
"""


def partitions_per_second(url: str, partitions: int, batch: int) -> float:
    """Claim and settle all the PENDING partitions that nobody owns; there have to be so many."""
    address = make_url(url)
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "script.sql"
        script.write_text(SCRIPT.format(node=NODE, batch=batch))
        done = subprocess.run(
            [
                str(find_installation() / "bin" / "pgbench"),
                *("--no-vacuum", "--protocol", "prepared", "--file", str(script)),
                *("--client", str(CLIENTS), "--transactions", str(partitions // (batch * CLIENTS))),
                *("--host", str(address.host), "--port", str(address.port), "--username", str(address.username)),
                str(address.database),
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "LC_ALL": "C"},
        )
    found = re.search(r"^tps = ([0-9.]+) \(without initial connection time\)", done.stdout, re.MULTILINE)
    if done.returncode or found is None:
        raise SystemExit(f"pgbench:\n{done.stdout}{done.stderr}")
    return float(found[1]) * batch
