"""Who has to go though the audit has his beginning: he gets his end there, which says what he was told."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from direct_parts import waiting
from eventually import eventually
from gateway.direct.completion import DirectCompletion
from gateway.direct.queue import DirectEntry
from gateway.direct.spool import to_line
from gateway.direct.spool_tasks import PAIR_BYTES, DirectAudit
from gateway.inference.deadlines import Cancellations
from gateway.inference.pending import PendingRequests
from gateway.inference.recovery import SpoolEntry, audit_pair
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import Verdict
from scheduler.protocol.batches import Outcome
from scheduler.protocol.replies import Reply
from scheduler.request_id import new_request_id
from scheduler.states import Admission
from scheduler.tasks import end_all


class Nobody:
    """A Redis that is away."""

    async def adopt(self, pairs: Sequence[SpoolEntry]) -> None:
        raise NotImplementedError

    async def cancel(self, requests: Sequence[tuple[str, ErrorCode]]) -> list[Reply | None]:
        raise NotImplementedError


class Desk:
    """Ends over a real spool that is never merged."""

    def __init__(self, directory: Path) -> None:
        self.audit = DirectAudit(
            directory, "g1", 1 << 20, Nobody(), redis_available=lambda: False, remember=lambda _: None
        )
        self.audit.open()
        self.cancellations = Cancellations(Nobody())
        self.ends = DirectCompletion("g1", self.audit, self.cancellations, lambda: 1.0)

    def enter(self) -> DirectEntry:
        entry = DirectEntry(waiting(new_request_id()), 1, 0.0)
        self.ends.add(entry)
        return entry

    async def begun(self) -> DirectEntry:
        """One that was sent to a worker, and came back unserved."""
        entry = self.enter()
        assert await self.ends.record_accepted([entry]) == [entry]
        return entry

    async def notes(self) -> list[SpoolEntry]:
        """All that is on the disk, when nothing is on its way there any more."""
        await eventually(lambda: not len(self.ends), "all is noted")
        self.audit.spool.rotate()
        return [note for path in self.audit.spool.to_merge() for note in self.audit.spool.read(path, 0, 1000).entries]

    async def ended(self) -> list[tuple[str, str, bool]]:
        return [(end.state, end.error_code, end.delivered) for _, end in await self.notes() if end]


@pytest.fixture
async def transaction(tmp_path: Path) -> AsyncIterator[Desk]:
    made = Desk(tmp_path)
    tasks = [asyncio.create_task(made.audit.writer.run())]
    yield made
    await end_all(tasks)
    await made.audit.close()


async def test_shed_before_it_was_sent_it_leaves_no_trace(transaction: Desk) -> None:
    """Refused as if it had not come."""
    entry = transaction.enter()
    transaction.ends.reject(entry, ErrorCode.SHED_FOR_PRIORITY)

    assert entry.pending.outcome is ErrorCode.SHED_FOR_PRIORITY
    assert await transaction.notes() == []


async def test_shed_after_it_was_sent_it_has_an_end(transaction: Desk) -> None:
    """A busy worker sent it back, and then it had to make room: told when the disk has it."""
    entry = await transaction.begun()
    transaction.ends.reject(entry, ErrorCode.SHED_FOR_PRIORITY)
    assert not entry.pending.done

    assert await transaction.ended() == [("failed", "shed_for_priority", True)]
    assert entry.pending.outcome is ErrorCode.SHED_FOR_PRIORITY
    assert transaction.audit.spool.reserved == 0


async def test_a_late_verdict_of_redis_is_what_was_told(transaction: Desk) -> None:
    """Taken over while Redis was asked, sent to a worker, and then Redis said no: the audit says so, too."""
    before, after = transaction.enter(), await transaction.begun()
    for entry in (before, after):
        entry.pending.finish(Verdict(Admission.QUEUE_FULL))
    transaction.ends.sweep(1.0)

    assert await transaction.ended() == [("failed", "queue_full", True)]
    assert {accepted.id for accepted, _ in await transaction.notes()} == {after.id}


async def test_what_redis_accepted_is_left_to_it(transaction: Desk) -> None:
    """No end of ours, no answer, and no room kept for either, be it left while its beginning was on its way."""
    sent, leaving = await transaction.begun(), transaction.enter()
    beginning = asyncio.create_task(transaction.ends.record_accepted([leaving]))
    await asyncio.sleep(0)
    for entry in (sent, leaving):
        entry.pending.accepted = True
        transaction.ends.give_up(entry, ErrorCode.WORKER_LOST)

    assert await beginning == []
    assert await transaction.ended() == []
    assert [entry.pending.done for entry in (sent, leaving)] == [False, False]
    assert transaction.audit.spool.reserved == 0


async def test_what_is_on_its_way_to_the_disk_is_what_is_told(transaction: Desk) -> None:
    """Redis ended it as well, and says so before the disk has the output: the client gets what the audit will have."""
    pending_requests, entry = PendingRequests(), await transaction.begun()
    entry.pending.accepted = True
    pending_requests.add(entry.pending)
    transaction.ends.ran(entry, Outcome(entry.id, "", 1.0, 1, "v1", "output"), "w1", 1)
    submission = entry.pending.submission
    expired = Reply(
        entry.id, submission.customer_id, submission.nonce, "failed", "queue_timeout", 0, 1.0, "", 0, "", 0, 0, "", ""
    )

    assert not pending_requests.resolve(expired)
    assert await transaction.ended() == [("completed", "", True)]
    assert entry.pending.outcome.output == "output"


async def test_a_result_that_the_disk_holds_up_gives_way_to_the_504(transaction: Desk) -> None:
    """Its deadline passed while it was written, and the client got a 504: the audit is told so after it."""
    entry = await transaction.begun()
    transaction.ends.ran(entry, Outcome(entry.id, "", 1.0, 1, "v1", "output"), "w1", 1)
    entry.pending.finish(ErrorCode.DEADLINE_EXCEEDED)

    async def both() -> bool:
        return len(await transaction.ended()) == 2

    await eventually(both, "both are noted")
    assert await transaction.ended() == [("completed", "", True), ("failed", "deadline_exceeded", True)]


async def test_a_thousand_that_were_cancelled_leave_nothing(transaction: Desk) -> None:
    """Nor do those that ended otherwise: a customer's concurrency is what is under way, whatever the ends were."""
    cancelled = [transaction.enter() for _ in range(1000)]
    sent = [await transaction.begun() for _ in range(5)]
    assert transaction.ends.of_customer("c") == 1005
    for entry in (*cancelled, sent[0]):
        entry.pending.cancel()
        entry.pending.gone = True
    sent[1].pending.accepted = True
    transaction.ends.give_up(sent[1], ErrorCode.WORKER_LOST)
    transaction.ends.reject(sent[2], ErrorCode.SHED_FOR_PRIORITY)
    transaction.ends.ran(sent[3], Outcome(sent[3].id, "", 1.0, 1, "v1", "out"), "worker-1", 1)
    sent[4].pending.deadline = 0.0
    transaction.ends.sweep(1.0)
    transaction.ends.sweep(1.0)

    assert (transaction.ends.of_customer("c"), len(transaction.ends._open), transaction.ends._open._by_customer) == (
        0,
        0,
        {},
    )
    await transaction.notes()


