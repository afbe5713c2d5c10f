"""Explanations of a customer and of a request, made of literal rows and observations, as figures, text and JSON."""

import json
from datetime import timedelta
from typing import Any

import pytest

from customer_limits import remaining
from ledger.audit.queries import RequestRow
from ledger.catalog.snapshot import Customer, Identity, Model, Tier
from ratelimit.limits import Level
from scheduler.protocol.limits import RejectionRecord
from scheduler.protocol.pool_view import GatewayStats, Observation, TierStats, WorkerView
from scheduler.protocol.replies import RequestDetail
from scheduler.request_id import created_at, new_request_id
from tierlane.explain.answer import is_request_id
from tierlane.explain.customer import CustomerExplanation, CustomerRecord, Pool, explain_customer, factor_of
from tierlane.explain.request import explain_request
from tierlane.explain.text import as_json, customer_lines, request_lines

CUSTOMER_ID = "0197f3a0-0000-7000-8000-000000000001"
ID = "req_0197f3a0000070008000000000000001"
BEGAN = created_at(ID)
LIMITS = (100.0, 20.0, 80, 2_400_000)


def tier(name: str, priority: int, share: float, *, shadow: bool = False) -> Tier:
    return Tier(name, priority, share, (100.0, 20.0, 50, 2_400_000), 1000, 2000, None, None, shadow)


TIERS = (tier("enterprise", 1, 0.05), tier("paid", 2, 0.25), tier("free", 3, 0.10))
MODEL = Model("tiny", "default", 32, None, 40, 50.0, 0.8, 0, True)
QUOTAS = (("1day", 10_000), ("1month:usd", 90 * 10**9))
ACME = Customer(CUSTOMER_ID, "acme", "free", False, LIMITS, 2000, QUOTAS)
KEY = Identity("k1", CUSTOMER_ID, "acme", "free", 2000, limits=LIMITS, quotas=QUOTAS, key_rate=10.0, key_burst=2.0)
RECORD = CustomerRecord(ACME, frozenset({"max_concurrency"}), (KEY,))
LEFT = remaining(3.25, 900, Level(880_100.0, 4000), 3, [(9120, 10_920_000), (80_500_000_000, 90_061_000)])
REJECTION = RejectionRecord(
    id=ID,
    customer_id=CUSTOMER_ID,
    key_id="k1",
    tier="free",
    code="reduced_capacity",
    outcome="customer_limit",
    factor=0.381,
    rate=38.1,
    burst=7.6,
    limit="38.1 requests/s (burst 7)",
    left=0.25,
    remaining=0.25,
    retry_after_ms=75,
    more=12,
)


def observation(*factors: float) -> Observation:
    """Half of eight GPUs are healthy; one gateway for each factor of free."""
    workers = [
        WorkerView(f"w{n}", "ready", 0.5, 1, 100.0, 50.0, "simulated", "v1", age_ms=10.0, healthy=n < 4)
        for n in range(8)
    ]
    gateways = [
        GatewayStats(
            f"g{n}",
            186.0,
            {
                "enterprise": TierStats(100.0, 0.0, 80.0, 1.0, 200.0),
                "paid": TierStats(44.0, 0.0, 80.0, 1.0, 88.0),
                "free": TierStats(42.0, 9.0, 80.0, factor, 32.0),
            },
            320.0,
        )
        for n, factor in enumerate(factors)
    ]
    return Observation(0, {}, workers, gateways, 0, 0, 0, 0)


def explained(**changes: Any) -> CustomerExplanation:
    known: dict[str, Any] = {"left": LEFT, "refusals": [REJECTION]} | changes
    record, seen = known.pop("row", RECORD), known.pop("observation", observation(0.381, 0.381))
    tiers = known.pop("tiers", TIERS)
    pool = Pool("default", tiers, (MODEL,) if tiers else (), seen)
    return explain_customer(known.pop("asked", "acme"), record, pool, **known)


def limits(explanation: CustomerExplanation) -> dict[str, tuple[float | None, str, float | None, float | None]]:
    return {line.limit: (line.base, line.of, line.effective, line.left) for line in explanation.limits}


