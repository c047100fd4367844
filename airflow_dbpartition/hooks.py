"""JobRepositoryHook: the job repository by an Airflow connection, and data, files and objects for partitioners."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException

from airflow_dbpartition.connections import (
    OWN_TYPE,
    ConnectionFields,
    RepositoryAddress,
    database_url,
    repository_address,
    supported_backend,
)
from airflow_dbpartition.errors import ConfigurationError, DbPartitionError, InvalidPartitionError
from airflow_dbpartition.masking import mask_secrets
from airflow_dbpartition.partitioners.environment import FilePath, is_remote, local_path

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

    from airflow_dbpartition.repository import JobRepository
    from airflow_dbpartition.storable import JsonObject

DEFAULT_CONN_ID = "dbpartition_default"
FRESH_FOR_S = 60.0  # what an Airflow connection said so long ago is still believed

log = logging.getLogger(__name__)

_checked: set[tuple[str, str | None]] = set()


def open_repository(address: RepositoryAddress, *, pool_size: int = 0) -> JobRepository:
    """A repository whose schema was checked (once in this process); the caller closes it.

    Args:
        pool_size: connections kept open between two statements; 0 = none.

    Raises:
        SchemaError: the tables are missing or older than this package.
        DatabaseError: the database refused, or cannot be reached; secrets are masked.
    """
    from airflow_dbpartition import revision
    from airflow_dbpartition.repository import JobRepository

    repository = JobRepository.connect(address.config(pool_size=pool_size))
    key = (address.url, address.schema)
    try:
        if key not in _checked:
            revision.require_current(repository.engine, address.schema)
            _checked.add(key)
    except BaseException:
        repository.close()
        raise
    return repository


@contextmanager
def opened(address: RepositoryAddress, *, pool_size: int = 1) -> Iterator[JobRepository]:
    """As `open_repository`, closed at the end.

    Connections that are made later than a moment after the lookup are made with what the Airflow connection says then:
    its password may be a token that lives for minutes.
    """
    repository = open_repository(address, pool_size=pool_size)
    _renew_credentials(repository.engine, address)
    try:
        yield repository
    finally:
        repository.close()


def _renew_credentials(engine: Engine, address: RepositoryAddress) -> None:
    from sqlalchemy import event

    from airflow_dbpartition.dialects import normalise_url

    looked_up = time.monotonic()

    @event.listens_for(engine, "do_connect")
    def renew(dialect: Any, _record: object, _args: object, params: dict[str, Any]) -> None:
        if time.monotonic() - looked_up < FRESH_FOR_S:
            return
        try:
            newer = JobRepositoryHook(address.conn_id).address()
        except Exception as error:  # noqa: BLE001 - Airflow is away: what was known may still do
            log.warning("connection %r could not be looked up again: %s", address.conn_id, error)
            return
        _, found = dialect.create_connect_args(normalise_url(newer.url))
        for name in {"user", "password"} & found.keys() & params.keys():
            value = found[name]
            params[name] = value.encode() if isinstance(params[name], bytes) else value


class JobRepositoryHook(BaseHook):
    """The job repository behind an Airflow connection.

    The connection may be of our own type `dbpartition`, or any of a supported database: postgres, mysql, mariadb,
    sqlite (and URLs such as `postgresql+psycopg2://…`). libpq's settings in its extras (sslmode, sslrootcert, options,
    application_name …) are passed on. Further extras: `dbpartition_schema`, the schema of the tables; `dialect`, for
    connections of type dbpartition; the timings of the cluster where the workers have others than the defaults
    (`heartbeat_s`, `unreachable_after_s`, `remove_after_s`, …); and, for tests, upper limits of the waits of all tasks
    (`longest_poll_interval_s`, `longest_no_nodes_timeout_s`).

    Args:
        repository_conn_id: the Airflow connection.
        schema: the schema of the tables; wins over the connection's.
    """

    conn_name_attr = "repository_conn_id"
    default_conn_name = DEFAULT_CONN_ID
    conn_type = OWN_TYPE
    hook_name = "Job repository (dbpartition)"

    def __init__(self, repository_conn_id: str = DEFAULT_CONN_ID, schema: str | None = None) -> None:
        super().__init__()
        self.repository_conn_id = repository_conn_id
        self.schema = schema

    def address(self) -> RepositoryAddress:
        """Where the job repository is. Looks the connection up each time: passwords may be short-lived.

        Raises:
            ConfigurationError: the connection is missing or cannot be used.
        """
        connection = _connection(self.repository_conn_id)
        return self._warned(repository_address(connection, connection.extra_dejson, schema=self.schema))

    async def async_address(self) -> RepositoryAddress:
        """As `address`, for an event loop, which is never blocked: in a thread, where talking to Airflow may wait.

        Raises:
            ConfigurationError: the connection is missing or cannot be used.
        """
        from asgiref.sync import sync_to_async

        return await sync_to_async(self.address)()

    @contextmanager
    def repository(self, *, pool_size: int = 1) -> Iterator[JobRepository]:
        """The job repository; every connection is closed at the end.

        Args:
            pool_size: connections kept open meanwhile; 0 opens one for each statement.

        Raises:
            ConfigurationError, SchemaError, DatabaseError: in one line each, secrets masked.
        """
        with opened(self.address(), pool_size=pool_size) as repository:
            yield repository

    def summary(self, job_execution_id: int) -> JsonObject:
        """Counts and summed counters of a job, as its latest execution leaves it.

        Raises:
            JobExecutionNotFoundError: there is no such execution.
        """
        with self.repository() as repository:
            return repository.reading.summary(job_execution_id).to_json()

    def iter_results(self, job_execution_id: int) -> Generator[tuple[str, Any], None, None]:
        """(partition key, result) of every completed partition of the job, read page by page.

        Raises:
            JobExecutionNotFoundError: there is no such execution.
        """
        with self.repository() as repository:
            yield from repository.reading.iter_results(job_execution_id)

    def test_connection(self) -> tuple[bool, str]:
        """What the Test button says: whether the database answers and has our tables."""
        from airflow_dbpartition import revision
        from airflow_dbpartition.repository import JobRepository

        try:
            address = self.address()
            repository = JobRepository.connect(address.config(pool_size=0))
            try:
                revision.require_current(repository.engine, address.schema)
                nodes = [
                    node
                    for node in repository.nodes.all()
                    if node.heartbeat_age_s < address.timings.unreachable_after_s
                ]
            finally:
                repository.close()
        except DbPartitionError as error:
            return False, str(error)
        return True, f"job repository at revision {revision.head_revision()}, {len(nodes)} live node(s)"

    def _warned(self, address: RepositoryAddress) -> RepositoryAddress:
        if address.unknown:
            self.log.warning(
                "connection %r: unknown extras are ignored: %s", address.conn_id, ", ".join(address.unknown)
            )
        return address


class AirflowEnvironment:
    """How partitioners reach data inside Airflow: by its connections, ObjectStoragePath and S3Hook.

    Args:
        repository: whose engine partitioners get that name no connection.
    """

    def __init__(self, repository: JobRepository) -> None:
        self._repository = repository

    @contextmanager
    def engine(self, conn_id: str | None) -> Iterator[Engine]:
        """An engine for any Airflow connection that speaks SQL; None is the job repository's.

        Raises:
            ConfigurationError: the connection is missing, or there is no engine for its type.
        """
        if conn_id is None:
            yield self._repository.engine
            return
        engine = _engine(_connection(conn_id))
        try:
            yield engine
        finally:
            engine.dispose()

    def path(self, url: str, conn_id: str | None) -> FilePath:
        """A pathlib path for what is local, an ObjectStoragePath for everything else."""
        if conn_id is None and not is_remote(url):
            return local_path(url)
        from airflow.sdk import ObjectStoragePath

        path: FilePath = ObjectStoragePath(url, conn_id=conn_id)
        return path

    def s3_objects(self, bucket: str, prefix: str, conn_id: str | None) -> Iterator[tuple[str, int]]:
        """(key, bytes) of every object of the bucket whose key begins so, in S3's order, listed page by page.

        Args:
            conn_id: an Airflow connection of type aws; None = what boto3 finds by itself (environment, instance role).

        Raises:
            ConfigurationError: the provider or the connection is missing, or S3 refuses; another try would not help.
            InvalidPartitionError: S3 did not answer, or not well; another try may help.
        """
        try:
            from airflow.providers.amazon.aws.hooks.s3 import S3Hook
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"bucket {bucket!r} is listed by the S3Hook of apache-airflow-providers-amazon, which is not installed "
                f"({error.name}): pip install 'airflow-dbpartition[amazon]'"
            ) from None
        from botocore.exceptions import BotoCoreError, ClientError

        if conn_id is not None:
            _connection(conn_id)  # S3Hook would fall back to other credentials, and only log it
        try:
            for listed in S3Hook(aws_conn_id=conn_id).iter_file_metadata(prefix, bucket_name=bucket):
                yield listed["Key"], int(listed["Size"])
        except (BotoCoreError, ClientError) as error:
            raise _listing_error(error, bucket, prefix, conn_id) from error


# What another try may mend; everything else that S3 or boto3 says is wrong until somebody changes something.
_PASSING_S3_ERRORS = {"RequestTimeout", "RequestTimeTooSkewed", "SlowDown", "Throttling", "ThrottlingException"}
_S3_HINTS = {
    "NoSuchBucket": "there is no such bucket",
    "AccessDenied": "the credentials lack the right s3:ListBucket",
    "PermanentRedirect": "the bucket is in another region; set region_name in the connection's extras",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set region_name in the connection's extras",
    "NoCredentialsError": "no credentials were found; give conn_id, or credentials to Airflow's environment",
}


def _listing_error(error: Exception, bucket: str, prefix: str, conn_id: str | None) -> DbPartitionError:
    from botocore.exceptions import ClientError, ConnectionError, HTTPClientError

    who = f"connection {conn_id!r}" if conn_id else "no connection (boto3's own credentials)"
    name, passing = type(error).__name__, isinstance(error, (ConnectionError, HTTPClientError))
    if isinstance(error, ClientError):
        name = str(error.response.get("Error", {}).get("Code"))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        passing = name in _PASSING_S3_ERRORS or status >= 500
    hint = f": {_S3_HINTS[name]}" if name in _S3_HINTS else ""
    words = " ".join(mask_secrets(str(error)).split())
    text = f"bucket {bucket!r}, prefix {prefix!r}, {who}: cannot list the objects{hint} ({words})"
    return InvalidPartitionError(text) if passing else ConfigurationError(text)


def _engine(connection: Any) -> Engine:
    from sqlalchemy import create_engine
    from sqlalchemy.pool import NullPool

    from airflow_dbpartition.dialects import normalise_url

    extra: Mapping[str, Any] = connection.extra_dejson
    if supported_backend(connection, extra) is not None:
        url, _ = database_url(connection, extra)
        return create_engine(normalise_url(url), poolclass=NullPool, hide_parameters=True)
    hook = connection.get_hook()
    make = getattr(hook, "get_sqlalchemy_engine", None)
    if make is None:
        raise ConfigurationError(
            f"connection {connection.conn_id!r} is of type {connection.conn_type!r}, for which there is no SQLAlchemy "
            "engine: use one of an SQL database"
        )
    engine: Engine = make()
    return engine


def _connection(conn_id: str) -> Any:
    """The Airflow connection.

    Raises:
        ConfigurationError: it is not defined.
    """
    try:
        connection: ConnectionFields = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        raise _missing(conn_id) from None
    return connection


def _missing(conn_id: str) -> ConfigurationError:
    variable = f"AIRFLOW_CONN_{conn_id.upper()}"
    return ConfigurationError(
        f"the Airflow connection {conn_id!r} is not defined: add it under Admin → Connections, or set {variable}"
    )
