"""Logging a fault of ours: its kind and where it happened, never its message or locals, which may hold what a client
sent or a secret.
"""

import traceback

import structlog

log = structlog.get_logger("process")


def log_fault(event: str, error: BaseException | None, **fields: str) -> None:
    """One error line."""
    where = "".join(traceback.format_tb(error.__traceback__)) if error else ""
    log.error(event, error=type(error).__name__, where=where, **fields)
