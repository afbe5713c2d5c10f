"""Rate-limit headers: the draft's fields and the form of OpenAI's clients."""

from typing import Any

import pytest

from customer_limits import in_force
from ratelimit.headers import go_duration, rate_headers
from ratelimit.limits import EffectiveLimits, RemainingLimits


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0s"),
        (12, "12ms"),
        (1000, "1s"),
        (59_999, "59.999s"),
        (360_000, "6m0s"),
        (86_400_000, "24h0m0s"),
    ],
)
def test_durations_have_the_format_of_go(milliseconds: int, text: str) -> None:
    """OpenAI's clients parse it in x-ratelimit-reset-*."""
    assert go_duration(milliseconds) == text


@pytest.mark.parametrize(
    ("limits", "left", "policy", "limit", "openai"),
    [
        (in_force(10, 20), [(19.9, 50)], '"requests";q=20;w=2', '"requests";r=19;t=1', ("20", "19", "50ms")),
        (in_force(0.5, 1), [(0.2, 1600)], '"requests";q=1;w=2', '"requests";r=0;t=2', ("1", "0", "1.6s")),
        (in_force(0, 1), [(0, 86_400_000)], '"requests";q=1;w=1', '"requests";r=0;t=86400', ("1", "0", "24h0m0s")),
        (in_force(5, 7.5), [(99, -3)], '"requests";q=7;w=2', '"requests";r=7;t=0', ("7", "7", "0s")),
        # The smaller of the key's own limit and the customer's is announced.
        (in_force(100, 200, key_rate=2.0, key_burst=4.0), [(3, 500)], '"requests";q=4;w=2', None, ("4", "3", "500ms")),
        (
            in_force(10, 20, key_rate=100.0, key_burst=200.0),
            [(30, 500)],
            '"requests";q=20;w=2',
            None,
            ("20", "20", None),
        ),
    ],
)
def test_request_limits(
    limits: EffectiveLimits, left: list[Any], policy: str, limit: str | None, openai: tuple[str | None, ...]
) -> None:
    """Bucket size, whole requests left, and the time until the bucket is full, in both forms."""
    sent = dict(rate_headers(limits, RemainingLimits(left)))

    assert sent["RateLimit-Policy"] == policy
    assert limit in (None, sent["RateLimit"])
    for name, expected in zip(("limit", "remaining", "reset"), openai, strict=True):
        assert expected in (None, sent[f"x-ratelimit-{name}-requests"])
    assert not any(name.endswith("-tokens") for name in sent)


def test_each_limit_is_an_item() -> None:
    """Requests, tokens, concurrency and quotas by the names of their policies; tokens in OpenAI's form as well."""
    limits = in_force(
        10, 20, tokens_per_minute=6000.0, max_concurrency=5, quotas=(("1week", 1000), ("2month", 9), ("1hour@k1", 50))
    )
    left = RemainingLimits([(3.0, 1700), (1500.7, 44_990)], 2, ((998, 3_600_001), (9, 1000), (-1, 0)))
    sent = dict(rate_headers(limits, left))

    assert sent["RateLimit-Policy"] == (
        '"requests";q=20;w=2, "tokens";q=6000;qu="tokens";w=60, "concurrency";q=5;qu="concurrent-requests", '
        '"week";q=1000;w=604800, "2months";q=9;w=5356800, "key-hour";q=50;w=3600'
    )
    assert sent["RateLimit"] == (
        '"requests";r=3;t=2, "tokens";r=1500;t=45, "concurrency";r=3, '
        '"week";r=998;t=3601, "2months";r=9;t=1, "key-hour";r=0;t=0'
    )
    tokens = {name: sent[f"x-ratelimit-{name}-tokens"] for name in ("limit", "remaining", "reset")}
    assert tokens == {"limit": "6000", "remaining": "1500", "reset": "44.99s"}


def test_quotas_of_other_units_name_them() -> None:
    """In whole milliseconds of GPU time, tokens, and millionths of USD."""
    quotas = (("1day:gpu", 3_600_000_000), ("1day:tokens", 1000), ("2month:usd", 100_000_000))
    left = RemainingLimits([(3.0, 0)], 0, ((1_500_999, 1000), (10, 1000), (999_999, 1000)))
    sent = dict(rate_headers(in_force(10, 20, quotas=quotas), left))

    assert sent["RateLimit-Policy"].partition(", ")[2] == (
        '"day-gpu";q=3600000;qu="gpu-ms";w=86400, "day-tokens";q=1000;qu="tokens";w=86400, '
        '"2months-usd";q=100000;qu="usd-micros";w=5356800'
    )
    assert (
        sent["RateLimit"].partition(", ")[2] == '"day-gpu";r=1500;t=1, "day-tokens";r=10;t=1, "2months-usd";r=999;t=1'
    )


def test_debt_and_unknown_quotas() -> None:
    """A negative bucket has 0 left; a quota of unknown state has a policy but no remaining amount."""
    limits = in_force(1, 1, tokens_per_minute=60.0, quotas=(("1day", 7),))
    sent = dict(rate_headers(limits, RemainingLimits([(1, 0), (-50.0, 110_000)], 9)))

    assert sent["RateLimit-Policy"].endswith(', "day";q=7;w=86400')
    assert sent["RateLimit"] == '"requests";r=1;t=0, "tokens";r=0;t=110'


def test_numbers_have_15_digits_at_most() -> None:
    """A strict parser of structured fields would drop the whole header otherwise."""
    limits = in_force(5e-324, 1e7, tokens_per_minute=2.0**63)
    sent = dict(rate_headers(limits, RemainingLimits([(1e7, 0), (2.0**63, 0)])))

    assert '"requests";q=10000000;w=999999999999999' in sent["RateLimit-Policy"]
    assert '"tokens";q=999999999999999;' in sent["RateLimit-Policy"]
    assert '"tokens";r=999999999999999;' in sent["RateLimit"]
    assert sent["x-ratelimit-limit-tokens"] == sent["x-ratelimit-remaining-tokens"] == "999999999999999"
