"""Looks behind a door that everybody may knock at: shared, kept, few at once, bounded in time and memory."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from eventually import eventually
from gateway.api import account
from gateway.api.account import CachedLookup, LookupResult

FAILED = "It cannot be looked up right now."


class Source:
    """Answers when it is let go; counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.free = asyncio.Event()
        self.now = 0.0

    async def look(self) -> int:
        self.asked += 1
        await self.free.wait()
        return self.asked

    async def break_down(self) -> int:
        self.asked += 1
        raise OSError("a secret")


@pytest.fixture
def source() -> Source:
    """A source that makes everybody wait."""
    return Source()


@pytest.fixture
async def looks(source: Source) -> AsyncIterator[CachedLookup[int]]:
    """Two at once, kept for ten seconds, failures for two, by a clock that the test moves."""
    made: CachedLookup[int] = CachedLookup(
        FAILED, keep_s=10.0, sorry_s=2.0, timeout_s=0.2, at_once=2, clock=lambda: source.now
    )
    yield made
    await made.close()


async def test_those_who_ask_for_the_same_share_one_look(looks: CachedLookup[int], source: Source) -> None:
    """Ten ask while the first look is under way; later ones are told what is kept, until it is too old."""
    asking = [asyncio.create_task(looks.find("a", source.look)) for _ in range(10)]
    await eventually(lambda: source.asked, "the look has begun")
    source.free.set()

    assert set(await asyncio.gather(*asking)) == {LookupResult(1)}
    source.now = 9.9
    assert await looks.find("a", source.look) == LookupResult(1)
    source.now = 10.1
    assert await looks.find("a", source.look) == LookupResult(2)


async def test_who_leaves_does_not_take_the_look_along(looks: CachedLookup[int], source: Source) -> None:
    """The first to ask goes away; the second still gets the answer."""
    first = asyncio.create_task(looks.find("a", source.look))
    await eventually(lambda: source.asked, "the look has begun")
    second = asyncio.create_task(looks.find("a", source.look))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    source.free.set()

    assert await second == LookupResult(1)


async def test_only_so_many_are_under_way_at_once(looks: CachedLookup[int], source: Source) -> None:
    """The third name is told to come back, and is looked for when there is room."""
    asking = [asyncio.create_task(looks.find(name, source.look)) for name in "ab"]
    await eventually(lambda: source.asked == 2, "two are under way")
    third = await looks.find("c", source.look)
    source.free.set()
    await asyncio.gather(*asking)

    assert (third.value, third.problem is not None, source.asked) == (None, True, 2)
    assert await looks.find("c", source.look) == LookupResult(3)


async def test_what_fails_or_hangs_is_told_in_our_words_and_not_asked_at_once_again(
    looks: CachedLookup[int], source: Source
) -> None:
    """The fault's own words stay inside; for two seconds nobody runs into it again."""
    assert await looks.find("broken", source.break_down) == LookupResult(None, FAILED)
    assert await looks.find("broken", source.break_down) == LookupResult(None, FAILED)
    assert source.asked == 1
    source.now = 2.1
    assert await looks.find("broken", source.break_down) == LookupResult(None, FAILED)
    assert source.asked == 2
    assert await looks.find("hangs", source.look) == LookupResult(None, FAILED)


async def test_what_is_kept_is_bounded(
    looks: CachedLookup[int], source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of names drops the oldest."""
    monkeypatch.setattr(account, "MAX_KEPT", 2)
    source.free.set()
    for name in "abcd":
        await looks.find(name, source.look)

    assert len(looks) == 2
    assert await looks.find("d", source.look) == LookupResult(4)
