"""Jobs: the Prefer header, the body, the next step of an open job, batched writes, a session, and the document of a result."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.http.preference import prefers_async
from gateway.jobs import inbox as jobs_inbox
from gateway.jobs.documents import job_result
from gateway.jobs.inbox import KEEP_S, OFFER_EVERY_S, JobInbox
from gateway.jobs.job_end import end_of, end_without_reply
from gateway.jobs.next_step import GRACE_S, JobStep, next_step
from gateway.jobs.reconciler import WRITE_BYTES, WRITE_ROWS, write_groups
from gateway.jobs.store import MAX_PENDING, CallBatcher
from gateway.jobs.submit import read_job
from ledger import jobs as ledger_jobs
from ledger.jobs import NEWS_S, UNTRIED, JobEnd, JobRow, JobSession, StoreUnavailable
from scheduler.errors import RequestError
from scheduler.protocol.replies import Reply
from scheduler.protocol.request_status import RequestStatus

URL = "https://example.com/hook"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        *[([line], True) for line in ("Respond-Async", "respond-async, wait=10", "wait=10,respond-async")],
        *[([line], True) for line in ("respond-async; a=b", 'respond-async=""')],
        (["wait=10", "respond-async"], True),
        (['respond-async="x"', "respond-async"], False),  # the first of two counts
        *[([line], False) for line in ("respond-async=1", "respond-asynchronously", "wait=respond-async", "", ",;=,")],
        ([], False),
    ],
)
def test_the_preference_for_an_asynchronous_response(lines: list[str], expected: bool) -> None:
    """`Prefer` is read as in RFC 7240, and is never an error."""
    assert prefers_async(CIMultiDictProxy(CIMultiDict([("Prefer", line) for line in lines]))) is expected


@pytest.mark.parametrize(
    ("raw", "text", "options"),
    [
        (b'{"input": "callback_url"}', "callback_url", (None, False)),
        (b'{"input": "a", "callback_url": null}', "a", (None, False)),
        (b'{"input": "a", "callback_url": "https://example.com/hook", "model": "m"}', "a", (URL, False)),
        (b'{"input": "a", "callback\\u005furl": "https://example.com/hook"}', "a", (URL, False)),
        (b'{"input": "a", "priority": "background"}', "a", (None, False)),
        (b'{"input": "a", "callback_url": "https://example.com/hook", "priority": "interactive"}', "a", (URL, True)),
        (b'{"input": "a", "pr\\u0069ority": "interactive"}', "a", (None, True)),
    ],
)
def test_the_body_of_a_job(raw: bytes, text: str, options: tuple[str | None, bool]) -> None:
    """That of a synchronous request, with a URL and a priority if it has them."""
    body, found = read_job(raw, 1000)

    assert (body.input, found) == (text, options)


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"input": "a", "callback_url": 7}', "callback_url"),
        (b'{"input": "a", "priority": "high"}', "priority"),
        (b'{"input": "a", "priority": null}', "priority"),
        (b'{"input": "a", "callback_url": "x", "callback_url": "y"}', "callback_url"),
        (b'{"input": "", "callback_url": "x"}', "input"),
        (b'{"input": "a", "callback_url": "x", "parameters": {"a": 1, "a": 2}}', "a"),
        (b'{"input": "a", "callback_url": "x", "parameters": {"a": {}}}', "parameters"),
        (b'{"input": "a", "callback": "x"}', "callback"),
        (b'{"callback_url": "x"}', "input"),
    ],
)
def test_a_bad_body_is_rejected_with_its_field(raw: bytes, param: str) -> None:
    """By the rules of synchronous requests."""
    with pytest.raises(RequestError) as error:
        read_job(raw, 1000)

    assert error.value.param == param


def reply(request_id: str = "r1", output: str = "olleh", *, state: str = "completed", code: str = "") -> Reply:
    return Reply(request_id, "c1", "", state, code, 1, 2.0, "b1", 8, "w1", 3.0, 11, "v1", output)


LOST = RequestStatus("")
QUEUED, RUNNING = RequestStatus("queued"), RequestStatus("processing")
CLOSED = RequestStatus("failed", "no_capacity")  # A cancellation that arrived before its admission.
DONE = RequestStatus("completed", "", reply())
LATE = -GRACE_S


@pytest.mark.parametrize(
    ("left_s", "status", "step"),
    [
        (500.0, QUEUED, JobStep.WAIT),
        (500.0, RUNNING, JobStep.WAIT),
        (500.0, LOST, JobStep.AGAIN),
        (500.0, None, JobStep.WAIT),  # Redis does not respond
        (500.0, DONE, JobStep.WRITE),
        (500.0, CLOSED, JobStep.GIVE_UP),
        (0.05, LOST, JobStep.WAIT),  # too late for another try
        (-1.0, RUNNING, JobStep.WAIT),  # Redis ends it by itself
        (-1.0, LOST, JobStep.WAIT),
        (-1.0, None, JobStep.WAIT),
        (LATE, QUEUED, JobStep.EXPIRE),
        (LATE, RUNNING, JobStep.EXPIRE),
        (LATE, LOST, JobStep.FAIL),
        (LATE, None, JobStep.FAIL),
        (LATE, DONE, JobStep.WRITE),  # a result is kept, however late it is read
        (LATE, CLOSED, JobStep.GIVE_UP),
    ],
)
def test_the_next_step_of_an_open_job(left_s: float, status: RequestStatus | None, step: JobStep) -> None:
    """By its state in Redis and the time to its deadline."""
    assert next_step(left_s, status) is step


def test_the_stored_end_of_a_job() -> None:
    """Output and tokens; a failure always has a code."""
    assert end_of(reply()) == JobEnd("r1", "", "olleh", "c1", 11)
    failed = reply(output="", state="failed", code="poison_request")
    assert end_of(failed) == JobEnd("r1", "poison_request", "", "c1", 11)
    assert end_of(reply(output="", state="failed")).error_code == "internal_error"
    assert end_without_reply("r1", CLOSED) == JobEnd("r1", "no_capacity")
    assert end_without_reply("r1", RequestStatus("completed")).error_code == "internal_error"


def test_ends_are_written_in_groups() -> None:
    """Bounded by number and size; of two ends of a job the first is written."""
    many = [JobEnd(f"r{n}", "") for n in range(WRITE_ROWS + 1)]
    large = [JobEnd(f"r{n}", "", "x" * (WRITE_BYTES // 2 + 1)) for n in range(3)]

    assert write_groups([]) == []
    assert [len(group) for group in write_groups(many)] == [WRITE_ROWS, 1]
    assert [len(group) for group in write_groups(large)] == [1, 1, 1]
    assert write_groups([JobEnd("r1", "cancelled"), JobEnd("r1", "")]) == [[JobEnd("r1", "cancelled")]]
    assert write_groups([JobEnd("r1", "", "x" * (2 * WRITE_BYTES))])[0][0].id == "r1"


async def test_calls_that_arrive_during_a_call_share_the_next_one() -> None:
    """Each caller gets its own result or error; an error of the whole call does not affect later ones."""
    calls: list[list[int]] = []

    async def call(items: Sequence[int]) -> list[int | Exception]:
        calls.append(list(items))
        await asyncio.sleep(0)
        if 13 in items:
            raise ConnectionError
        return [ValueError(item) if item < 0 else item * 2 for item in items]

    batcher: CallBatcher[int, int] = CallBatcher(call, size=5)
    first = asyncio.create_task(batcher.run(0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    *results, bad = await asyncio.gather(*(batcher.run(n) for n in (*range(1, 9), -1)), return_exceptions=True)

    assert await first == 0
    assert results == [n * 2 for n in range(1, 9)]
    assert isinstance(bad, ValueError)
    assert [len(items) for items in calls] == [1, 5, 4]
    with pytest.raises(ConnectionError):
        await batcher.run(13)
    assert await batcher.run(5) == 10


async def test_the_number_of_pending_calls_is_bounded() -> None:
    """Further callers get an error at once; closing cancels the pending ones."""
    never = asyncio.Event()

    async def call(items: Sequence[int]) -> list[int | Exception]:
        await never.wait()
        return list(items)

    batcher: CallBatcher[int, int] = CallBatcher(call, size=1)
    tasks = [asyncio.create_task(batcher.run(n)) for n in range(MAX_PENDING + 1)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await batcher.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)

    assert Counter(map(type, results)) == {asyncio.CancelledError: MAX_PENDING, StoreUnavailable: 1}


class LiteralConnection:
    """A connection to PostgreSQL that is open until `closed`."""

    closed = False

    def is_closed(self) -> bool:
        return self.closed

    def terminate(self) -> None:
        self.closed = True


async def test_a_session_says_how_its_last_operation_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """For some seconds, and after a success only while its connection is open: an older outcome says nothing."""
    now, away, opened = 100.0, False, list[LiteralConnection]()

    async def connect(*_: Any, **__: Any) -> LiteralConnection:
        if away:
            raise ConnectionRefusedError("refused")
        opened.append(LiteralConnection())
        return opened[-1]

    async def succeeds(_: Any) -> None:
        """Nothing to do."""

    monkeypatch.setattr(ledger_jobs, "connect", connect)
    session = JobSession("postgresql://host/db", "tests", lambda: now)
    seen = [session.problem]
    await session.run(succeeds)
    seen.append(session.problem)
    opened[-1].closed = away = True
    seen.append(session.problem)
    with pytest.raises(StoreUnavailable):
        await session.run(succeeds)
    seen.append(session.problem)
    now += NEWS_S + 0.1
    seen.append(session.problem)
    away = False
    await session.run(succeeds)
    seen.append(session.problem)
    now += NEWS_S + 0.1
    seen.append(session.problem)

    failed = "PostgreSQL is not available: refused."
    assert seen == [UNTRIED, None, UNTRIED, failed, UNTRIED, None, UNTRIED]


def test_the_inbox_offers_an_end_until_it_is_written() -> None:
    """Repeatedly, since the row of the job may be inserted later, but not for ever."""
    now = 100.0
    inbox = JobInbox(lambda: now)
    inbox.resolve_all([reply("r1", "out"), None, reply("r2", "out"), reply("r1", "another")])

    assert [(end.id, end.output) for end in inbox.take()] == [("r1", "out"), ("r2", "out")]
    inbox.written(["r1", "r9"])
    assert inbox.take() == []
    now += OFFER_EVERY_S
    assert [end.id for end in inbox.take()] == ["r2"]
    now += KEEP_S + 0.1
    assert (inbox.take(), len(inbox)) == ([], 0)


def test_a_full_inbox_drops_ends_and_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By number and size; then the stored replies of all jobs are read."""
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
        ("completed", b"", None, {"status": "SUCCESS", "output": ""}),
        ("failed", None, "worker_lost", {"status": "FAILURE", "error": "worker_lost"}),
        ("failed", None, "of a newer version", {"status": "FAILURE", "error": "internal_error"}),
    ],
)
def test_the_document_of_a_result(
    status: str, output: bytes | None, code: str | None, document: dict[str, Any]
) -> None:
    """Its fields are those of the contract and no others; the error has the form of all errors."""
    row = JobRow("r1", "c1", status, output, code, "default", 11, 20.004, "tiny", "free")
    found = msgspec.to_builtins(job_result(row))
    if row.ended:
        assert found.pop("metadata") == {"tokens_used": 11, "latency_ms": 20.0, "model": "tiny", "tier": "free"}
    if "error" in found:
        assert set(found["error"]) == {"message", "type", "param", "code", "request_id"}
        found["error"] = found["error"]["code"]

    assert found == document
