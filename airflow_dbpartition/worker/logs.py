"""Logging: one line a transition with ids on it, as JSON or for a console, secrets masked."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog

from airflow_dbpartition.config import LogConfig
from airflow_dbpartition.domain import Claim
from airflow_dbpartition.masking import mask_secrets

_SECRET_NAMES = frozenset({"password", "passwd", "pwd", "secret", "token"})


def _mask(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {key: "***" if key.lower() in _SECRET_NAMES else _masked(value) for key, value in event.items()}


def _masked(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return _mask(None, "", {str(key): item for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return [_masked(item) for item in value]
    return mask_secrets(value if isinstance(value, str) else repr(value))


def ids_of(claim: Claim) -> dict[str, object]:
    """What every log line about a partition carries."""
    return {
        "job_execution_id": claim.job_execution_id,
        "step_execution_id": claim.step_execution_id,
        "partition_key": claim.partition_key,
        "attempt": claim.attempt,
        "version": claim.version,
    }


def configure_logging(*, log_format: str = "console", log_level: str = "info") -> None:
    """Send structlog's and the standard library's lines to stderr in one format.

    Raises:
        ConfigurationError: for an unknown format or level.
    """
    LogConfig(log_format, log_level)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: Any = (
        structlog.processors.JSONRenderer(ensure_ascii=False)
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            exception_formatter=structlog.dev.plain_traceback,  # rich shows local variables, and so secrets
        )
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, log_level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    last: list[Any] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.format_exc_info,
        _mask,
    ]
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[*last, renderer]))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_level.upper())
    logging.getLogger("alembic").setLevel(logging.WARNING)  # what it says at info is no news here
