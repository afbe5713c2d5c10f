"""The outbox: entries are taken, kept until they are dropped, and never lost with an auditor."""

from pool import Pool
from scheduler.outbox import BAD_CAP, TAKE_BYTES, Outbox


async def test_taken_entries_come_again_until_they_are_dropped(pool: Pool) -> None:
    """An auditor that failed to commit sees the same entries next time, oldest first."""
    ids = [(await pool.queue(1))[0] for _ in range(3)]

    first = await pool.outbox.take(2)
    again = await pool.outbox.take(2)
    await pool.outbox.drop(2)
    rest = await pool.outbox.take(10)

    assert first == again
    assert ids[0].encode() in first[0]
    assert ids[2].encode() in rest[0]
    assert len(rest) == 1


async def test_entries_of_a_dead_auditor_are_adopted(pool: Pool) -> None:
    """What another auditor took and never dropped goes first."""
    for _ in range(3):
        await pool.queue(1)
    dead = Outbox(pool.client, pool.keys, "dead")
    taken = await dead.take(2)

    adopted = await pool.outbox.take(10)

    assert adopted[:2] == taken
    assert len(adopted) == 3
    assert await pool.client.smembers(pool.keys.auditors) == {b"auditor"}


async def test_a_take_ends_early_where_entries_are_large(pool: Pool) -> None:
    """Dead letters carry bodies: so many at once could not be read in a call's time, now or ever."""
    entries = [bytes([n]) * (TAKE_BYTES // 4) for n in range(10)] + [b"x" * 3 * TAKE_BYTES]
    await pool.client.lpush(pool.keys.outbox, *entries[:5])
    await pool.client.lpush(pool.keys.outbox, *entries[5:10])
    await pool.client.lpush(pool.keys.outbox, entries[10])

    assert await pool.outbox.take(200) == entries[:4]
    assert await pool.outbox.take(200) == entries[:4]
    taken = []
    while batch := await pool.outbox.take(200):
        taken += batch
        await pool.outbox.drop(len(batch))
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
        await pool.outbox.take(1)
        await pool.client.config_set("maxmemory", 1)
        await pool.outbox.drop(1, [text] * 600)
        await pool.client.config_set("maxmemory", 0)

    assert await pool.client.llen(pool.keys.outbox_bad) == BAD_CAP
    assert await pool.outbox.depth() == 0


async def test_a_late_drop_drops_nothing(pool: Pool) -> None:
    """A drop whose reply was lost may run after the next take: what it would drop by then is not committed."""
    for _ in range(3):
        await pool.queue(1)
    late = Outbox(pool.client, pool.keys, "auditor")
    await late.take(1)
    await late.drop(1)
    await pool.outbox.take(2)

    await late.drop(1)

    assert len(await pool.outbox.take(2)) == 2
