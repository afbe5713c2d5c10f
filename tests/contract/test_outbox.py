"""The outbox: entries are taken, kept until they are dropped, and not lost with an auditor."""

import pytest

from pool import Pool
from scheduler.protocol.audit_outbox import BAD_CAP, HELD_MS, TAKE_BYTES, AuditLag, Outbox, name_of
from scheduler.request_id import created_ms


async def put(pool: Pool, *entries: bytes) -> list[bytes]:
    """Add entries in this order."""
    await pool.client.lpush(pool.keys.outbox, *entries)
    return list(entries)


async def test_taken_entries_are_returned_until_they_are_dropped(pool: Pool) -> None:
    """An auditor that failed to commit gets the same entries again, oldest first; taken entries count as depth."""
    ids = [(await pool.queue(1))[0] for _ in range(3)]

    first = await pool.outbox.take(2)
    again = await pool.outbox.take(2)
    assert await pool.outbox.depth() == 3
    await pool.outbox.drop(2, name_of(first.entries[0]))
    rest = await pool.outbox.take(10)

    assert first == again
    assert ids[0].encode() in first.entries[0]
    assert ids[2].encode() in rest.entries[0]
    assert (first.more, len(rest.entries), rest.more) == (True, 1, False)


async def test_held_entries_are_not_returned_again(pool: Pool) -> None:
    """Nor do they reduce the number of new ones; entries of a take whose reply was lost are returned."""
    entries = await put(pool, *(bytes([n]) for n in range(100)))
    await pool.outbox.take(50)
    await pool.outbox.take(30, 50, name_of(entries[49]))  # its reply is lost

    assert await pool.outbox.take(40, 50, name_of(entries[49])) == (50, entries[50:90], True)
    assert await pool.outbox.take(40, 90, name_of(entries[89])) == (90, entries[90:], False)
    await pool.outbox.drop(85, name_of(entries[0]))
    assert await pool.outbox.take(40, 15, name_of(entries[99])) == (15, [], False)
    assert await pool.client.smembers(pool.keys.auditors) == {b"auditor"}
    assert await pool.outbox.depth() == 15


@pytest.mark.parametrize(("held", "newest"), [(3, b"b"), (2, b"c"), (4, b"d")])
async def test_other_entries_than_the_held_ones_are_detected(pool: Pool, held: int, newest: bytes) -> None:
    """Redis was lost, or loaded an older dump: the reply shows it each time, and nothing is taken."""
    await put(pool, b"a", b"b", b"c")
    await pool.outbox.take(2)

    for _ in range(2):
        assert await pool.outbox.take(2, held, name_of(newest)) == (0, [], True)
    assert await pool.client.lrange(pool.keys.outbox, 0, -1) == [b"c"]
    assert await pool.outbox.take(10) == (0, [b"a", b"b", b"c"], False)


async def test_the_entries_of_a_lost_auditor_are_taken(pool: Pool) -> None:
    """Before those of the outbox, and after the held ones."""
    await put(pool, b"a", b"b", b"c")
    assert (await Outbox(pool.client, pool.keys, "lost").take(2)).entries == [b"a", b"b"]
    await pool.client.lpush(pool.keys.auditor_outbox("auditor"), b"held")

    assert await pool.outbox.take(10, 1, name_of(b"held")) == (1, [b"a", b"b", b"c"], False)
    assert await pool.client.smembers(pool.keys.auditors) == {b"auditor"}


async def test_a_take_is_limited_in_bytes(pool: Pool) -> None:
    """Dead letters contain bodies, and the call has a timeout."""
    entries = [bytes([n]) * (TAKE_BYTES // 4) for n in range(10)] + [b"x" * 3 * TAKE_BYTES]
    for part in (entries[:5], entries[5:10], entries[10:]):
        await put(pool, *part)

    for _ in range(2):
        assert await pool.outbox.take(200) == (0, entries[:4], True)
    assert await pool.outbox.take(200, 4, name_of(entries[3])) == (4, entries[4:8], True)
    assert await pool.outbox.take(200) == (0, entries[:4], True)  # of eight in its own list
    taken = []
    while batch := (await pool.outbox.take(200)).entries:
        taken += batch
        await pool.outbox.drop(len(batch), name_of(batch[0]))
    assert taken == entries


async def test_entries_that_cannot_be_written_are_kept_bounded(pool: Pool) -> None:
    """They cannot fill Redis, and a full Redis does not stop the audit."""
    for text in (b"x", b"y"):
        await pool.queue(1)
        (entry,) = (await pool.outbox.take(1)).entries
        await pool.client.config_set("maxmemory", 1)
        assert (await pool.outbox.take(1, 1, name_of(entry))).held == 1
        await pool.outbox.drop(1, name_of(entry), [text] * 600)
        await pool.client.config_set("maxmemory", 0)

    assert await pool.client.llen(pool.keys.outbox_bad) == BAD_CAP
    assert await pool.outbox.depth() == 0


async def test_a_late_drop_removes_nothing(pool: Pool) -> None:
    """A drop whose reply was lost may run after the next take, whose entries are not committed."""
    for _ in range(3):
        await pool.queue(1)
    (oldest,) = (await pool.outbox.take(1)).entries
    await pool.outbox.drop(1, name_of(oldest))
    await pool.outbox.take(2)

    await pool.outbox.drop(1, name_of(oldest))

    assert len((await pool.outbox.take(2)).entries) == 2


async def test_held_entries_do_not_count_as_audit_lag(pool: Pool) -> None:
    """The auditor holds them until their requests end. They count again when its mark has expired."""
    lag, mark = AuditLag(pool.client, pool.keys), pool.keys.auditor_held("auditor")
    assert await lag.oldest_ms() is None
    (held,), (new,) = await pool.queue(1), await pool.queue(1)
    assert await lag.oldest_ms() == created_ms(held)

    (entry,) = (await pool.outbox.take(1)).entries
    assert await lag.oldest_ms() == created_ms(held)
    await pool.outbox.take(1, 1, name_of(entry))
    assert await pool.client.get(mark) == b"1"
    assert 0 < await pool.client.pttl(mark) <= HELD_MS
    assert await lag.oldest_ms() == created_ms(new)
    await pool.outbox.take(10)
    assert not await pool.client.exists(mark)
    await pool.outbox.drop(2, name_of(entry))
    assert await lag.oldest_ms() is None

    await pool.client.lpush(pool.keys.auditor_outbox("auditor"), entry)
    assert await lag.oldest_ms() == created_ms(held)
