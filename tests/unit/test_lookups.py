"""Look-ups of the dashboard: what they show when a part cannot be read, and what they do not search for."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest

from gateway.operations import lookups
from gateway.operations.audited_transaction import AuditedTransaction
from gateway.operations.lookups import Lookups
from ledger.alerts import CustomerAlert
from ledger.audit.queries import FailedRequest
from scheduler.errors import RequestError


@asynccontextmanager
async def connected() -> AsyncIterator[Any]:
    yield None


async def test_failed_requests_are_shown_if_the_gpu_time_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The query of the GPU time reads the rows of all customers, so that it reaches its time limit first."""
    rows: list[FailedRequest] = []

    async def failed(*_: object) -> list[FailedRequest]:
        return rows

    async def too_late(*_: object) -> None:
        raise asyncpg.QueryCanceledError("canceling statement due to statement timeout")

    async def alerts(*_: object) -> list[CustomerAlert]:
        return []

    monkeypatch.setattr(lookups, "customer_alerts", alerts)
    monkeypatch.setattr(lookups, "find_failed", failed)
    monkeypatch.setattr(lookups, "find_gpu_share", too_late)
    parts: Any = SimpleNamespace(transaction=AuditedTransaction(connected))
    not_read: list[str] = []

    gpu, found, raised = await Lookups(parts)._from_audit("c1", not_read)

    assert (gpu, found is rows, raised) == (None, True, [])
    assert [sentence.startswith("The audit: GPU time (") for sentence in not_read] == [True]


@pytest.mark.parametrize("name", ["acme", "req_", "a"])
async def test_an_invalid_id_is_not_searched_for(name: str) -> None:
    """One of a few bytes would be searched for in, and decode, each stored rejection."""

    async def search(_: str) -> None:
        pytest.fail("searched")

    parts: Any = SimpleNamespace(internal=SimpleNamespace(find=search), find_rejection=search)
    with pytest.raises(RequestError, match="There is no request with this id"):
        await Lookups(parts)._request(name)
