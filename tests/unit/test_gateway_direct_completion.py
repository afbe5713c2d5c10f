"""Outcomes in direct mode: each request that was accepted gets an audit record that matches its response."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from direct_parts import waiting
from eventually import eventually
from gateway.direct.audit import DirectAudit
from gateway.direct.completion import DirectCompletion
from gateway.direct.queue import DirectEntry
from gateway.direct.spool import to_line
from gateway.direct.spool_writer import PAIR_BYTES
from gateway.inference.audit_pairs import SpoolEntry, audit_pair
from gateway.inference.deadlines import Cancellations
from gateway.inference.pending import PendingRequests
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import Verdict
from scheduler.protocol.batches import Outcome
from scheduler.protocol.replies import Reply
from scheduler.request_id import new_request_id
from scheduler.states import Admission
from scheduler.tasks import end_all


class UnavailableRedis:
    """Is not called while Redis is unavailable."""

    async def adopt(self, pairs: Sequence[SpoolEntry]) -> None:
        raise NotImplementedError

    async def cancel(self, requests: Sequence[tuple[str, ErrorCode]]) -> list[Reply | None]:
        raise NotImplementedError


class Setup:
    """Completion over a real spool that is not merged."""

    def __init__(self, directory: Path) -> None:
        redis = UnavailableRedis()
        self.audit = DirectAudit(
            directory, "g1", 1 << 20, redis, redis_available=lambda: False, remember=lambda _: None
        )
        self.audit.open()
        self.completion = DirectCompletion("g1", self.audit, Cancellations(redis), lambda: 1.0)

    def enter(self, customer: str = "c") -> DirectEntry:
        entry = DirectEntry(waiting(new_request_id(), customer_id=customer), 1, 0.0)
        self.completion.add(entry)
        return entry

    async def accepted(self) -> DirectEntry:
        """A request that was sent to a worker, and returned unserved."""
        entry = self.enter()
        assert await self.completion.record_accepted([entry]) == [entry]
        return entry

    def ran(self, entry: DirectEntry) -> None:
        self.completion.ran(entry, Outcome(entry.id, "", 1.0, 1, "v1", "output"), "w1", 1)

    async def entries(self) -> list[SpoolEntry]:
        """All entries on the disk, after pending writes. Read in the thread of the files, which may still write late records."""
        await eventually(lambda: not len(self.completion), "all is written")
        return await asyncio.get_running_loop().run_in_executor(self.audit._thread, self._read)

    def _read(self) -> list[SpoolEntry]:
        self.audit.spool.rotate()
        return [each for path in self.audit.spool.to_merge() for each in self.audit.spool.read(path, 0, 1000).entries]

    async def ended(self) -> list[tuple[str, str, bool]]:
        return [(end.state, end.error_code, end.delivered) for _, end in await self.entries() if end]


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    made = Setup(tmp_path)
    task = asyncio.create_task(made.audit.writer.run())
    yield made
    await end_all([task])
    await made.audit.close()


@pytest.mark.parametrize("accepted", [False, True])
async def test_a_shed_request_has_a_record_if_it_was_accepted(setup: Setup, accepted: bool) -> None:
    """It gets its response after the record is on the disk; a request that was not accepted leaves no record."""
    entry = await setup.accepted() if accepted else setup.enter()
    setup.completion.reject(entry, ErrorCode.SHED_FOR_PRIORITY)
    assert entry.pending.done is not accepted

    assert await setup.ended() == ([("failed", "shed_for_priority", True)] if accepted else [])
    assert entry.pending.outcome is ErrorCode.SHED_FOR_PRIORITY
    assert setup.audit.spool.reserved == 0


async def test_a_late_verdict_of_redis_is_recorded(setup: Setup) -> None:
    """Redis rejected a request that direct mode had taken over: that is the response, and so is the record."""
    unsent, sent = setup.enter(), await setup.accepted()
    for entry in (unsent, sent):
        entry.pending.finish(Verdict(Admission.QUEUE_FULL))
    setup.completion.sweep(1.0)

    assert await setup.ended() == [("failed", "queue_full", True)]
    assert {accepted.id for accepted, _ in await setup.entries()} == {sent.id}


async def test_a_request_that_redis_accepted_is_left_to_it(setup: Setup) -> None:
    """No record, no response and no reserved space, also if it is given up while its acceptance is written."""
    sent, leaving = await setup.accepted(), setup.enter()
    writing = asyncio.create_task(setup.completion.record_accepted([leaving]))
    await asyncio.sleep(0)
    for entry in (sent, leaving):
        entry.pending.accepted = True
        setup.completion.give_up(entry, ErrorCode.WORKER_LOST)

    assert await writing == []
    assert await setup.ended() == []
    assert [entry.pending.done for entry in (sent, leaving)] == [False, False]
    assert setup.audit.spool.reserved == 0


async def test_an_outcome_that_is_being_written_is_the_response(setup: Setup) -> None:
    """Redis ends the request as well, before the disk has the output: the client gets what the audit will have."""
    pending_requests, entry = PendingRequests(), await setup.accepted()
    entry.pending.accepted = True
    pending_requests.add(entry.pending)
    setup.ran(entry)
    sub = entry.pending.submission
    expired = Reply(entry.id, sub.customer_id, sub.nonce, "failed", "queue_timeout", 0, 1.0, "", 0, "", 0, 0, "", "")

    assert not pending_requests.resolve(expired)
    assert await setup.ended() == [("completed", "", True)]
    assert entry.pending.outcome.output == "output"


async def test_a_deadline_during_the_write_is_recorded_after_it(setup: Setup) -> None:
    """The client got 504 while the result was written, so the last record says 504."""
    entry = await setup.accepted()
    setup.ran(entry)
    entry.pending.finish(ErrorCode.DEADLINE_EXCEEDED)

    async def both() -> bool:
        return len(await setup.ended()) == 2

    await eventually(both, "both are recorded")
    assert await setup.ended() == [("completed", "", True), ("failed", "deadline_exceeded", True)]


async def test_concurrency_is_counted_by_customer_until_the_end(setup: Setup) -> None:
    """Whatever the outcome, and once for each request."""
    other = setup.enter("other")
    setup.completion.add(other)
    cancelled = [setup.enter() for _ in range(1000)]
    sent = [await setup.accepted() for _ in range(5)]
    assert [setup.completion.of_customer(name) for name in ("c", "other", "nobody")] == [1005, 1, 0]
    for entry in (*cancelled, sent[0]):
        entry.pending.cancel()
        entry.pending.gone = True
    sent[1].pending.accepted = True
    setup.completion.give_up(sent[1], ErrorCode.WORKER_LOST)
    for _ in range(2):
        setup.completion.reject(sent[2], ErrorCode.SHED_FOR_PRIORITY)
    setup.ran(sent[3])
    sent[4].pending.deadline = 0.0
    setup.completion.sweep(1.0)
    setup.completion.sweep(1.0)

    assert [setup.completion.of_customer(name) for name in ("c", "other")] == [0, 1]
    assert (len(setup.completion._open), list(setup.completion._open._by_customer)) == (1, ["other"])
    setup.completion.give_up(other, ErrorCode.WORKER_LOST)
    await setup.entries()


async def test_an_acceptance_is_written_once(setup: Setup) -> None:
    """Of two connections that record it the first was cancelled; the second waits for the same write."""
    entry = setup.enter()
    first = asyncio.create_task(setup.completion.record_accepted([entry]))
    await asyncio.sleep(0)
    first.cancel()

    assert await setup.completion.record_accepted([entry]) == [entry]
    assert await setup.completion.record_accepted([entry]) == [entry]
    setup.completion.give_up(entry, ErrorCode.WORKER_LOST)
    assert [end and end.error_code for _, end in await setup.entries()] == [None, "worker_lost"]


async def test_a_request_that_ends_during_the_write_is_not_sent(setup: Setup) -> None:
    """Its outcome is recorded after its acceptance, and no worker is called."""
    entry = setup.enter()
    writing = asyncio.create_task(setup.completion.record_accepted([entry]))
    await asyncio.sleep(0)
    setup.completion.give_up(entry, ErrorCode.DEADLINE_EXCEEDED)

    assert await writing == []
    assert [end and end.error_code for _, end in await setup.entries()] == [None, "deadline_exceeded"]


@pytest.mark.parametrize(
    ("code", "share_ms", "cost_ms"),
    [("", 2.5, 2.5), ("", 0.0, 10.0), ("invalid_request", 2.5, 2.5), ("invalid_output", 2.5, -1.0)],
)
async def test_a_request_pays_its_share_of_the_batch(setup: Setup, code: str, share_ms: float, cost_ms: float) -> None:
    """An equal one if an older worker reports none; nothing if the service failed it."""
    entry = await setup.accepted()

    setup.completion.ran(entry, Outcome(entry.id, code, 20.0, 1, "v1", "output", cost_ms=share_ms), "w1", 2)

    assert [end.cost_ms for _, end in await setup.entries() if end] == [cost_ms]


def test_the_largest_record_fits_into_its_reserved_space() -> None:
    """With names of the maximum length."""
    largest = waiting(
        new_request_id(), tier="t" * 64, customer_id="c" * 36, api_key_id="k" * 36, model="m" * 200, trace_id="a" * 32
    )
    reply = Reply(
        largest.id,
        "c",
        "n",
        "failed",
        "deadline_exceeded",
        3,
        1 / 3,
        "b" * 36,
        8,
        "w" * 200,
        1 / 3,
        9999,
        "",
        "",
        cost_ms=1 / 3,
    )

    assert len(to_line(audit_pair("g" * 200, largest, reply, 1 / 3, "direct"))) <= PAIR_BYTES
