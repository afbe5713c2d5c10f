"""A customer's explanation, put together of literal values, and how it looks on the screen."""

import json
from typing import Any

import pytest

from customer_limits import remaining
from ledger.catalog.snapshot import Customer, Identity, Model, Tier
from ratelimit.limits import Level
from scheduler.protocol.limits import RejectionRecord
from scheduler.protocol.pool_view import GatewayStats, Observation, TierStats, WorkerView
from scheduler.request_id import created_ms
from tierlane.explain.customer import CustomerExplanation, CustomerRecord, Pool, explain_customer, factor_of
from tierlane.explain.text import as_json, customer_lines

ID = "0197f3a0-0000-7000-8000-000000000001"
REQUEST = "req_0197f3a0000070008000000000000001"


def tier(name: str, priority: int, share: float, *, shadow: bool = False) -> Tier:
    return Tier(name, priority, share, (100.0, 20.0, 50, 2_400_000), 1000, 2000, None, None, shadow)


TIERS = (tier("enterprise", 1, 0.05), tier("paid", 2, 0.25), tier("free", 3, 0.10))
MODEL = Model("tiny", "default", 32, None, 40, 3000, 50.0, 0.8, 0, True)
QUOTAS = (("1day", 10_000), ("1month", 90_000))
ACME = Customer(ID, "acme", "free", False, (100.0, 20.0, 80, 2_400_000), 2000, QUOTAS)
KEY = Identity("k1", ID, "acme", "free", (100.0, 20.0, 80, 2_400_000), 2000, QUOTAS, 10.0, 2.0)
ROW = CustomerRecord(ACME, frozenset({"max_concurrency"}), (KEY,))
LEFT = remaining(3.25, 900, Level(880_100.0, 4000), 3, [(9120, 10_920_000), (80_000, 90_061_000)])
REFUSAL = RejectionRecord(
    id=REQUEST,
    customer_id=ID,
    key_id="k1",
    tier="free",
    code="reduced_capacity",
    outcome="customer_limit",
    factor=0.381,
    rate=38.1,
    burst=7.6,
    limit="38.1 requests/s (burst 7)",
    left=0.25,
    more=12,
)


def worker(number: int, *, healthy: bool) -> WorkerView:
    return WorkerView(f"w{number}", "ready", 0.5, 1, 10.0, healthy, 100.0, 50.0, "simulated", "v1")


def gateway(name: str, free: float) -> GatewayStats:
    """One of two alike gateways, at which free has this factor."""
    tiers = {
        "enterprise": TierStats(100.0, 0.0, 80.0, 1.0, 200.0),
        "paid": TierStats(44.0, 0.0, 80.0, 1.0, 88.0),
        "free": TierStats(42.0, 9.0, 80.0, free, 32.0),
    }
    return GatewayStats(name, 186.0, tiers, 320.0)


def seen(*factors: float) -> Observation:
    workers = [worker(number, healthy=number < 4) for number in range(8)]
    gateways = [gateway(f"g{number}", factor) for number, factor in enumerate(factors)]
    return Observation(0, {}, workers, gateways, 0, 0, 0, 0)


def told(**changes: Any) -> CustomerExplanation:
    known: dict[str, Any] = {"left": LEFT, "refusals": [REFUSAL]} | changes
    row, observation = known.pop("row", ROW), known.pop("observation", seen(0.381, 0.381))
    rows = known.pop("tiers", TIERS)
    pool = Pool("default", rows, (MODEL,) if rows else (), observation)
    return explain_customer(known.pop("asked", "acme"), row, pool, **known)


def limits(explanation: CustomerExplanation) -> dict[str, tuple[float | None, str, float | None, float | None]]:
    return {line.limit: (line.base, line.of, line.effective, line.left) for line in explanation.limits}


def test_limits_are_taken_apart() -> None:
    """Base, whose it is, what is in force and what is left; concurrency and quotas are not lowered."""
    assert limits(told()) == {
        "requests_per_second": (100.0, "tier free", 38.1, None),
        "burst": (20.0, "tier free", 7.62, 3.25),
        "tokens_per_minute": (2_400_000.0, "tier free", 914_400.0, 880_100.0),
        "max_concurrency": (80.0, "own", 80.0, 77.0),
        "quota per day": (10_000.0, "quotas", 10_000.0, 9120.0),
        "quota per month": (90_000.0, "quotas", 90_000.0, 80_000.0),
        "key k1 requests_per_second": (10.0, "key", 3.81, None),
        "key k1 burst": (2.0, "key", 1.0, None),
    }


def test_what_is_not_limited_has_no_figures() -> None:
    """No tokens a minute, no quotas, no key of its own."""
    bare = CustomerRecord(Customer(ID, "acme", "free", False, (100.0, 20.0, 80, None), 2000))

    found = limits(told(row=bare, left=remaining(3.25, 900, in_use=3)))

    assert found["tokens_per_minute"] == (None, "tier free", None, None)
    assert list(found) == ["requests_per_second", "burst", "tokens_per_minute", "max_concurrency"]


