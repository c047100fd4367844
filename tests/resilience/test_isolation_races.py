"""The repository's rules and races once more, where the server's own default isolation is a stricter one."""

from __future__ import annotations

import pytest

from tests.integration.test_repository_claims import *  # noqa: F403 - the same tests on other databases
from tests.integration.test_repository_losses import *  # noqa: F403
from tests.integration.test_repository_settlements import *  # noqa: F403
from tests.races.test_all_verbs_at_once import *  # noqa: F403
from tests.races.test_claim_races import *  # noqa: F403
from tests.races.test_execution_races import *  # noqa: F403
from tests.resilience.test_isolation import fresh_database, snapshot_server, strict_role

pytestmark = [pytest.mark.resilience_long, pytest.mark.timeout(600)]
__all__ = ["fresh_database", "snapshot_server", "strict_role"]
