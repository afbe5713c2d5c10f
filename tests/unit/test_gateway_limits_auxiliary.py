"""The limit on requests that run no model: whose limit it is, parts of several gateways, rejections, and bounds."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from customer_limits import with_values
from gateway.limits.auxiliary import AuxiliaryLimitReached, AuxiliaryLimits
from identities import identity
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Identity, Snapshot, Tier
from ratelimit.headers import rate_headers
from ratelimit.limits import RemainingLimits, effective
from scheduler.errors import ErrorCode


class Limited:
    """The limits of a gateway at a time that the test sets."""

    def __init__(self, gateways: int = 1, max_buckets: int = 10, **of_tier: Any) -> None:
        fields = {"requests_per_second": 100.0, "burst": 100.0, "max_concurrency": 9, "tokens_per_minute": None}
        row = {"name": "free", "priority": 3, "guaranteed_share": 0.1, "max_queue_depth": 9, "max_queue_ms": 9}
        tier = Tier(**with_values(fields | row | {"shed_depth": None, "shed_wait_ms": None} | of_tier))
        self.now = 5.0
        self.rejected: list[str] = []
        self.limits = AuxiliaryLimits(
            cast("Catalog", SimpleNamespace(snapshot=Snapshot(1, (tier,), {}, {}, {}, ()))),
            gateways=lambda: gateways,
            headers=lambda caller: rate_headers(effective(caller), RemainingLimits([(10.0, 0)])),
            rejected=self.rejected.append,
            clock=lambda: self.now,
            max_buckets=max_buckets,
        )

    def admitted(self, caller: Identity, count: int) -> int:
        """How many of so many requests are admitted now."""
        return sum(self.error(caller) is None for _ in range(count))

    def error(self, caller: Identity) -> AuxiliaryLimitReached | None:
        try:
            self.limits.charge(caller)
        except AuxiliaryLimitReached as error:
            return error
        return None


@pytest.mark.parametrize(
    ("of_tier", "gateways", "caller", "at_once", "after_2_s"),
    [
        ({}, 1, {}, 10, 4),  # As the customer's requests.
        ({"auxiliary_rate": 0.5}, 1, {}, 10, 1),
        ({"auxiliary_burst": 3.0}, 1, {}, 3, 3),
        ({"auxiliary_rate": 0.5, "auxiliary_burst": 3.0}, 1, {}, 3, 1),
        ({"auxiliary_rate": 50.0, "auxiliary_burst": 99.0}, 1, {}, 10, 4),  # Never more than the customer's.
        ({}, 1, {"key_rate": 1.0, "key_burst": 4.0}, 4, 2),
        ({"auxiliary_rate": 0.5, "auxiliary_burst": 3.0}, 1, {"key_rate": 1.0, "key_burst": 4.0}, 3, 1),
        ({}, 2, {}, 5, 2),
        ({}, 4, {"burst": 2.0}, 1, 1),  # At least one request.
        ({}, 0, {}, 10, 4),
        ({"shadow": True}, 1, {}, 40, 40),
        ({}, 1, {"tier": "gone"}, 40, 40),
    ],
)
def test_the_lowest_limit_counts(
    of_tier: dict[str, Any], gateways: int, caller: dict[str, Any], at_once: int, after_2_s: int
) -> None:
    """That of the tier, of the customer's requests (2/s, burst 10) or of the key's, in equal parts for all gateways."""
    limited, who = Limited(gateways, **of_tier), identity(**caller)

    assert limited.admitted(who, 40) == at_once
    limited.now += 2.0
    assert limited.admitted(who, 40) == after_2_s


def test_customers_are_apart_and_their_keys_are_not() -> None:
    """A key without a limit of its own shares that of its customer; a rejection by one bucket spends nothing of the other."""
    limited = Limited()
    small = identity(key_id="small", key_rate=1.0, key_burst=4.0)

    assert limited.admitted(small, 9) == 4
    assert limited.admitted(identity(key_id="other"), 9) == 6
    assert limited.admitted(identity(customer_id="d"), 9) == 9


@pytest.mark.parametrize(
    ("caller", "message"),
    [
        (
            {},
            "The rate limit of this account for requests that run no model, 2 auxiliary requests/s (burst 10), is reached.",
        ),
        (
            {"key_rate": 1.0, "key_burst": 4.0},
            "The rate limit of this API key for requests that run no model, 1 auxiliary requests/s (burst 4), is reached.",
        ),
    ],
)
def test_a_rejection_says_when_and_what(caller: dict[str, Any], message: str) -> None:
    """A request after the wait is admitted, one before it is not; the limit is one more policy of the headers."""
    limited, who = Limited(gateways=2), identity(**caller)
    admitted = limited.admitted(who, 10)
    limited.now += 0.125
    error = limited.error(who)

    assert error is not None
    assert (error.code, error.message, error.violated) == (
        ErrorCode.RATE_LIMIT_EXCEEDED,
        message,
        ("auxiliary-requests",),
    )
    assert limited.rejected == ["free"] * (11 - admitted)
    headers = dict(error.headers or ())
    assert headers["RateLimit-Policy"].count('"auxiliary-requests";q=') == 1
    assert '"auxiliary-requests";r=0;t=' in headers["RateLimit"]
    assert headers["x-ratelimit-remaining-requests"] != "0"
    wait_s = (error.retry_after_ms or 0) / 1000
    limited.now += wait_s - 0.002
    assert limited.admitted(who, 2) == 0
    limited.now += 0.003
    assert limited.admitted(who, 2) == 1


def test_buckets_are_bounded() -> None:
    """The least recently used one is dropped."""
    limited, busy = Limited(max_buckets=3), identity(customer_id="busy")
    assert limited.admitted(busy, 20) == 10
    for number in range(20):
        assert limited.admitted(identity(customer_id=str(number)), 1) == 1
        assert limited.admitted(busy, 1) == 0

    assert len(limited.limits) == 3
