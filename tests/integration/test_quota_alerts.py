"""Alerts of quotas in PostgreSQL and to a real receiver: stored once, sent until they are accepted, metered use from the audit."""

import asyncio
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

import asyncpg
import pytest

from configs import job_config
from gateway.alerts import service
from gateway.alerts.service import QuotaAlerts
from gateway.jobs.webhook_security import customer_key, installation_key, secret_bytes, signed
from gateway.limits.quota_uses import QuotaUses
from gateway.metrics.counters import Counters
from integration.ledger_fixtures import database_url, db, postgres_server
from integration.test_jobs_callbacks import SECRET, Receiver, receiver
from ledger.catalog.follower import Catalog
from ledger.catalog.loader import load
from ledger.catalog.snapshot import Snapshot
from ledger.postgres import statement
from ratelimit.limits import EffectiveLimits, RemainingLimits
from ratelimit.periods import window_number
from scheduler.protocol.admission import SubmissionGroup, Verdict
from scheduler.states import Admission

__all__ = ["database_url", "db", "postgres_server", "receiver"]

Db = asyncpg.Connection
RESET_MS = 60_000


@dataclass
class FixedCatalog:
    """A catalog as it was read once."""

    snapshot: Snapshot | None


@dataclass
class Bench:
    """A customer with quotas, and gateways' alerts of it, which do not run by themselves."""

    db: "Db[asyncpg.Record]"
    url: str
    receiver: Receiver
    customer_id: str

    async def alerts(self, **changes: Any) -> tuple[QuotaAlerts, QuotaUses]:
        """The alerts of one more gateway, with the catalog as it is now; `changes` of its JobConfig."""
        uses, catalog = QuotaUses(), cast("Catalog", FixedCatalog(await load(self.db)))
        changes = {"alert_url": self.receiver.url.replace("hook", "all")} | changes
        jobs = job_config(self.url, **self.receiver.jobs(**changes))
        return QuotaAlerts(jobs, catalog, uses, Counters()), uses

    async def used(self, uses: QuotaUses, *left: int, in_use: int = 1) -> None:
        """Admission reports so much left of each quota, in periods that end soon."""
        snapshot = await load(self.db)
        limits = EffectiveLimits((), quotas=snapshot.customers[self.customer_id].quotas)
        reported = RemainingLimits(in_use=in_use, quotas=[(each, RESET_MS) for each in left])
        group = SubmissionGroup("paid", self.customer_id, "k" * 12, "tiny", limits)
        uses.note(group, Verdict(Admission.ACCEPTED, reported))

    async def rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in await self.db.fetch("SELECT * FROM quota_alerts ORDER BY quota, share")]

    async def due(self) -> None:
        await self.db.execute("UPDATE quota_alerts SET due_at = clock_timestamp() WHERE due_at IS NOT NULL")


async def step(alerts: QuotaAlerts, name: str) -> None:
    """One turn of a loop."""
    await alerts._with_quotas(getattr(alerts, f"_{name}"))


@pytest.fixture
async def bench(db: "Db[asyncpg.Record]", database_url: str, receiver: Receiver) -> Bench:
    insert = "INSERT INTO customers (name, tier, alert_url) VALUES ('acme', 'paid', $1) RETURNING id::text"
    customer_id = await db.fetchval(insert, receiver.url)
    await db.execute("INSERT INTO quotas (customer_id, quota) VALUES ($1::text::uuid, '10/month')", customer_id)
    return Bench(db, database_url, receiver, customer_id)


