"""The auditor's window on the outbox: which entries are read, held until their requests end, and dropped."""

import pytest

from integration.audit_fixtures import accepted, ended, new_ids
from ledger.audit.folding import Folded
from ledger.audit.window import HoldPolicy, OutboxWindow
from scheduler.protocol.audit_outbox import Taken, name_of
from scheduler.protocol.audit_records import Record, encode_records

POLICY = HoldPolicy(hold_s=1.0, deep_s=60.0, deep_open=1000, most_open=200_000, most_bytes=1_000_000)


@pytest.mark.parametrize(
    ("age_s", "open_", "begun", "size", "keeps"),
    [
        # Few are open: a moment.
        (0.9, 1, 1, 100, True),
        (1.0, 1, 1, 100, False),
        (0.9, 1, 50_000, 100, True),
        (1.0, 999, 999, 100, False),
        # A deep queue.
        (1.0, 1000, 1000, 100, True),
        (59.9, 100_000, 100_000, 100, True),
        (60.0, 100_000, 100_000, 100, False),
        # Most later requests have ended: the oldest is slow.
        (1.0, 1000, 2000, 100, True),
        (1.0, 1000, 2001, 100, False),
        # Memory is bounded, also in the first moment.
        (0.1, 200_000, 200_000, 100, True),
        (0.1, 200_001, 200_001, 100, False),
        (0.1, 1, 1, 1_000_000, True),
        (0.1, 1, 1, 1_000_001, False),
    ],
)
def test_how_long_the_oldest_open_request_is_held(age_s: float, open_: int, begun: int, size: int, keeps: bool) -> None:
    """By its age, the number of open requests, and the size of the entries behind it."""
    assert POLICY.keeps(age_s, open_, begun, size) is keeps


class Outbox:
    """The list of an auditor in Redis, its window, and a clock."""

    def __init__(self, limit: int = 100, **policy: float) -> None:
        self.now = 100.0
        self.limit = limit
        self.window = OutboxWindow(HoldPolicy(**policy), lambda: self.now)
        self.entries: list[bytes] = []

    def add(self, *records: Record) -> None:
        self.entries.append(encode_records(list(records)))

    async def read(self, *, hold: bool = True) -> Folded:
        held, newest = self.window.held()
        if held and (held > len(self.entries) or name_of(self.entries[held - 1]) != newest):
            return await self.window.read(Taken(0, [], more=True), hold=hold)
        entries = self.entries[held : held + self.limit]
        return await self.window.read(Taken(held, entries, len(entries) == self.limit), hold=hold)

    async def read_ids(self, *, hold: bool = True) -> tuple[list[str], list[str]]:
        """The ids of the accepted and of the ended records."""
        folded = await self.read(hold=hold)
        return sorted(folded.accepted), sorted(folded.ended)

    def drop(self) -> tuple[int, list[bytes]]:
        count, oldest, bad = self.window.written()
        assert oldest == (name_of(self.entries[0]) if self.entries else "") or not count
        self.window.dropped(count)
        del self.entries[:count]
        return count, bad


async def test_an_open_request_is_held_until_its_end() -> None:
    """It becomes one row. Its entry and all later ones stay in the list, and are not read twice."""
    outbox = Outbox()
    whole, waiting = new_ids(2)
    outbox.add(ended(whole))
    outbox.add(accepted(waiting), accepted(whole))

    assert await outbox.read_ids() == ([whole], [whole])
    assert outbox.drop() == (1, [])
    assert not await outbox.read()
    outbox.now += 0.9
    outbox.add(ended(waiting))

    assert await outbox.read_ids() == ([waiting], [waiting])
    assert outbox.drop() == (2, [])


async def test_an_open_request_is_written_open_after_the_hold_time() -> None:
    """Its end is written alone later."""
    outbox = Outbox(hold_s=1.0)
    old, young = new_ids(2)
    outbox.add(accepted(old))
    await outbox.read()
    outbox.now += 0.6
    outbox.add(accepted(young))
    await outbox.read()
    outbox.now += 0.5

    assert await outbox.read_ids() == ([old], [])
    assert outbox.drop() == (1, [])
    outbox.add(ended(old))
    assert await outbox.read_ids() == ([], [old])
    assert outbox.drop() == (0, [])  # the entry of the young one is before it
    outbox.now += 0.6
    assert await outbox.read_ids() == ([young], [])
    assert outbox.drop() == (2, [])


async def test_without_hold_everything_is_read() -> None:
    """At shutdown nothing is left for the next auditor."""
    outbox = Outbox()
    held, new = new_ids(2)
    outbox.add(accepted(held))
    assert not await outbox.read()
    outbox.add(accepted(new))

    assert await outbox.read_ids(hold=False) == ([held, new], [])
    assert outbox.drop() == (2, [])


async def test_forgotten_entries_are_read_again() -> None:
    """If it is not known whether a write succeeded, everything is written again."""
    outbox = Outbox()
    whole, waiting = new_ids(2)
    outbox.add(accepted(waiting), accepted(whole), ended(whole))
    assert await outbox.read_ids() == ([whole], [whole])

    outbox.window.forget()

    outbox.add(ended(waiting))
    assert await outbox.read_ids() == (sorted([waiting, whole]), sorted([waiting, whole]))
    assert outbox.drop() == (2, [])


async def test_entries_that_redis_has_lost() -> None:
    """Their open requests are written, since no other process may know them; the present entries are read as new."""
    one, two, new = new_ids(3)
    for left in ([], [encode_records([accepted(new), ended(new)])], [encode_records([accepted(two)])]):
        outbox = Outbox()
        outbox.add(accepted(one))
        outbox.add(accepted(two))
        await outbox.read()
        outbox.entries = list(left)

        assert await outbox.read_ids() == (sorted([one, two]), [])
        assert len(outbox.window) == 0
        await outbox.read(hold=False)
        assert outbox.drop() == (len(left), [])


async def test_a_deep_queue_is_held_longer() -> None:
    """Each request is written once, as one row; the last few are let go with the queue."""
    ids = new_ids(40)
    outbox = Outbox(hold_s=1.0, deep_s=60.0, deep_open=10)
    for request_id in ids:
        outbox.add(accepted(request_id))
    await outbox.read()
    for request_id in ids[:30]:
        outbox.now += 1.5
        outbox.add(ended(request_id))
        assert await outbox.read_ids() == ([request_id], [request_id])
        assert outbox.drop()[0] == 1

    outbox.add(ended(ids[30]))
    assert await outbox.read_ids() == (ids[30:], [ids[30]])  # Nine are not a deep queue.
    assert outbox.drop() == (41, [])


async def test_bad_records_are_set_aside_when_their_entry_is_dropped() -> None:
    """So that none is set aside twice after a crash; this includes rejected rows."""
    outbox = Outbox()
    waiting, whole = new_ids(2)
    outbox.add(accepted(waiting))
    outbox.entries.append(b"\xc1")
    outbox.add(accepted(whole), ended(whole))
    await outbox.read()
    outbox.window.set_aside([b"refused"])
    assert outbox.drop() == (0, [])

    outbox.add(ended(waiting))
    await outbox.read()

    assert outbox.drop() == (4, [b"\xc1", b"refused"])
