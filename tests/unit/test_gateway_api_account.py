"""`GET /v1/me` and cached lookups: limits and what is left of them; lookups that are shared and bounded."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from customer_limits import remaining
from eventually import eventually
from gateway.api import cached_lookup
from gateway.api.account_document import limits_document, remaining_document
from gateway.api.cached_lookup import CachedLookup, LookupResult
from identities import identity
from ratelimit.limits import Level, effective

FAILED = "It cannot be looked up right now."


class Source:
    """A lookup that waits until it is released, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.released = asyncio.Event()
        self.now = 0.0

    async def look(self) -> int:
        self.calls += 1
        await self.released.wait()
        return self.calls

    async def fail(self) -> int:
        self.calls += 1
        raise OSError("a secret")


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
async def lookups(source: Source, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CachedLookup[int]]:
    """Two at once, two kept for ten seconds, failures for two, on the source's clock."""
    monkeypatch.setattr(cached_lookup, "MAX_KEPT", 2)
    made: CachedLookup[int] = CachedLookup(FAILED, keep_s=10.0, timeout_s=0.2, max_running=2, clock=lambda: source.now)
    yield made
    await made.close()


async def test_concurrent_lookups_are_shared(lookups: CachedLookup[int], source: Source) -> None:
    """The result is kept for ten seconds. A client that leaves does not cancel the lookup for the others."""
    pending = [asyncio.create_task(lookups.find("a", source.look)) for _ in range(10)]
    await eventually(lambda: source.calls, "the lookup has begun")
    pending[0].cancel()
    await asyncio.gather(pending[0], return_exceptions=True)
    source.released.set()

    assert set(await asyncio.gather(*pending[1:])) == {LookupResult(1)}
    results = []
    for source.now in (9.9, 10.1):
        results.append(await lookups.find("a", source.look))
    assert results == [LookupResult(1), LookupResult(2)]


async def test_the_number_of_lookups_is_bounded(lookups: CachedLookup[int], source: Source) -> None:
    """A third one at the same time is rejected; of the results the oldest is dropped."""
    pending = [asyncio.create_task(lookups.find(name, source.look)) for name in "ab"]
    await eventually(lambda: source.calls == 2, "two have begun")
    third = await lookups.find("c", source.look)
    source.released.set()
    await asyncio.gather(*pending)

    assert (third.value, third.problem is not None, source.calls) == (None, True, 2)
    assert await lookups.find("c", source.look) == LookupResult(3)
    assert len(lookups) == 2
    assert await lookups.find("c", source.look) == LookupResult(3)


async def test_a_failed_lookup_is_not_repeated_for_two_seconds(lookups: CachedLookup[int], source: Source) -> None:
    """The response does not contain the error. A lookup that takes too long fails as well."""
    for source.now, calls in ((0.0, 1), (0.0, 1), (2.1, 2)):
        assert await lookups.find("broken", source.fail) == LookupResult(None, FAILED)
        assert source.calls == calls
    assert await lookups.find("hangs", source.look) == LookupResult(None, FAILED)


def test_base_and_effective_limits() -> None:
    """Null where there is no limit, and a reason where they differ. A smaller limit of the key is the request limit."""
    customer = identity(tokens_per_minute=None, max_concurrency=0)
    document = limits_document(customer, effective(customer, 0.25), 0.25)
    key = identity(tokens_per_minute=600, key_rate=1.0, key_burst=3.0)
    full = limits_document(key, effective(key), 1.0)

    base = {"requests_per_second": 2.0, "burst": 10.0, "tokens_per_minute": None, "max_concurrency": None}
    assert document["base"] == base
    assert document["effective"] == base | {"requests_per_second": 0.5, "burst": 2.5}
    assert (document["factor"], "reason" in document, "reason" in full) == (0.25, True, False)
    assert full["effective"] == full["base"]
    assert full["base"] == {"requests_per_second": 1.0, "burst": 3.0, "tokens_per_minute": 600, "max_concurrency": 5}


def test_remaining_amounts_are_whole_numbers() -> None:
    """Not below zero, not above the limit, and null for quotas of unknown state; of money and GPU time fractions."""
    limits = effective(identity(tokens_per_minute=600, quotas=(("1day", 9), ("1month:usd@k1", 90 * 10**9))))
    left = remaining(11.9, tokens=Level(-5.0, 0), in_use=2, quotas=((3, 1000), (40_250_000_000, 9000)))

    assert remaining_document(limits, left) == {
        "requests": 10,
        "tokens": 0,
        "concurrency": 3,
        "quotas": [
            {"quota": "day", "key_id": None, "unit": "requests", "amount": 9, "remaining": 3, "reset_ms": 1000},
            {"quota": "month", "key_id": "k1", "unit": "usd", "amount": 90.0, "remaining": 40.25, "reset_ms": 9000},
        ],
    }
    unknown = remaining_document(limits, remaining(1.0, tokens=Level(0.0, 0)))
    assert [quota["remaining"] for quota in unknown["quotas"]] == [None, None]
