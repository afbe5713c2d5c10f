"""Step 10: a new limit.

A limit on something that a request costs is one entry in `BUCKETS` of ratelimit/limits.py; admission, refunds, headers,
`/v1/me`, `explain` and the documentation are made from it. This test adds input bytes per minute. CONTRIBUTING.md, "A limit", has the
files that make it permanent: the entry, its outcome, and a migration for its column.
"""

import msgspec
import pytest

import ratelimit.limits
from customer_limits import in_force
from pool import Pool
from ratelimit.limits import BUCKETS, Bucket, BucketKind, EffectiveLimits, LimitColumn, packed_kinds
from scheduler.protocol import admission

BYTES = BucketKind(
    "input-bytes",
    "input bytes per minute",
    outcome="token_limit",  # A permanent limit has an outcome of its own.
    rate=LimitColumn("input_bytes_per_minute", "bigint", "Input bytes; null: no limit.", "Null: the tier's."),
    fields=("bytes", "bytes_rate"),
    cost="input_bytes",
)


async def test_the_entry_is_all_that_admission_needs(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 bytes a minute, of which a new bucket holds a quarter: 60 and 40 bytes fit, one more does not."""
    monkeypatch.setattr(admission, "KINDS", msgspec.msgpack.encode(packed_kinds(admission.COSTS, (*BUCKETS, BYTES))))
    monkeypatch.setitem(ratelimit.limits._NUMBER, BYTES.name, len(BUCKETS) + 1)
    limits = EffectiveLimits((*in_force(tokens_per_minute=1e6).buckets, Bucket(BYTES, 400.0, 400.0)))
    await pool.client.delete(pool.keys.epoch)  # A new bucket refills from the epoch, which begins with this call.

    verdicts = await pool.admit([pool.submission(input_bytes=size, limits=limits) for size in (60, 40, 9)])

    assert [verdict.outcome for verdict in verdicts] == ["accepted", "accepted", "token_limit"]
    assert verdicts[-1].retry_after_ms == 9 / 400 * 60_000
