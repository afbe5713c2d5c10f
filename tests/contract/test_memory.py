"""What a waiting request takes in Redis: its row, its place in the queue, its lease and its audit note."""

import pytest

from pool import Pool
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.admission import MAX_SUBMISSIONS, TierLimit
from tierlane.embedded.redis import find_jemalloc

COUNT = 20 * MAX_SUBMISSIONS
ALLOWED = 700
"""Bytes beside the body."""

QUOTAS = [("1day", 1_000_000), ("1month", 10_000_000)]


async def used_memory(pool: Pool) -> int:
    return int((await pool.client.info("memory"))["used_memory"])


ROUNDED = 0.2 if find_jemalloc() else 0.0
"""What jemalloc may add to a large block: its sizes are a fifth to a quarter apart (jemalloc(3), "size classes")."""


@pytest.mark.parametrize(
    ("length", "rounded"), [(30, 0.0), (500, 0.0), (1000, 0.0), (1500, 0.0), (2000, ROUNDED), (3000, ROUNDED)]
)
async def test_a_waiting_request_takes_its_body_and_little_more(pool: Pool, length: int, rounded: float) -> None:
    """With ids as long as real ones, all limits in force, and nothing taken from the outbox yet."""
    body = encode_payload(Payload("simulated", "x" * length, {}))
    limits = {"max_concurrency": COUNT * 2, "tokens_per_minute": 1e12, "quotas": QUOTAS, "tokens": 40}
    ids = {"customer_id": "0192f0c1-7a3b-7000-8000-000000000001", "api_key_id": "4tq8Zr1mXw", "trace_id": "a" * 32}

    async def admitted() -> None:
        submissions = [pool.submission(body=body, **limits, **ids) for _ in range(MAX_SUBMISSIONS)]
        verdicts = await pool.admit(submissions, wide, gateway="gw-0192f0c17a3b70008000000000000001")
        assert {v.outcome for v in verdicts} == {"accepted"}

    wide = [TierLimit("free", 1e9, 1e9, COUNT * 2, ("free",))]
    await admitted()  # What the call itself leaves: scripts, buckets.
    before = await used_memory(pool)
    for _ in range(COUNT // MAX_SUBMISSIONS):
        await admitted()

    assert (await used_memory(pool) - before) / COUNT <= len(body) * (1 + rounded) + ALLOWED
