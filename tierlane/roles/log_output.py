"""Log lines: JSON for machines, colours for people; never a key, an input or an output."""

import logging
import sys
from typing import Any

import orjson
import structlog

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure_logs(log_format: str, log_level: str, role: str, name: str) -> None:
    """Every line of this process says its role and its name, and goes to standard output."""
    console = log_format == "console"
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty())
            if console
            else structlog.processors.JSONRenderer(serializer=_to_json),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[log_level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(role=role, name=name)


def _to_json(line: dict[str, Any], **_: Any) -> str:
    return orjson.dumps(line, default=str).decode()
