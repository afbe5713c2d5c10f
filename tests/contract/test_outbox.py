"""The outbox: entries are taken, kept until they are dropped, and never lost with an auditor."""

import pytest

from pool import Pool
from scheduler.protocol.audit_outbox import BAD_CAP, HELD_MS, TAKE_BYTES, Outbox, name_of


async def put(pool: Pool, *entries: bytes) -> list[bytes]:
    """Add entries, first one first."""
    await pool.client.lpush(pool.keys.outbox, *entries)
    return list(entries)


async def test_taken_entries_come_again_until_they_are_dropped(pool: Pool) -> None:
    """An auditor that failed to commit sees the same entries next time, oldest first."""
    ids = [(await pool.queue(1))[0] for _ in range(3)]

    first = await pool.outbox.take(2)
    again = await pool.outbox.take(2)
    await pool.outbox.drop(2, name_of(first.entries[0]))
    rest = await pool.outbox.take(10)

    assert first == again
    assert ids[0].encode() in first.entries[0]
    assert ids[2].encode() in rest.entries[0]
    assert (first.more, len(rest.entries), rest.more) == (True, 1, False)


async def test_held_entries_do_not_come_again(pool: Pool) -> None:
    """Nor do they take the room of new ones, however many they are; those whose take was not answered do come."""
    entries = await put(pool, *(bytes([n]) for n in range(100)))
    await pool.outbox.take(50)
    await pool.outbox.take(30, 50, name_of(entries[49]))  # As if its answer had been lost.

    taken = await pool.outbox.take(40, 50, name_of(entries[49]))
    assert taken == (50, entries[50:90], True)
    assert await pool.outbox.take(40, 90, name_of(entries[89])) == (90, entries[90:], False)
    await pool.outbox.drop(85, name_of(entries[0]))
    assert await pool.outbox.take(40, 15, name_of(entries[99])) == (15, [], False)
    assert await pool.client.smembers(pool.keys.auditors) == {b"auditor"}
    assert await pool.outbox.depth() == 15


@pytest.mark.parametrize(("held", "newest"), [(3, b"b"), (2, b"c"), (4, b"d")])
async def test_what_is_not_there_as_it_is_held(pool: Pool, held: int, newest: bytes) -> None:
    """Redis was lost, or an older copy of it has taken its place: that is told, again and again, and nothing is taken."""
    await put(pool, b"a", b"b", b"c")
    await pool.outbox.take(2)

    for _ in range(2):
        assert await pool.outbox.take(2, held, name_of(newest)) == (0, [], True)
    assert await pool.client.lrange(pool.keys.outbox, 0, -1) == [b"c"]
    assert await pool.outbox.take(10) == (0, [b"a", b"b", b"c"], False)


async def test_health_is_told_what_is_held(pool: Pool) -> None:
    """For as long as its auditor comes back, and no longer."""
    mark = pool.keys.auditor_held("auditor")
    await put(pool, b"a", b"b")
    await pool.outbox.take(10)
    assert not await pool.client.exists(mark)

    await pool.outbox.take(10, 2, name_of(b"b"))
    assert await pool.client.get(mark) == b"2"
    assert 0 < await pool.client.pttl(mark) <= HELD_MS

    await pool.outbox.take(10)
    assert not await pool.client.exists(mark)


async def test_entries_of_a_dead_auditor_are_adopted(pool: Pool) -> None:
    """What another auditor took and never dropped goes first, behind what is held."""
    await put(pool, b"a", b"b", b"c")
    assert (await Outbox(pool.client, pool.keys, "dead").take(2)).entries == [b"a", b"b"]
    await pool.client.lpush(pool.keys.auditor_outbox("auditor"), b"held")

    assert await pool.outbox.take(10, 1, name_of(b"held")) == (1, [b"a", b"b", b"c"], False)
    assert await pool.client.smembers(pool.keys.auditors) == {b"auditor"}


async def test_a_take_ends_early_where_entries_are_large(pool: Pool) -> None:
    """Dead letters carry bodies: so many at once could not be read in a call's time, now or ever."""
    entries = [bytes([n]) * (TAKE_BYTES // 4) for n in range(10)] + [b"x" * 3 * TAKE_BYTES]
    for part in (entries[:5], entries[5:10], entries[10:]):
        await put(pool, *part)

    assert await pool.outbox.take(200) == (0, entries[:4], True)
    assert await pool.outbox.take(200) == (0, entries[:4], True)
    assert await pool.outbox.take(200, 4, name_of(entries[3])) == (4, entries[4:8], True)
    assert await pool.outbox.take(200) == (0, entries[:4], True)  # Though there are eight in the own list.
    taken = []
    while batch := (await pool.outbox.take(200)).entries:
        taken += batch
        await pool.outbox.drop(len(batch), name_of(batch[0]))
    assert taken == entries


async def test_depth_counts_what_waits_and_what_is_taken(pool: Pool) -> None:
    """The lag that health shows includes the entries in an auditor's hands."""
    for _ in range(3):
        await pool.queue(1)
    await pool.outbox.take(1)

    assert await pool.outbox.depth() == 3


async def test_bad_entries_are_kept_bounded(pool: Pool) -> None:
    """Somebody can look at them; they cannot fill Redis, and a full Redis does not stop the audit."""
    for text in (b"x", b"y"):
        await pool.queue(1)
        (entry,) = (await pool.outbox.take(1)).entries
        await pool.client.config_set("maxmemory", 1)
        assert (await pool.outbox.take(1, 1, name_of(entry))).held == 1
        await pool.outbox.drop(1, name_of(entry), [text] * 600)
        await pool.client.config_set("maxmemory", 0)

    assert await pool.client.llen(pool.keys.outbox_bad) == BAD_CAP
    assert await pool.outbox.depth() == 0


async def test_a_late_drop_drops_nothing(pool: Pool) -> None:
    """A drop whose reply was lost may run after the next take: what it would drop by then is not committed."""
    for _ in range(3):
        await pool.queue(1)
    (oldest,) = (await pool.outbox.take(1)).entries
    await pool.outbox.drop(1, name_of(oldest))
    await pool.outbox.take(2)

    await pool.outbox.drop(1, name_of(oldest))

    assert len((await pool.outbox.take(2)).entries) == 2
