"""How far the audit is behind, as health reads it from the lists of auditors and what they say of them."""

from pool import Pool
from scheduler.protocol.audit_outbox import AuditLag, name_of
from scheduler.request_id import created_ms


async def test_what_an_auditor_holds_is_not_behind(pool: Pool) -> None:
    """It waits for its ends on purpose; what came after it counts, and so does all of it once nobody holds it."""
    lag = AuditLag(pool.client, pool.keys)
    assert await lag.oldest_ms() is None
    (held,), (new,) = await pool.queue(1), await pool.queue(1)
    assert await lag.oldest_ms() == created_ms(held)

    (entry,) = (await pool.outbox.take(1)).entries
    assert await lag.oldest_ms() == created_ms(held)
    await pool.outbox.take(1, 1, name_of(entry))
    assert await lag.oldest_ms() == created_ms(new)
    await pool.outbox.drop(2, name_of(entry))
    assert await lag.oldest_ms() is None

    await pool.client.lpush(pool.keys.auditor_outbox("auditor"), entry)
    await pool.client.delete(pool.keys.auditor_held("auditor"))  # As when its time is over.
    assert await lag.oldest_ms() == created_ms(held)
