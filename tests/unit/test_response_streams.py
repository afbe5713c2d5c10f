"""Streams of background responses: their events, the shared wait for jobs, and the bounds of one customer."""

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eventually import eventually
from gateway.http.response import encode_json
from gateway.http.sse import EventStream
from gateway.translations.response_document import started
from gateway.translations.response_store import CustomerTurns, ResponseStore
from gateway.translations.response_streams import JobEnds, ResponseStreams, closing_events, opening_events
from gateway.translations.responses import read_responses
from ledger.responses import ResponseRow
from scheduler.errors import ErrorCode, RequestError
from scheduler.request_id import new_request_id

BODY = read_responses(b'{"model": "m", "input": "hi", "background": true, "stream": true}', 1000)
DOCUMENT = started(new_request_id(), "m", BODY, "queued")


def row(output: bytes | None = None, error: str | None = None) -> ResponseRow:
    return ResponseRow(DOCUMENT.id, "c", encode_json(DOCUMENT), b"[]", False, output, error, "stop", 12, 5, lost=False)


def names(events: Any) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


@pytest.mark.parametrize(
    ("ended", "last", "status"),
    [
        (row(b"hello"), "completed", "completed"),
        (row(error="worker_lost"), "failed", "failed"),
        (row(error="cancelled"), "failed", "cancelled"),
    ],
)
def test_events(ended: ResponseRow, last: str, status: str) -> None:
    """A response is queued, runs, and ends with its whole text, or failed; its model's server is asked for no stream."""
    events = list(closing_events(ended))

    assert [event["response"].status for event in opening_events(DOCUMENT)] == ["queued", "queued", "in_progress"]
    assert names(opening_events(DOCUMENT)) == ["created", "queued", "in_progress"]
    assert names(events)[-1] == last
    assert events[-1]["response"].status == status
    assert [event["delta"] for event in events if event["type"].endswith("text.delta")] == ["hello"][: len(events) - 1]
    assert not BODY.stream


class Asked:
    """The calls of the poll, and the jobs that run."""

    def __init__(self) -> None:
        self.running = {"a", "b"}
        self.calls: list[list[str]] = []
        self.error: RequestError | None = None

    async def __call__(self, ids: Sequence[str]) -> set[str]:
        self.calls.append(list(ids))
        if self.error is not None:
            raise self.error
        return self.running


async def test_one_poll_for_all_streams() -> None:
    """Each wait ends with its job. Without waits nothing is asked."""
    asked = Asked()
    ends = JobEnds(asked, every_s=0.001)
    waits = [asyncio.create_task(ends.wait(name)) for name in ("a", "a", "b", "c")]
    await waits[3]
    await eventually(lambda: asked.calls[-1] == ["a", "b"], "only those that run are asked for")
    asked.running = {"b"}
    await asyncio.gather(*waits[:2])
    waits[2].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits[2]
    await eventually(lambda: ends._polling is None, "the poll has ended")
    calls = len(asked.calls)
    asked.running = set()
    await ends.wait("d")

    assert asked.calls[calls:] == [["d"]]


async def test_waits_end_with_an_error() -> None:
    """When PostgreSQL does not respond for long, and when the gateway shuts down."""
    asked = Asked()
    asked.error = RequestError(ErrorCode.CATALOG_UNAVAILABLE)
    ends = JobEnds(asked, every_s=0.0)
    with pytest.raises(RequestError) as caught:
        await ends.wait("a")
    assert caught.value.code is ErrorCode.CATALOG_UNAVAILABLE
    asked.error = None
    wait = asyncio.create_task(ends.wait("a"))
    await eventually(lambda: "a" in ends._waiting, "the stream waits")
    ends.close()
    for pending in (wait, ends.wait("a")):
        with pytest.raises(RequestError) as caught:
            await pending
        assert caught.value.code is ErrorCode.DRAINING


class Written:
    """What is written to a client."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.abort = self.ended = False

    def start(self) -> None:
        pass

    def send(self, events: bytes) -> None:
        self.events += [json.loads(each.partition(b"\ndata: ")[2]) for each in events.split(b"\n\n") if each]

    async def drain(self) -> None:
        pass

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (RequestError(ErrorCode.CATALOG_UNAVAILABLE), "catalog_unavailable"),
        (ValueError("junk"), "internal_error"),
        (None, "draining"),
    ],
)
async def test_a_stream_that_cannot_be_finished_is_incomplete(found: Exception | None, code: str) -> None:
    """Its last event is the error, with the number after which the client continues, and its body has no end."""

    async def find(response_id: str, customer_id: str) -> ResponseRow:
        assert found is not None
        raise found

    asked, written = Asked(), Written()
    asked.running = set()
    streams = ResponseStreams(cast("ResponseStore", SimpleNamespace(running=asked, find=find)))
    if found is None:
        streams.ends.close()
    await streams.of_new(DOCUMENT, "c")._play(cast("EventStream", written))

    assert [event["type"] for event in written.events[-2:]] == ["response.in_progress", "error"]
    assert [event["sequence_number"] for event in written.events] == [0, 1, 2, 2]
    assert (written.events[-1]["code"], written.abort, written.ended, streams.count) == (code, True, False, {})


async def test_turns_of_a_customer() -> None:
    """One at a time for each customer, whose next ones wait, up to a bound."""
    turns, order, release = CustomerTurns(2), list[str](), asyncio.Event()

    async def read(customer: str) -> None:
        async with turns.turn(customer):
            order.append(customer)
            if customer == "a":
                await release.wait()

    first, second = asyncio.create_task(read("a")), asyncio.create_task(read("a"))
    await eventually(lambda: turns._turns.get("a") is not None and turns._turns["a"].count == 2, "both wait")
    with pytest.raises(RequestError) as caught:
        await read("a")
    await read("b")
    assert order == ["a", "b"]
    release.set()
    await asyncio.gather(first, second)

    assert caught.value.code is ErrorCode.RATE_LIMIT_EXCEEDED
    assert order == ["a", "b", "a"]
    assert turns._turns == {}
