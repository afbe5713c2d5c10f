"""Blocks that no unexpected exception may leave."""

import asyncio
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from scheduler.fault_log import LoggedFaults


def test_an_unexpected_exception_is_logged_and_does_not_leave_the_block() -> None:
    """With its type and place, without its message. An expected one is not logged, and a cancellation leaves the block."""
    with capture_logs() as lines:
        for error in (ValueError("a secret"), KeyError("expected")):
            with LoggedFaults("turn failed", pool="a"), suppress(KeyError):
                raise error
        with pytest.raises(asyncio.CancelledError), LoggedFaults("turn failed"):
            raise asyncio.CancelledError

    (line,) = lines
    assert (line["event"], line["error"], line["pool"]) == ("turn failed", "ValueError", "a")
    assert __file__ in line["where"]
    assert "a secret" not in str(line)
