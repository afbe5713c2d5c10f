"""Logs internal errors with type and traceback, without message and locals, which may contain client data or secrets."""

import traceback

import structlog

log = structlog.get_logger("process")


def log_fault(event: str, error: BaseException | None, **fields: str) -> None:
    """Write one error line."""
    where = "".join(traceback.format_tb(error.__traceback__)) if error else ""
    log.error(event, error=type(error).__name__, where=where, **fields)