def test_the_reason_comes_with_its_figures() -> None:
    """Demand is that of all gateways together."""
    explanation = told()

    assert explanation.factor == 0.381
    assert explanation.why == [
        (
            "free has 38 % of its base limits: 4 of 8 GPUs are healthy, capacity 320/s; enterprise 200/s and paid 88/s are "
            "served first; the demand of free is 84/s, and it gets 32/s (its guaranteed share)."
        ),
        "Capacity 320/s is 80 % (target_utilization) of what 4 healthy GPUs do with full batches, measured at 100/s each.",
    ]
    assert [(part.name, part.demand_rps, part.allocated_rps) for part in explanation.tiers] == [
        ("enterprise", 200.0, 200.0),
        ("paid", 88.0, 88.0),
        ("free", 84.0, 32.0),
    ]


def test_the_lowest_of_several_gateways_is_told() -> None:
    """And that they differ."""
    explanation = told(observation=seen(0.5, 0.3))

    assert (explanation.factor, factor_of("free", seen(0.5, 0.3))) == (0.3, 0.3)
    assert "Gateways differ: free has 30 % to 50 %; the lowest is shown here." in explanation.why
    assert [gateway.id for gateway in explanation.gateways] == ["g1", "g0"]
    assert any(line.startswith("g0 ") for line in customer_lines(explanation))


def test_a_tier_in_shadow_and_a_suspended_customer_are_told() -> None:
    """They change what the limits mean."""
    suspended = CustomerRecord(Customer(ID, "acme", "free", True, (100.0, 20.0, 80, None), 2000))

    why = told(row=suspended, tiers=(*TIERS[:2], tier("free", 3, 0.1, shadow=True))).why

    assert why[0] == "acme is suspended: every request is rejected with account_suspended."
    assert why[-1] == "Tier free is in shadow: its limits are checked and counted, but not enforced."


def test_without_a_gateway_no_factor_is_in_force() -> None:
    """Base limits stand as they are."""
    explanation = told(observation=seen())

    assert explanation.factor is None
    assert explanation.why == ["No gateway is running, so no factor is in force."]
    assert limits(explanation)["requests_per_second"] == (100.0, "tier free", 100.0, None)
    assert factor_of("free", None) == 1.0


def test_without_redis_base_limits_are_told() -> None:
    """With what could not be read."""
    explanation = told(observation=None, left=None, refusals=None, not_read=["Redis is away."])

    assert (explanation.why, explanation.refusals, explanation.factor) == ([], None, None)
    found = limits(explanation)
    assert found["burst"] == (20.0, "tier free", None, None)
    assert found["max_concurrency"] == (80.0, "own", 80.0, None)
    assert found["key k1 burst"] == (2.0, "key", None, None)
    assert customer_lines(explanation)[-1] == "Redis is away."


def test_without_rows_every_tier_is_told() -> None:
    """Whose it is cannot be said; how the pool stands can."""
    explanation = told(asked=ID, row=None, tiers=(), left=None, not_read=["PostgreSQL is away."])

    assert [words.partition(":")[0] for words in explanation.why] == [
        "enterprise has its full base limits",
        "paid has its full base limits",
        "free has 38 % of its base limits",
        "Capacity 320/s is what 4 healthy GPUs do with full batches, measured at 100/s each.",
    ]
    assert (explanation.customer, explanation.tier, explanation.limits) == (ID, None, [])
    assert "-12" not in "\n".join(customer_lines(explanation))


def test_refusals_are_told_with_the_limit_that_refused() -> None:
    """And how many more there were like it."""
    (one,) = told().refusals or []

    assert (one.request_id, one.at_ms, one.code, one.factor, one.more) == (
        REQUEST,
        created_ms(REQUEST),
        "reduced_capacity",
        0.381,
        12,
    )
    assert one.refused_by.startswith("the customer's limit over all its keys: 38.1 requests/s (burst 7)")


def test_the_screen() -> None:
    """Who, why, limits, tiers, refusals: a block each."""
    text = "\n".join(customer_lines(told()))

    blocks = text.split("\n\n")
    assert blocks[0] == f"acme ({ID}), tier free"
    assert blocks[1].startswith("free has 38 % of its base limits")
    assert blocks[2].splitlines()[:3] == [
        "LIMIT                       BASE       OF         NOW      LEFT",
        "requests_per_second         100        tier free  38.1     -",
        "burst                       20         tier free  7.62     3.25",
    ]
    assert "quota per day               10,000     quotas     10,000   9,120 (resets in 3 h 2 min)" in blocks[2]
    assert blocks[3].splitlines()[3] == "free        3         32/s (10 %)  84/s    32/s   38 %"
    assert blocks[4].splitlines()[1].endswith("0.25 left (and 12 more like it)")
    assert len(blocks) == 5


@pytest.mark.parametrize(("refusals", "said"), [([], True), (None, False)])
def test_no_refusals_and_unread_refusals_are_two_things(refusals: list[RejectionRecord] | None, said: bool) -> None:
    """None is known of, or none could be read."""
    assert ("No rejection in the last 10 minutes." in customer_lines(told(refusals=refusals))) is said


def test_json_has_everything() -> None:
    """Names as in the structs, figures as numbers."""
    document = json.loads(as_json(told()))

    assert document["capacity"]["healthy_gpus"] == 4
    assert document["limits"][0] == {
        "limit": "requests_per_second",
        "base": 100.0,
        "of": "tier free",
        "effective": 38.1,
        "left": None,
        "anew_in_ms": None,
    }
    assert {"customer", "customer_id", "tier", "factor", "why", "tiers", "gateways", "refusals"} <= document.keys()