async def test_several_gateways_store_one_alert_and_one_sends_it(bench: Bench) -> None:
    """To both receivers, signed with the secret of each; nothing is sent twice without a crash."""
    gateways = [await bench.alerts() for _ in range(3)]
    for _, uses in gateways:
        await bench.used(uses, 1)
    await asyncio.gather(*(step(alerts, "store") for alerts, _ in gateways))
    await asyncio.gather(*(step(alerts, "send") for alerts, _ in gateways))
    for alerts, uses in gateways:
        await bench.used(uses, 0)
        await step(alerts, "store")
        await step(alerts, "send")
        await alerts.close()

    rows = await bench.rows()
    assert [(row["share"], row["used"], row["pending"], row["due_at"]) for row in rows] == [
        (0.8, 9, [], None),
        (1.0, 10, [], None),
    ]
    assert len(bench.receiver.calls) == 4
    secret = secret_bytes(SECRET)
    for (headers, body), n in zip(bench.receiver.calls, range(4), strict=True):
        keys = [customer_key(secret, bench.customer_id), installation_key(secret)]
        at, event = int(headers["webhook-timestamp"]), headers["webhook-id"]
        genuine = [headers["webhook-signature"] == signed([key], event, at, body)["webhook-signature"] for key in keys]
        assert (sum(genuine), event) == (1, rows[n // 2]["id"])
        assert json.loads(body)["data"]["share"] == rows[n // 2]["share"]


async def test_a_quota_of_a_key_has_alerts_of_its_own(bench: Bench) -> None:
    """They name the key. Its tokens are read from the audit, also while another key of the customer is used."""
    keys = [(await bench.db.fetchval("SELECT issue_api_key('acme', $1)", name))[3:15] for name in ("one", "two")]
    await bench.db.execute("UPDATE api_keys SET quotas = '{100 tokens/month}'")
    await bench.db.execute("INSERT INTO models (name) VALUES ('served')")
    await bench.db.execute(
        "INSERT INTO requests (id, created_at, customer_id, api_key_id, tier, model, status, tokens_used) "
        "SELECT 'req_' || lpad('1', 32, '0'), now(), id, $1, 'paid', 'served', 'completed', 90 FROM customers",
        keys[0],
    )
    alerts, uses = await bench.alerts(alert_url=None)
    snapshot = await load(bench.db)
    for key, left in zip(keys, (5, 99), strict=True):
        limits = EffectiveLimits((), quotas=snapshot.keys[key].identity.quotas, metered=True)
        reported = RemainingLimits(in_use=1, quotas=[(7, RESET_MS), (left, RESET_MS)])
        group = SubmissionGroup("paid", bench.customer_id, key, "served", limits)
        uses.note(group, Verdict(Admission.ACCEPTED, reported))
    for name in ("store", "read_audit", "store", "send"):
        await step(alerts, name)

    assert [(row["quota"], row["used"], row["share"]) for row in await bench.rows()] == [
        (f"1month:tokens@{keys[0]}", 90, 0.8)
    ]
    ((_, body),) = bench.receiver.calls
    data = json.loads(body)["data"]
    assert (data["key_id"], data["quota"], data["unit"], data["amount"]) == (keys[0], "month", "tokens", 100)
    await alerts.close()


async def test_alerts_are_signed_with_each_valid_secret(bench: Bench) -> None:
    """After a rotation, as callbacks are: with the new secret, and with the earlier ones until their end."""
    columns = "webhook_secret = 3, webhook_secret_oldest = 2, webhook_secret_until = now() + interval '1 hour'"
    await bench.db.execute(f"UPDATE customers SET {columns}")
    alerts, uses = await bench.alerts(alert_url=None)
    await bench.used(uses, 2)
    await step(alerts, "store")
    await step(alerts, "send")

    ((headers, body),) = bench.receiver.calls
    keys = [customer_key(secret_bytes(SECRET), bench.customer_id, number) for number in (3, 2)]
    expected = signed(keys, headers["webhook-id"], int(headers["webhook-timestamp"]), body)
    assert headers["webhook-signature"] == expected["webhook-signature"]
    await alerts.close()


async def test_a_failed_receiver_gets_the_same_event_again(bench: Bench) -> None:
    """Only the receiver that has not accepted it; after a crash of the sender, when its claim has ended."""
    bench.receiver.statuses = [500, 204, 503, 204]
    alerts, uses = await bench.alerts()
    await bench.used(uses, 2)
    await step(alerts, "store")
    await step(alerts, "send")
    (row,) = await bench.rows()
    assert (row["pending"], row["tries"], row["due_at"] is None) == (["customer"], 1, False)

    await step(alerts, "send")
    assert len(bench.receiver.calls) == 2  # It is not due yet.
    await bench.due()
    await step(alerts, "send")
    await bench.due()
    await step(alerts, "send")

    (row,) = await bench.rows()
    assert (row["pending"], row["tries"], row["due_at"]) == ([], 3, None)
    assert len({headers["webhook-id"] for headers, _ in bench.receiver.calls}) == 1
    assert len(bench.receiver.calls) == 4
    await alerts.close()


async def test_410_and_the_last_attempt_end_an_alert(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays as not sent."""
    monkeypatch.setattr(service, "DELAYS_S", (1.0,))
    bench.receiver.statuses = [204, 500, 410]
    await bench.db.execute("UPDATE customers SET alert_url = NULL")
    await bench.db.execute("UPDATE quotas SET alert_shares = ARRAY[0.1, 0.2, 0.3]")
    alerts, uses = await bench.alerts()
    for left in (9, 8):
        await bench.used(uses, left)
        await step(alerts, "store")
        await step(alerts, "send")
    await bench.used(uses, 7)
    await step(alerts, "store")
    await step(alerts, "send")
    await bench.due()
    await step(alerts, "send")

    rows = await bench.rows()
    assert [(row["share"], row["pending"], row["tries"], row["due_at"]) for row in rows] == [
        (0.1, [], 1, None),
        (0.2, ["installation"], 2, None),
        (0.3, ["installation"], 1, None),
    ]
    await alerts.close()


@pytest.mark.parametrize(
    ("change", "jobs"),
    [
        ("UPDATE customers SET callback_hosts = 'hooks.example.com'", {}),
        ("UPDATE customers SET callback_hosts = NULL", {"callback_hosts": ()}),
        ("UPDATE customers SET callback_hosts = NULL", {"private_addresses": False}),
        ("UPDATE customers SET alert_url = 'http://elsewhere.example.com/'", {}),
    ],
)
async def test_urls_are_checked_as_those_of_callbacks(bench: Bench, change: str, jobs: dict[str, Any]) -> None:
    """When the alert is sent: a host that is not allowed, or a private address, gets nothing. That of the installation may be private."""
    await bench.db.execute(change)
    alerts, uses = await bench.alerts(**jobs)
    await bench.used(uses, 2)
    await step(alerts, "store")
    await step(alerts, "send")

    (row,) = await bench.rows()
    assert row["pending"] == ["customer"]
    assert len(bench.receiver.calls) == 1
    await alerts.close()


async def test_without_a_secret_alerts_are_stored_and_not_sent(bench: Bench) -> None:
    """They could not be signed."""
    alerts, uses = await bench.alerts(callback_secret=b"")
    await bench.used(uses, 2)
    await step(alerts, "store")
    await step(alerts, "send")

    assert [(row["pending"], row["due_at"]) for row in await bench.rows()] == [([], None)]
    assert bench.receiver.calls == []
    await alerts.close()


async def test_the_use_of_a_metered_quota_is_that_of_the_audit(bench: Bench) -> None:
    """Reservations raise no alert; the tokens of requests that have ended do."""
    await bench.db.execute("DELETE FROM quotas")
    await bench.db.execute("INSERT INTO quotas (tier, quota) VALUES ('paid', '1000 tokens/month')")
    add = (
        "INSERT INTO requests (id, created_at, customer_id, api_key_id, tier, model, status, tokens_used) "
        "VALUES ($1, clock_timestamp(), $2::text::uuid, 'k', 'paid', 'tiny', 'completed', $3)"
    )
    alerts, uses = await bench.alerts()
    await bench.db.execute(add, f"req_{1:032x}", bench.customer_id, 300)
    await bench.used(uses, 10)
    for name in ("store", "read_audit", "store"):
        await step(alerts, name)
    assert await bench.rows() == []

    await bench.db.execute(add, f"req_{2:032x}", bench.customer_id, 520)
    for owner, unread in alerts._detection._unread.items():
        alerts._detection._unread[owner] = unread._replace(next_read=0.0)
    for name in ("read_audit", "store"):
        await step(alerts, name)
    (row,) = await bench.rows()
    now = datetime.now(UTC)
    assert (row["quota"], row["share"], row["used"], row["amount"]) == ("1month:tokens", 0.8, 820, 1000)
    assert (row["period"], row["period_start"].day) == (window_number("1month", now), 1)
    await alerts.close()


async def test_old_alerts_are_kept_until_their_period_is_long_over(bench: Bench) -> None:
    """Else the alert of a quota of a year would be raised again."""
    add = (
        "INSERT INTO quota_alerts (id, customer_id, tier, quota, period, period_start, period_end, share, amount, used, reached_at) "
        "VALUES ($1, $2::text::uuid, 'paid', '1year', 1, $3, $4, 0.8, 10, 8, now() - interval '200 days')"
    )
    old = datetime(2026, 1, 1, tzinfo=UTC)
    await bench.db.execute(add, "over", bench.customer_id, old, datetime(2026, 2, 1, tzinfo=UTC))
    await bench.db.execute(
        add.replace("1, $3", "2, $3"), "open", bench.customer_id, old, datetime(2100, 1, 1, tzinfo=UTC)
    )
    await bench.db.execute(statement("delete_old_alerts"), 30, 100)

    assert [row["id"] for row in await bench.rows()] == ["open"]
