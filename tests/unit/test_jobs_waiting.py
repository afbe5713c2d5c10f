"""Coalesced calls, the inbox of replies, and the document that a customer reads."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from gateway.jobs import inbox as jobs_inbox
from gateway.jobs.inbox import KEEP_S, OFFER_EVERY_S, JobInbox
from gateway.jobs.results import job_result
from gateway.jobs.store import MAX_PENDING, CallBatcher
from ledger.jobs import StoreUnavailable
from scheduler.protocol.replies import Reply


def reply(request_id: str, output: str = "out") -> Reply:
    """A stored reply."""
    return Reply(request_id, "c1", "", "completed", "", 1, 2.0, "b1", 8, "w1", 3.0, 11, "v1", output)


async def test_those_who_come_meanwhile_share_the_next_call() -> None:
    """Three calls for ten items of which two fit at first; everybody has the own answer."""
    groups: list[list[int]] = []

    async def call(items: Sequence[int]) -> list[int | Exception]:
        groups.append(list(items))
        await asyncio.sleep(0)
        return [item * 2 for item in items]

    together: CallBatcher[int, int] = CallBatcher(call, size=5)
    first = asyncio.create_task(together.run(0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answers = await asyncio.gather(*(together.run(n) for n in range(1, 10)))

    assert await first == 0
    assert answers == [n * 2 for n in range(1, 10)]
    assert [len(group) for group in groups] == [1, 5, 4]


async def test_a_failure_is_told_to_those_of_the_call() -> None:
    """One of the items, or the whole call; whoever asks later is served."""

    async def call(items: Sequence[int]) -> list[int | Exception]:
        if 13 in items:
            raise ConnectionError
        return [ValueError(item) if item < 0 else item for item in items]

    together: CallBatcher[int, int] = CallBatcher(call)
    found = await asyncio.gather(together.run(-1), together.run(1), return_exceptions=True)

    assert [type(each) for each in found] == [ValueError, int]
    with pytest.raises(ConnectionError):
        await together.run(13)
    assert await together.run(5) == 5


async def test_too_many_are_turned_away() -> None:
    """Memory is bounded, and closing ends who waits."""
    never = asyncio.Event()

    async def call(items: Sequence[int]) -> list[int | Exception]:
        await never.wait()
        return list(items)

    together: CallBatcher[int, int] = CallBatcher(call, size=1)
    asking = [asyncio.create_task(together.run(n)) for n in range(MAX_PENDING + 1)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await together.close()
    ended = await asyncio.gather(*asking, return_exceptions=True)

    assert Counter(map(type, ended)) == {asyncio.CancelledError: MAX_PENDING, StoreUnavailable: 1}


def test_the_inbox_offers_until_it_is_written() -> None:
    """Once at first, then now and then, since a row may be a moment late; not for ever."""
    now = 100.0
    inbox = JobInbox(lambda: now)
    inbox.resolve_all([reply("r1"), None, reply("r2"), reply("r1", "another")])

    assert [(end.id, end.output) for end in inbox.take()] == [("r1", "out"), ("r2", "out")]
    inbox.written(["r1", "r9"])
    assert inbox.take() == []
    now += OFFER_EVERY_S
    assert [end.id for end in inbox.take()] == ["r2"]
    now += KEEP_S + 0.1
    assert inbox.take() == []
    assert len(inbox) == 0


def test_an_inbox_that_is_full_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """By number and by size: then all stored replies are looked at."""
    monkeypatch.setattr(jobs_inbox, "MAX_ENDS", 2)
    inbox = JobInbox(lambda: 1.0)
    inbox.resolve_all([reply("r1"), reply("r2")])
    assert not inbox.lost
    inbox.resolve_all([reply("r3")])
    assert (inbox.lost, len(inbox)) == (True, 2)
    inbox.clear()
    assert not inbox.lost
    monkeypatch.setattr(jobs_inbox, "MAX_BYTES", 5)
    inbox.resolve_all([reply("r1", "12345"), reply("r2", "6")])

    assert (inbox.lost, len(inbox)) == (True, 1)


@pytest.mark.parametrize(
    ("status", "output", "code", "document"),
    [
        ("queued", None, None, {"status": "PENDING"}),
        ("processing", None, None, {"status": "PENDING"}),
        ("completed", b"out", None, {"status": "SUCCESS", "output": "out"}),
        ("completed", b"", None, {"status": "SUCCESS", "output": ""}),
    ],
)
def test_the_document(status: str, output: bytes | None, code: str | None, document: dict[str, object]) -> None:
    """Its fields are those of the contract and no others."""
    assert msgspec.to_builtins(job_result("r1", status, output, code)) == document


@pytest.mark.parametrize(("code", "told"), [("worker_lost", "worker_lost"), ("of a newer version", "internal_error")])
def test_the_document_of_a_failure(code: str, told: str) -> None:
    """The error has its usual form; a code that is not known here is ours."""
    document = msgspec.to_builtins(job_result("r1", "failed", None, code))

    assert document["status"] == "FAILURE"
    assert set(document["error"]) == {"message", "type", "param", "code", "request_id"}
    assert document["error"]["code"] == told
