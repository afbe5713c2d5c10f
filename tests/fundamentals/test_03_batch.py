"""Step 3: forming a batch.

The policy is a pure function: a snapshot of the queues in, decisions out. The script `form_batch` then moves the ids, all or
nothing. The dispatcher (scheduler/batching/dispatcher.py) is the loop around both. `pool` is an empty pool in a real Redis,
with every call of the protocol.
"""

from configs import BACKGROUND_SHARE
from pool import TIERS, Pool
from scheduler.batching.policy import plan
from scheduler.batching.service import Service
from scheduler.batching.snapshot import PoolSnapshot, TierQueue
from scheduler.batching.tier_policy import BatchPolicy, TierPolicy

TIER_POLICIES = [TierPolicy(name, number, 0.1) for number, name in enumerate(TIERS, 1)]
POLICY = BatchPolicy(4, 40.0, 4, 1000.0, TIER_POLICIES, BACKGROUND_SHARE)


def test_a_full_batch_leaves_at_once_higher_tiers_first() -> None:
    """Six requests wait, a batch has four places, one worker is idle: both of `paid` leave, and two of `free`."""
    waiting = {"enterprise": TierQueue(0, 0.0), "paid": TierQueue(2, 1.0), "free": TierQueue(4, 1.0)}
    snapshot = PoolSnapshot(waiting, 0, 0, 1, 100.0, Service(base_ms=50.0, item_ms=0.0))

    decision = plan(snapshot, POLICY, {})[0]

    assert {name: count for name, count in decision.picks if count} == {"paid": 2, "free": 2}


async def test_the_script_moves_the_oldest_ids_into_a_batch(pool: Pool) -> None:
    """The ids of a batch are in one list for each tier, under a lease; the id of the batch waits for a worker."""
    paid, free = await pool.queue(2, "paid"), await pool.queue(4, "free")

    batch_id = await pool.form([("paid", 2), ("free", 2)])

    assert await pool.inflight() == {f"inflight:paid:{batch_id}": paid, f"inflight:free:{batch_id}": free[:2]}
    assert await pool.states([*paid, *free]) == ["processing"] * 4 + ["queued"] * 2
    assert await pool.pop() == batch_id
