"""Logs internal errors with type and traceback, without message and locals, which may contain client data or secrets."""

import traceback

import structlog

log = structlog.get_logger("process")


def log_fault(event: str, error: BaseException | None, **fields: str) -> None:
    """Write one error line."""
    where = "".join(traceback.format_tb(error.__traceback__)) if error else ""
    log.error(event, error=type(error).__name__, where=where, **fields)


class LoggedFaults:
    """A block that no unexpected exception may leave, such as one turn of a loop that must go on: it is logged instead.

    Expected exceptions are handled inside of the block, or by `suppress` after this in the same `with`.
    """

    def __init__(self, event: str, **fields: str) -> None:
        self._event = event
        self._fields = fields

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, Exception):
            return False
        log_fault(self._event, error, **self._fields)
        return True
