"""Which alerts a gateway raises from what admission reports, and from the audit."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gateway.alerts.detection import NEAR, READ_EVERY_S, READ_FOR_S, AlertDetection
from gateway.limits.quota_uses import QuotaUse, QuotaUses
from ledger.alerts import NewAlert
from ledger.catalog.snapshot import Customer
from ratelimit.alerts import event_id, has_alerts, reached
from ratelimit.limits import EffectiveLimits, RemainingLimits
from ratelimit.periods import window_number
from scheduler.protocol.admission import SubmissionGroup, Verdict
from scheduler.protocol.limits import QuotaSpent
from scheduler.states import Admission

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
DAY_MS = 86_400_000


def customer(*quotas: tuple[str, int], **changes: Any) -> Customer:
    return Customer("c1", "acme", "paid", False, (1.0, 1.0, 1, None), None, quotas, **changes)


def use(who: Customer, *left: int, reset_ms: int = DAY_MS // 2, spent: Sequence[str] = ()) -> QuotaUse:
    remaining = RemainingLimits(quotas=[(each, reset_ms) for each in left])
    return QuotaUse(who.id, EffectiveLimits((), quotas=who.quotas, zone=who.zone), remaining, frozenset(spent))


def found(detection: AlertDetection, who: Customer, seen: QuotaUse, wall: datetime = NOON) -> list[NewAlert]:
    return list(detection.from_admission(who, seen, 0.0, wall, "customer"))


@pytest.mark.parametrize(
    ("left", "shares", "expected"),
    [
        (21, None, []),
        (20, None, [0.8]),
        (0, None, [0.8, 1.0]),
        (0, (), []),
        (50, (0.5, 0.9), [0.5]),
        (9, (0.5, 0.9), [0.5, 0.9]),
        (0, (0.5, 0.9), [0.5, 0.9]),
    ],
)
def test_the_shares_of_a_quota_of_requests(left: int, shares: tuple[float, ...] | None, expected: list[float]) -> None:
    """At 0.8 and 1, or at the shares of its row; an empty list is none. Each has the period, and an id of its own."""
    own = () if shares is None else (("1day", shares),)
    who = customer(("1day", 100), alert_shares=own)
    alerts = found(AlertDetection(), who, use(who, left))

    assert [alert.share for alert in alerts] == expected
    assert {(a.period_start, a.period_end) for a in alerts} <= {
        (datetime(2026, 11, 30, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC))
    }
    assert [a.id for a in alerts] == [event_id("c1", "1day", window_number("1day", NOON), share) for share in expected]


def test_an_alert_that_is_stored_is_not_raised_again_in_its_period() -> None:
    """It is, with another id, in the next one."""
    detection, who = AlertDetection(), customer(("1day", 100))
    first = found(detection, who, use(who, 10))
    detection.stored(alert.id for alert in first)

    assert found(detection, who, use(who, 5)) == []
    later = found(detection, who, use(who, 10), NOON + timedelta(days=1))
    assert ([a.share for a in later], later[0].id != first[0].id) == ([0.8], True)


@pytest.mark.parametrize("minutes", [-300, -5, 5, 300])
def test_clocks_that_differ_do_not_change_the_id(minutes: int) -> None:
    """The period is that which ends when Redis said, with an error of less than half a period."""
    who = customer(("1day", 100))
    ids = {found(AlertDetection(), who, use(who, 0), NOON + timedelta(minutes=m))[1].id for m in (0, minutes)}

    assert len(ids) == 1


def test_the_period_is_that_of_the_zone() -> None:
    """At 03:00 UTC it is still the day before in New York, which ends at 05:00 UTC."""
    who = customer(("1day", 100), zone="America/New_York")
    (alert,) = found(AlertDetection(), who, use(who, 20, reset_ms=2 * 3_600_000), datetime(2026, 11, 30, 3, tzinfo=UTC))

    assert (alert.period_start, alert.period_end) == (
        datetime(2026, 11, 29, 5, tzinfo=UTC),
        datetime(2026, 11, 30, 5, tzinfo=UTC),
    )


def test_short_periods_have_no_alerts() -> None:
    """From an hour on they have."""
    assert [has_alerts(name) for name in ("59minute", "60minute", "1hour", "1day:usd", "9decade")] == [
        False,
        True,
        True,
        True,
        False,
    ]
    who = customer(("1minute", 100), ("30second", 100))
    assert found(AlertDetection(), who, use(who, 0, 0)) == []


def test_reservations_of_metered_quotas_are_checked_with_the_audit() -> None:
    """What requests in progress reserve may be more than they cost. The audit is read every few seconds, for a minute."""
    detection, who = AlertDetection(), customer(("1day:tokens", 1000), ("1day", 1000))
    assert found(detection, who, use(who, int(1000 - NEAR * 800) + 1, 1000)) == []
    assert detection.to_read(0.0) == {}
    assert found(detection, who, use(who, 0, 1000)) == []

    assert detection.to_read(0.0) == {"c1": (("1day:tokens", 1000),)}
    assert detection.to_read(READ_EVERY_S - 1) == {}
    assert detection.to_read(READ_EVERY_S) != {}
    number = window_number("1day", NOON)
    spent = [QuotaSpent("c1", "1day:tokens", number, 0, DAY_MS, 850)]
    (alert,) = detection.from_audit({"c1": who}, spent, {"c1": ""})
    assert (alert.share, alert.used, alert.period) == (0.8, 850, number)
    assert detection.to_read(READ_FOR_S + 1) == {}


def test_a_rejection_with_no_request_in_progress_shows_that_a_metered_quota_is_used_up() -> None:
    """Though its use is below the amount: what is left does not suffice for a request."""
    uses, who = QuotaUses(), customer(("1day:usd", 1000))
    limits = EffectiveLimits((), quotas=who.quotas)
    group = SubmissionGroup("paid", "c1", "k1", "tiny", limits)
    left = RemainingLimits(in_use=0, quotas=[(30, DAY_MS // 2)])
    uses.note(group, Verdict(Admission.QUOTA, left, quotas=("1day:usd",)))
    uses.note(group, Verdict(Admission.KEY_LIMIT, left))
    (taken,) = uses.take()
    alerts = found(AlertDetection(), who, taken)

    assert [(alert.share, alert.used) for alert in alerts] == [(0.8, 970), (1.0, 970)]
    assert uses.take() == []
    uses.note(group, Verdict(Admission.QUOTA, left._replace(in_use=3), quotas=("1day:usd",)))
    uses.note(group, Verdict(Admission.ACCEPTED))  # Of a call without limits, nothing is known.
    assert [each.spent for each in uses.take()] == [frozenset()]


def test_customers_of_several_cells_are_checked_with_the_audit() -> None:
    """A cell knows only what it was granted."""
    detection, who = AlertDetection(), customer(("1day", 100), spread=3)

    assert found(detection, who, use(who, 0)) == []
    assert detection.to_read(0.0) == {"c1": (("1day", 100),)}


def test_shares_are_reached_exactly() -> None:
    """80 of 100 are a share of 0.8; so are 7 one of 0.07, whatever binary fractions are."""
    assert reached((1.0, 0.8), 100, 80) == [0.8]
    assert reached((0.07,), 100, 7) == [0.07]
    assert reached((0.8,), 100, 79) == []
