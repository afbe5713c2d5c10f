"""Alerts at shares of quotas in PostgreSQL: add, claim, record attempts to send them, read.

Each function is one statement on a connection, so it takes effect as a whole or not at all. All raise what asyncpg raises.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from ledger.catalog.webhook_secret import WebhookSecrets
from ledger.postgres import Connection, statement
from ratelimit.quotas import key_of, quota_name, without_key

CUSTOMER, INSTALLATION = "customer", "installation"
"""Where alerts are sent: to the URL of the customer, and to that of the installation."""


class NewAlert(NamedTuple):
    """A share of a quota that a customer reached in a period; amounts in the smallest parts of the quota's unit.

    `pending`: where it has to be sent, separated by commas.
    """

    id: str
    customer_id: str
    tier: str
    quota: str
    period: int
    period_start: datetime
    period_end: datetime
    share: float
    amount: int
    used: int
    pending: str


class ClaimedAlert(NamedTuple):
    """An alert that this gateway sends, with the name, the URL and the numbers of the valid webhook secrets of its customer."""

    id: str
    customer_id: str
    customer: str
    url: str | None
    quota: str
    period_start: datetime
    period_end: datetime
    share: float
    amount: int
    used: int
    reached_at: datetime
    pending: Sequence[str]
    tries: int
    secrets: Sequence[int]


class CustomerAlert(msgspec.Struct, frozen=True):
    """An alert as its customer sees it. `quota`: the period, and its unit if that is not requests, such as month-usd; `key_id`: the
    API key whose quota it is, null: the customer's.
    """

    quota: str
    key_id: str | None
    share: float
    reached_at: datetime
    period_end: datetime


async def add_alerts(connection: Connection, alerts: Sequence[NewAlert]) -> set[str]:
    """Add alerts. Returns the ids of those that did not exist."""
    rows = await connection.fetch(statement("add_alerts"), *zip(*alerts, strict=True))
    return {row["id"] for row in rows}


async def claim_alerts(connection: Connection, limit: int, lease_s: float) -> list[ClaimedAlert]:
    """Claim alerts that are due. Unless the attempt is recorded, they are due again after `lease_s`."""
    rows = await connection.fetch(statement("claim_alerts"), limit, lease_s)
    return [ClaimedAlert(*[*row[:13], WebhookSecrets(*row[13:16]).valid(row[16])]) for row in rows]


async def record_alert_attempt(
    connection: Connection, alert_id: str, pending: Sequence[str], retry_s: float | None
) -> None:
    """Record an attempt: where the alert is still to be sent, and when. None: not again."""
    await connection.execute(statement("record_alert_attempt"), alert_id, pending, retry_s)


async def customer_alerts(connection: Connection, customer_id: str) -> list[CustomerAlert]:
    """The alerts of a customer in the present periods of its quotas, by quota and share."""
    rows = await connection.fetch(statement("customer_alerts"), customer_id)
    return [CustomerAlert(quota_name(without_key(quota)), key_of(quota) or None, *others) for quota, *others in rows]