def test_each_limit_has_its_base_source_effective_value_and_rest() -> None:
    """Concurrency and quotas are not reduced with the capacity; limits of a key are separate lines."""
    assert limits(explained()) == {
        "requests_per_second": (100.0, "tier free", 38.1, None),
        "burst": (20.0, "tier free", 7.62, 3.25),
        "tokens_per_minute": (2_400_000.0, "tier free", 914_400.0, 880_100.0),
        "max_concurrency": (80.0, "own", 80.0, 77.0),
        "quota per day": (10_000.0, "quotas", 10_000.0, 9120.0),
        "quota of usd per month": (90.0, "quotas", 90.0, 80.5),
        "key k1 requests_per_second": (10.0, "key", 3.81, None),
        "key k1 burst": (2.0, "key", 1.0, None),
    }


def test_a_customer_without_a_limit_has_no_value_for_it() -> None:
    """No tokens per minute, no quotas, no limit of a key."""
    bare = CustomerRecord(Customer(CUSTOMER_ID, "acme", "free", False, (100.0, 20.0, 80, None), 2000))

    found = limits(explained(row=bare, left=remaining(3.25, 900, in_use=3)))

    assert found["tokens_per_minute"] == (None, "tier free", None, None)
    assert list(found) == ["requests_per_second", "burst", "tokens_per_minute", "max_concurrency"]


def test_the_lowest_factor_of_several_gateways_is_shown() -> None:
    """With the gateways, if they differ. Demand is that of all gateways, the allocation that of one of them."""
    explanation = explained(observation=observation(0.5, 0.3))

    assert (explanation.factor, factor_of("free", observation(0.5, 0.3)), factor_of("free", None)) == (0.3, 0.3, 1.0)
    assert [(part.demand_rps, part.allocated_rps) for part in explanation.tiers] == [(200, 200), (88, 88), (84, 32)]
    assert not any("differ" in reason for reason in explained(observation=observation(0.5, 0.505)).why)
    assert [gateway.id for gateway in explanation.gateways] == ["g1", "g0"]
    assert any(line.startswith("g0 ") for line in customer_lines(explanation))


def test_suspension_and_shadow_are_reasons() -> None:
    """They change the meaning of all limits, so they are first and last."""
    customer = Customer(CUSTOMER_ID, "acme", "free", True, (100.0, 20.0, 80, None), 2000)
    suspended = CustomerRecord(customer, suspension="by ann at 2026-11-30 09:12:00 UTC")
    why = explained(row=suspended, tiers=(*TIERS[:2], tier("free", 3, 0.1, shadow=True))).why

    assert why[0] == (
        "acme is suspended, by ann at 2026-11-30 09:12:00 UTC: every request is rejected with account_suspended until "
        "`tierlane customer activate acme`."
    )
    assert "shadow" in why[-1]


def test_without_a_gateway_base_limits_apply() -> None:
    """No factor is in force."""
    explanation = explained(observation=observation())

    assert (explanation.factor, len(explanation.why)) == (None, 1)
    assert limits(explanation)["requests_per_second"] == (100.0, "tier free", 100.0, None)


def test_without_redis_only_base_limits_are_known() -> None:
    """The last line names what could not be read."""
    explanation = explained(observation=None, left=None, refusals=None, not_read=["Redis is away."])

    assert (explanation.why, explanation.refusals, explanation.factor) == ([], None, None)
    found = limits(explanation)
    assert found["burst"] == (20.0, "tier free", None, None)
    assert found["max_concurrency"] == (80.0, "own", 80.0, None)
    assert found["key k1 burst"] == (2.0, "key", None, None)
    assert customer_lines(explanation)[-1] == "Redis is away."


