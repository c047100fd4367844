"""The repository's verbs when time, or connections, run out: said at once, changed nothing, and to be repeated."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import pytest
from sqlalchemy.engine import make_url

from airflow_dbpartition.errors import DatabaseError
from airflow_dbpartition.repository import JobRepository
from tests.databases import Database, run_sql, with_user
from tests.races.racing import race
from tests.resilience import test_broken_connections as stories
from tests.resilience.contended_verbs import LAST_TABLE, Verb, claim, on
from tests.resilience.contention import locked, met_by, snapshot, wait_until_somebody_waits

BOTH = ("claim-postgresql", "claim-mysql")


# --- timeouts --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _somebody(database: Database, *, limit: str) -> Iterator[Database]:
    """The same database for a user of its own, who may do everything within a limit."""
    name = f"limited_{secrets.token_hex(4)}"
    url = make_url(database.url)
    if database.name == "postgresql":
        run_sql(database, f"CREATE ROLE {name} LOGIN PASSWORD 'secret' IN ROLE {url.username} {limit}")
    else:
        run_sql(database, f"CREATE USER {name} IDENTIFIED BY 'secret' WITH {limit}")
        run_sql(database, f"GRANT ALL ON {url.database}.* TO {name}")
    yield with_user(database, name, "secret")
    run_sql(database, f"DROP {'ROLE' if database.name == 'postgresql' else 'USER'} {name}")


@pytest.fixture
def short_of_time(database: Database, repository: JobRepository) -> Iterator[JobRepository]:
    """The same job repository, for somebody whose statements are ended by the server after a while."""
    with contextlib.ExitStack() as stack:
        if database.name == "postgresql":
            short = JobRepository.connect(database.config(pool_size=1, statement_timeout_s=0.3))
        else:
            user = stack.enter_context(_somebody(database, limit="MAX_STATEMENT_TIME 0.3"))
            short = JobRepository.connect(user.config(pool_size=1))
        yield short
        short.close()


@on("postgresql", "mysql", short=BOTH)
def test_a_verb_whose_statement_takes_too_long_says_so_at_once_and_can_be_repeated(
    database: Database, repository: JobRepository, short_of_time: JobRepository, verb: Verb
) -> None:
    story = verb(repository)
    _, act = next(story)
    before = snapshot(repository)
    met = met_by(short_of_time.engine)
    with locked(database, LAST_TABLE[verb]), pytest.raises(DatabaseError, match=rf"database {database.name}.*time"):
        act(short_of_time)
    assert met.codes == ["57014" if database.name == "postgresql" else 1969]
    assert snapshot(repository) == before
    act(short_of_time)
    assert next(story, None) is None


@on("postgresql", "mysql", verbs=(claim, stories.complete), short=BOTH)
def test_a_verb_that_a_person_cancels_says_so_at_once_and_can_be_repeated(
    database: Database, repository: JobRepository, verb: Verb
) -> None:
    story = verb(repository)
    _, act = next(story)
    before = snapshot(repository)
    met = met_by(repository.engine)
    cancel = "SELECT pg_cancel_backend({})" if database.name == "postgresql" else "KILL QUERY {}"
    with locked(database, LAST_TABLE[verb]):
        (said, _) = race(lambda: act(repository), lambda: _to_who_waits(database, cancel))
    assert isinstance(said, DatabaseError)
    assert met.codes == ["57014" if database.name == "postgresql" else 1317]
    assert snapshot(repository) == before
    act(repository)
    assert next(story, None) is None


@on("postgresql", "mysql", verbs=(claim, stories.complete), short=BOTH)
def test_a_verb_whose_session_a_person_ends_is_done_once(
    database: Database, repository: JobRepository, verb: Verb
) -> None:
    story = verb(repository)
    _, act = next(story)
    met = met_by(repository.engine)
    kill = "SELECT pg_terminate_backend({})" if database.name == "postgresql" else "KILL CONNECTION {}"
    with locked(database, LAST_TABLE[verb]) as let_go:
        met.then = let_go
        outcome, _ = race(lambda: act(repository), lambda: _to_who_waits(database, kill))
    assert len(met.errors) == 1
    if verb is claim and database.name == "postgresql":  # a transaction of its own: it may have been committed
        assert isinstance(outcome, DatabaseError)
        act(repository)
    assert next(story, None) is None


def _to_who_waits(database: Database, statement: str) -> None:
    run_sql(database, statement.format(wait_until_somebody_waits(database)))


# --- connections -----------------------------------------------------------------------------------------------


@on("postgresql", "mysql", verbs=(claim,), short=BOTH)
def test_a_verb_that_is_given_no_connection_says_so_at_once_and_can_be_repeated(
    database: Database, repository: JobRepository, verb: Verb
) -> None:
    story = verb(repository)
    _, act = next(story)
    limit = "CONNECTION LIMIT 1" if database.name == "postgresql" else "MAX_USER_CONNECTIONS 1"
    with _somebody(database, limit=limit) as user:
        only_one = JobRepository.connect(user.config())
        met = met_by(only_one.engine)
        with (
            only_one.engine.connect(),
            pytest.raises(DatabaseError, match=r"limited_.*(too many |max_user_)connections"),
        ):
            act(only_one)
        assert len(met.errors) == 1
        act(only_one)
        only_one.close()
    assert next(story, None) is None


@on("postgresql", verbs=(claim,), short=())
def test_a_verb_for_which_the_pool_has_no_connection_left_says_so_and_can_be_repeated(
    database: Database, repository: JobRepository, verb: Verb
) -> None:
    story = verb(repository)
    _, act = next(story)
    small = JobRepository.connect(database.config(pool_size=1))
    with contextlib.ExitStack() as lent:
        for _ in range(6):
            lent.enter_context(small.engine.connect())
        with pytest.raises(DatabaseError, match=r"database postgresql.*QueuePool limit of size 1 overflow 5 reached"):
            act(small)
    act(small)
    small.close()
    assert next(story, None) is None
