"""The body of an alert, in the form of Standard Webhooks."""

from datetime import datetime

import msgspec

from ledger.alerts import ClaimedAlert
from ratelimit.quotas import key_of, period_of, quota_name, shown_amount, unit_of

EVENT = "quota.share_reached"


class AlertData(msgspec.Struct, gc=False):
    """What was reached: `used` of `amount` in `unit` (requests, gpu-s, tokens or usd), `share` 0..1 of a quota of one `period`.
    `key_id`: the API key whose quota it is; null: the customer's.
    """

    customer: str
    customer_id: str
    quota: str
    unit: str
    amount: float
    used: float
    share: float
    period_start: datetime
    period_end: datetime
    key_id: str | None


class AlertBody(msgspec.Struct, gc=False):
    """An event. Its id is in the header `webhook-id`."""

    timestamp: datetime
    data: AlertData
    type: str = EVENT


def alert_body(alert: ClaimedAlert) -> AlertBody:
    """The body of an alert."""
    return AlertBody(
        alert.reached_at,
        AlertData(
            alert.customer,
            alert.customer_id,
            quota_name(period_of(alert.quota)),
            unit_of(alert.quota).word,
            shown_amount(alert.quota, alert.amount),
            shown_amount(alert.quota, alert.used),
            alert.share,
            alert.period_start,
            alert.period_end,
            key_of(alert.quota) or None,
        ),
    )