def test_without_postgresql_the_pool_is_explained() -> None:
    """Every tier has its reason, and the customer has no limits."""
    explanation = explained(asked=CUSTOMER_ID, row=None, tiers=(), left=None, not_read=["PostgreSQL is away."])

    assert [words.split(" ", 1)[0] for words in explanation.why] == ["enterprise", "paid", "free", "Not", "Capacity"]
    assert (explanation.customer, explanation.tier, explanation.limits) == (CUSTOMER_ID, None, [])
    assert [(tier.priority, tier.guaranteed_share, tier.guaranteed_rps) for tier in explanation.tiers] == [
        (None,) * 3
    ] * 3
    assert ["free", "unknown", "unknown"] in [line.split()[:3] for line in customer_lines(explanation)]
    assert "-12" not in "\n".join(customer_lines(explanation))


def test_the_text_of_a_customer() -> None:
    """One block each for customer, GPU time, reasons, limits, tiers and rejections."""
    blocks = "\n".join(customer_lines(explained())).split("\n\n")

    assert blocks[0] == f"acme ({CUSTOMER_ID}), tier free"
    assert blocks.pop(1) == "Weight 1; share of the tier's GPU time in the last minute: not known."
    assert blocks[1].startswith("free has 38 % of its base limits: 4 of 8 GPUs are healthy, capacity 320/s; ")
    assert blocks[2].splitlines()[:3] == [
        "LIMIT                       BASE       OF         NOW      LEFT",
        "requests_per_second         100        tier free  38.1     -",
        "burst                       20         tier free  7.62     3.25",
    ]
    assert (
        "quota per day               10,000     quotas     10,000   9,120 (880 used; resets in 3 h 2 min)" in blocks[2]
    )
    assert blocks[3].splitlines()[3] == "free        3         32/s (10 %)  84/s    32/s   38 %"
    assert "38.1 requests/s (burst 7)" in blocks[4]
    assert blocks[4].endswith("0.25 left (and 12 more like it)")
    assert len(blocks) == 5
    (limit, *_) = json.loads(as_json(explained()))["limits"]
    assert limit == {
        "limit": "requests_per_second",
        "base": 100.0,
        "of": "tier free",
        "effective": 38.1,
        "left": None,
    } | {"anew_in_ms": None}
    texts = ["\n".join(customer_lines(explained(refusals=refusals))) for refusals in ([], None)]
    assert ["No rejection in the last 10 minutes." in text for text in texts] == [True, False]
    assert customer_lines(explained(failed=[]))[-2:] == [
        "No accepted request failed in the last hour.",
        "`tierlane requests acme --status failed` lists the failed requests of a day.",
    ]


def row(status: str = "completed", **fields: Any) -> RequestRow:
    known = dict.fromkeys(RequestRow.__struct_fields__) | {"id": ID, "created_at": BEGAN, "status": status}
    known |= {"customer_id": "c", "tier": "free", "latency_ms": 62.0, "queue_ms": 5.0, "attempts": 1}
    known |= {"completed_at": BEGAN + timedelta(milliseconds=62), "batch_id": "b1", "worker_id": "w7"}
    known |= {"endpoint": "/v1/messages"}
    return RequestRow(**(known | fields))


def detail(state: str = "processing", **fields: Any) -> RequestDetail:
    known: dict[str, Any] = {"tier": "free", "customer_id": "c", "error_code": "", "attempts": 1, "accepted_ms": 1000}
    return RequestDetail(state=state, **(known | {"formed_ms": 1005, "ended_ms": None} | fields))