async def test_one_customer_s_requests_are_its_own(transaction: Desk) -> None:
    """Nobody else's count, and one that is taken twice counts once."""
    ours, theirs = transaction.enter(), DirectEntry(waiting(new_request_id(), customer_id="other"), 1, 0.0)
    for entry in (ours, theirs, theirs):
        transaction.ends.add(entry)
    transaction.ends.reject(ours, ErrorCode.SHED_FOR_PRIORITY)
    transaction.ends.reject(ours, ErrorCode.SHED_FOR_PRIORITY)

    assert [transaction.ends.of_customer(name) for name in ("c", "other", "nobody")] == [0, 1, 0]


async def test_two_lines_ask_for_one_beginning_once(transaction: Desk) -> None:
    """The first was cancelled while it waited for the disk; the second waits for the same write."""
    entry = transaction.enter()
    first = asyncio.create_task(transaction.ends.record_accepted([entry]))
    await asyncio.sleep(0)
    first.cancel()

    assert await transaction.ends.record_accepted([entry]) == [entry]
    assert await transaction.ends.record_accepted([entry]) == [entry]
    transaction.ends.give_up(entry, ErrorCode.WORKER_LOST)
    assert [end and end.error_code for _, end in await transaction.notes()] == [None, "worker_lost"]


async def test_who_ended_while_its_beginning_was_written_is_not_sent(transaction: Desk) -> None:
    """The disk took its time: over by then, its end follows its beginning and no worker is called."""
    entry = transaction.enter()
    beginning = asyncio.create_task(transaction.ends.record_accepted([entry]))
    await asyncio.sleep(0)
    transaction.ends.give_up(entry, ErrorCode.DEADLINE_EXCEEDED)

    assert await beginning == []
    assert [end and end.error_code for _, end in await transaction.notes()] == [None, "deadline_exceeded"]


async def test_a_pair_fits_into_the_room_that_it_is_promised() -> None:
    """With every name as long as names are."""
    long = waiting(
        new_request_id(), tier="t" * 64, customer_id="c" * 36, api_key_id="k" * 36, model="m" * 200, trace_id="a" * 32
    )
    reply = Reply(
        long.id, "c", "n", "failed", "deadline_exceeded", 3, 1 / 3, "b" * 36, 8, "w" * 200, 1 / 3, 9999, "", ""
    )
    line = to_line(audit_pair("g" * 200, long, reply, 1 / 3, "direct"))

    assert len(line) <= PAIR_BYTES
