"""What `GET /v1/me` says of limits and what is left of them."""

from customer_limits import remaining
from gateway.api.account import limits_document, remaining_document
from identities import identity
from ratelimit.limits import Level, effective


def test_limits_are_told_as_agreed_and_as_they_are() -> None:
    """Base and effective side by side, null where there is none, and the reason where they differ."""
    who = identity(tokens_per_minute=None, max_concurrency=0)
    document = limits_document(who, effective(who, 0.25), 0.25)

    assert document["base"] == {
        "requests_per_second": 2.0,
        "burst": 10.0,
        "tokens_per_minute": None,
        "max_concurrency": None,
    }
    assert document["effective"] == document["base"] | {"requests_per_second": 0.5, "burst": 2.5}
    assert document["factor"] == 0.25
    assert document["reason"].startswith("Tier free has 25 % of its limits, because")


def test_there_is_no_reason_where_nothing_is_lowered() -> None:
    """At full capacity the effective limits are the base limits."""
    who = identity(tokens_per_minute=600, key_rate=1.0, key_burst=3.0)
    document = limits_document(who, effective(who), 1.0)

    assert "reason" not in document
    assert document["effective"] == document["base"]
    assert document["base"] == {
        "requests_per_second": 1.0,
        "burst": 3.0,
        "tokens_per_minute": 600,
        "max_concurrency": 5,
    }


def test_what_is_left_is_told_in_whole_units() -> None:
    """Never below zero, never above the limit, null where there is no limit or nothing is known."""
    limits = effective(identity(tokens_per_minute=600, quotas=(("1day", 9), ("1month", 90))))

    known = remaining_document(limits, remaining(11.9, tokens=Level(-5.0, 0), in_use=2, quotas=((3, 1000), (40, 9000))))
    assert known == {
        "requests": 10,
        "tokens": 0,
        "concurrency": 3,
        "quotas": [
            {"quota": "day", "amount": 9, "remaining": 3, "reset_ms": 1000},
            {"quota": "month", "amount": 90, "remaining": 40, "reset_ms": 9000},
        ],
    }
    unknown = remaining_document(limits, remaining(1.0, tokens=Level(0.0, 0)))
    assert [quota["remaining"] for quota in unknown["quotas"]] == [None, None]