@pytest.mark.parametrize(
    ("known", "found", "expected"),
    [
        ({"row": row()}, "accepted", "Completed after 62 ms and 1 run."),
        (
            {"row": row("failed", error_code="worker_lost", attempts=3)},
            "accepted",
            "Failed with worker_lost after 62 ms",
        ),
        ({"row": row("failed", error_code="of_the_future", latency_ms=None)}, "accepted", "Failed with of_the_future"),
        ({"detail": detail()}, "accepted", "Accepted; in a batch, after 1 run begun."),
        (
            {"detail": detail("queued", attempts=0, formed_ms=None), "row": row("queued", completed_at=None)},
            "accepted",
            "Accepted; queued, after 0 runs.",
        ),
        ({"detail": detail("queued"), "row": row()}, "accepted", "Completed after 62 ms and 1 run."),
        ({"detail": detail("completed", ended_ms=1070)}, "accepted", "Completed after 70 ms and 1 run."),
        ({"row": row(), "refusal": REJECTION}, "accepted", "Completed after 62 ms and 1 run."),
        (
            {},
            "unknown",
            "This request is not known. No row of the audit, no request in Redis and no rejection of the last 10 min",
        ),
        ({"not_read": ["Redis is away."]}, "unknown", "It was not found in what could be read."),
    ],
)
def test_the_state_of_a_request(known: dict[str, Any], found: str, expected: str) -> None:
    """The end in an audit row takes precedence over Redis, and a row over a rejection."""
    everything: dict[str, Any] = {"row": None, "detail": None, "refusal": None, "not_read": []} | known
    explanation = explain_request(ID, **everything)

    assert (explanation.found, explanation.not_read) == (found, everything["not_read"])
    assert " ".join(explanation.said).startswith(expected)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({"delivered": False}, "Whether the response reached the client is not recorded; with TIERLANE_REQUEST_LOG"),
        ({"delivered": True}, "The gateway recorded this as the response that it sent"),
        ({"delivered": True, "mode": "direct"}, "The gateway recorded this result and then sent it"),
        ({"delivered": False, "gateway_id": "jobs"}, "It was a job"),
        ({"status": "failed", "error_code": "cancelled"}, "The client had closed the connection"),
        ({"status": "queued", "completed_at": None, "delivered": None}, "Accepted; queued"),
    ],
)
def test_delivery_is_stated_only_as_far_as_the_audit_proves_it(end: dict[str, Any], words: str) -> None:
    """A worker's record of an end does not show whether a response was sent, so `delivered` is shown only if it is true."""
    explanation = explain_request(ID, row(**end), None, None, [])

    assert explanation.said[-1].startswith(words)
    assert explanation.facts["endpoint"] == "/v1/messages"
    assert explanation.facts.get("delivered") is (True if end.get("delivered") else None)


def test_a_rejected_request_is_explained_completely() -> None:
    """Limit, values, factor, the number of further rejections, and advice."""
    explanation = explain_request(ID, None, None, REJECTION, [])

    assert explanation.found == "refused"
    assert explanation.said == [
        (
            f"Rejected with reduced_capacity at {BEGAN:%Y-%m-%d %H:%M:%S} UTC by the customer's limit over all its keys: "
            "38.1 requests/s (burst 7) in force, 0.25 left."
        ),
        "The limits of tier free were at 38 % of their base; its base limit would have accepted the request.",
        "12 more requests of the customer rejected for the same reason within a quarter of a second.",
        (
            "What to do: The customer did nothing wrong: its limits rise again with more GPUs or less demand. The "
            "response said to retry after 75 ms."
        ),
    ]
    assert explanation.facts["rate"] == 38.1
    assert "quota" not in explanation.facts


def test_the_text_and_the_json_of_a_request() -> None:
    """Timeline and audit fields, without those that are not known."""
    explanation = explain_request(ID, row(), None, None, ["x"])
    lines, document = request_lines(explanation), json.loads(as_json(explanation))
    start = BEGAN.isoformat(timespec="milliseconds")

    assert lines[0] == ID
    assert f"{start}  accepted   after 0 ms" in lines
    assert [line.split()[1] for line in lines if line.startswith(start[:10])] == ["accepted", "batched", "completed"]
    assert "worker_id    w7" in lines
    assert not [line for line in lines if line.startswith("gpu_ms")]
    assert (document["request_id"], document["found"], document["not_read"]) == (ID, "accepted", ["x"])
    assert document["facts"]["batch_id"] == "b1"
    assert [event["event"] for event in document["timeline"]] == ["accepted", "batched", "completed"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [(new_request_id(), True), ("acme", False), ("req_", False), ("req_acme", False), (ID.removeprefix("req_"), False)],
    ids=range(5),
)
def test_requests_are_told_from_customers_by_the_form_of_the_id(text: str, expected: bool) -> None:
    """Anything else is the name or the id of a customer."""
    assert is_request_id(text) is expected
