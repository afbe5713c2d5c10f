"""The model of admission in `tierlane simulate` decides as the script does, on random limits and queues."""

from random import Random
from typing import Any

import pytest

from customer_limits import in_force
from gateway.inference.admission import AdmissionLimits
from ledger.catalog.snapshot import Identity
from pool import Pool
from ratelimit.limits import FRESH
from ratelimit.token_bucket import StoredBucket
from scheduler.protocol.admission import TierLimit
from scheduler.states import Admission
from tierlane_tools.simulate.admission import AdmissionModel, CustomerAccount
from tierlane_tools.simulate.fair_queue import FairQueue, QueuedRequest

NO_REFILL = 1e-6
"""Requests/s of all buckets, so that the result does not depend on the time of the test."""
TIERS = ("enterprise", "paid", "free")


class Draw(Random):
    """The number that the script takes from the id of a request."""

    request_id = ""

    def random(self) -> float:
        return int(self.request_id[-4:], 16) / 65536


def tiers_of(random: Random) -> list[TierLimit]:
    """Limits that are reached by some of sixty requests."""
    return [
        TierLimit(
            name,
            rate=NO_REFILL,
            burst=random.choice((1000.0, 40.0)),
            max_depth=random.choice((1000, 12)),
            ahead=TIERS[: number + 1],
            shed_depth=random.choice((-1, 16)),
            shed_wait_ms=random.choice((-1, 400)),
            share=random.choice((0.0, 0.25)),
            shadow=random.random() < 0.1,
            places=random.choice((4, 64)),
            open=random.choice((0.0, 3.0)),
        )
        for number, name in enumerate(TIERS)
    ]


def account_of(number: int, random: Random) -> tuple[CustomerAccount, dict[str, Any]]:
    """A customer, and its limits as fields of a submission. Buckets begin at a quarter, as those that the script does not know."""
    fields: dict[str, Any] = {
        "rate": NO_REFILL,
        "burst": random.choice((1000.0, 24.0)),
        "max_concurrency": random.choice((0, 8)),
        "weight": random.choice((1.0, 2.0)),
        "quotas": random.choice(((), (("1year", 5),))),
    }
    limits = in_force(**fields)
    identity = Identity(
        f"c{number}", f"c{number}", f"c{number}", random.choice(TIERS), 2000, limits=(), weight=fields["weight"]
    )
    account = CustomerAccount(number, identity, "class", limits)
    for stored, bucket in zip(account.buckets, limits.buckets, strict=True):
        stored.store(bucket.size * FRESH, 0.0, bucket.per_s)
    return account, fields


@pytest.mark.parametrize("seed", range(40))
async def test_the_model_decides_as_the_script(pool: Pool, seed: int) -> None:
    """Sixty requests of six customers, one by one: the same outcome for each, and the same remaining values."""
    random = Random(seed)
    tiers, capacity = tiers_of(random), random.choice((0.0, 40.0))
    queues = {tier.name: FairQueue(tier.places, lambda _: True) for tier in tiers}
    draw = Draw()
    model = AdmissionModel(queues, draw)
    model._tier_buckets = {tier.name: StoredBucket(tier.burst * FRESH, tier.rate) for tier in tiers}
    limits = AdmissionLimits(tiers, capacity)
    accounts = [account_of(number, random) for number in range(6)]
    found = list[Admission]()
    for _ in range(60):
        account, fields = random.choice(accounts)
        identity = account.identity
        times = {"total_ms": 4000, "queue_ms": random.choice((2000, 500))}
        submission = pool.submission(identity.tier, customer_id=identity.customer_id, **times, **fields)
        draw.request_id = submission.id

        (verdict,) = await pool.admit([submission], tiers, capacity)
        modelled = model.decide(account, submission, limits, 0.0)

        found.append(verdict.outcome)
        assert (modelled.outcome, modelled.shadowed) == (verdict.outcome, verdict.shadowed), (seed, len(found))
        assert modelled.left.buckets[0].left == pytest.approx(verdict.left.buckets[0].left, abs=0.01)
        if verdict.outcome is Admission.ACCEPTED:
            queues[identity.tier].push(QueuedRequest(account.number, 0.0, 9.0, 9.0, 1.0), identity.weight)
        assert modelled.depth == verdict.depth
    assert Admission.ACCEPTED in found
