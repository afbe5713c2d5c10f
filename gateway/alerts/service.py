"""Alerts of a gateway: it stores the shares of quotas that customers reach, and sends stored alerts as signed webhooks.

The id of an alert is made of customer, quota, period and share, and is the key of its row: however many gateways see that a share
was reached, there is one alert. Any gateway sends it. It claims the row for `LEASE_S`; if it crashes before it has recorded the
attempt, another one sends the alert again, with the same `webhook-id`. So each alert is sent at least once, and a receiver that
remembers ids handles it once.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime

import structlog
from msgspec.structs import replace

from gateway.alerts.detection import AlertDetection
from gateway.alerts.documents import alert_body
from gateway.config import JobConfig
from gateway.host_lists import CallbackHosts
from gateway.http.response import encode_json
from gateway.jobs.callback_url import alert_url_problem
from gateway.jobs.webhook_security import customer_key, installation_key
from gateway.jobs.webhooks import GONE, post_signed, webhook_client
from gateway.limits.quota_uses import QuotaUses
from gateway.metrics.counters import Counters
from ledger.alerts import (
    CUSTOMER,
    INSTALLATION,
    ClaimedAlert,
    NewAlert,
    add_alerts,
    claim_alerts,
    record_alert_attempt,
)
from ledger.audit.quota_restore import quota_spent
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Customer, Snapshot
from ledger.jobs import JobSession
from ledger.postgres import AWAY, Connection, closing, connect
from scheduler.bounded_dict import BoundedDict
from scheduler.errors import TierlaneError
from scheduler.fault_log import LoggedFaults
from scheduler.tasks import Loop

log = structlog.get_logger("gateway")

LOOK_S = 0.5
SEND_EVERY_S = 1.0
LEASE_S = 15.0  # More than the time of an attempt.
MAX_CLAIMED = 32
MAX_NEW = 500
MAX_UNSTORED = 10_000
CONNECT_TIMEOUT_S = 1.0
READ_TIMEOUT_MS = 10_000
DELAYS_S = (2.0, 10.0, 30.0, 120.0, 600.0, 1800.0, 7200.0, 18_000.0, 36_000.0)


class QuotaAlerts:
    """The alerts of one gateway. Without a JobConfig there is no PostgreSQL, and there are none."""

    def __init__(self, jobs: JobConfig | None, catalog: Catalog, uses: QuotaUses, counters: Counters) -> None:
        self._jobs = jobs
        self._catalog = catalog
        self._uses = uses
        self._counters = counters
        self._detection = AlertDetection()
        self._unstored: BoundedDict[str, NewAlert] = BoundedDict(MAX_UNSTORED)
        self._session = None if jobs is None else JobSession(jobs.database_url, "tierlane-alerts")

    def loops(self) -> dict[str, Loop]:
        """The loops to run, by name."""
        loops = {"quota alerts": self.run, "alert audit": self.read, "alert webhooks": self.send}
        return {} if self._jobs is None else loops

    async def run(self) -> None:
        """Store alerts while the catalog has quotas; never returns."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self._with_quotas(self._store)

    async def read(self) -> None:
        """Read the use of metered quotas from the audit, on a connection of its own: it may take long. Never returns."""
        while True:
            await asyncio.sleep(SEND_EVERY_S)
            await self._with_quotas(self._read_audit)

    async def send(self) -> None:
        """Send stored alerts while the catalog has quotas; never returns."""
        while True:
            await asyncio.sleep(SEND_EVERY_S)
            await self._with_quotas(self._send)

    async def close(self) -> None:
        """Store the last alerts and close the connection, after the loops have ended."""
        await self._with_quotas(self._store)
        if self._session is not None:
            await self._session.close()

    async def _with_quotas(self, step: Callable[[JobSession, JobConfig, Snapshot], Awaitable[None]]) -> None:
        snapshot = self._catalog.snapshot
        if (
            self._jobs is None
            or self._session is None
            or snapshot is None
            or not (snapshot.quotas or snapshot.has_key_quotas)
        ):
            return
        with LoggedFaults("alerts of quotas failed"), contextlib.suppress(TierlaneError, *AWAY):
            await step(self._session, self._jobs, snapshot)

    async def _store(self, session: JobSession, jobs: JobConfig, snapshot: Snapshot) -> None:
        """Store the alerts that are new. Raises TierlaneError; then they are stored later."""
        now, wall = time.monotonic(), datetime.now(UTC)
        for use in self._uses.take():
            customer = snapshot.customers.get(use.customer_id)
            if customer is not None:
                pending = _destinations(jobs, customer)
                for alert in self._detection.from_admission(customer, use, now, wall, pending):
                    self._unstored[alert.id] = alert
        alerts = list(self._unstored.values())[:MAX_NEW]
        new = set[str]()
        if alerts:
            new = await session.run(lambda connection: add_alerts(connection, alerts))
        self._detection.stored(alert.id for alert in alerts)
        for alert in alerts:
            self._unstored.pop(alert.id, None)
            if alert.id in new:
                self._counters.quota_alert(alert.tier, alert.share)
                log.info(
                    "quota_share_reached", id=alert.id, customer=alert.customer_id, quota=alert.quota, share=alert.share
                )

    async def _read_audit(self, _: JobSession, jobs: JobConfig, snapshot: Snapshot) -> None:
        """Look for shares that were reached in the audit; they are stored next. Raises what asyncpg raises."""
        customers: dict[str, Customer] = {}
        for customer_id, quotas in self._detection.to_read(time.monotonic()).items():
            customer = snapshot.customers.get(customer_id)
            if customer is not None:
                customers[customer_id] = replace(customer, quotas=quotas)
        if not customers:
            return
        connection = await connect(
            jobs.database_url,
            name="tierlane-alerts-audit",
            connect_timeout_s=CONNECT_TIMEOUT_S,
            statement_timeout_ms=READ_TIMEOUT_MS,
        )
        async with closing(connection):
            # The quotas of keys to be read are among those of the customers.
            some = replace(snapshot, customers=customers, has_key_quotas=False)
            spent = await quota_spent(connection, some, timeout_ms=READ_TIMEOUT_MS)
        pending = {customer_id: _destinations(jobs, customer) for customer_id, customer in customers.items()}
        for alert in self._detection.from_audit(customers, spent, pending):
            self._unstored[alert.id] = alert

    async def _send(self, session: JobSession, jobs: JobConfig, snapshot: Snapshot) -> None:
        """Send the alerts that are due, and record the attempts. Raises TierlaneError; then they are sent again later."""
        claimed = await session.run(lambda connection: claim_alerts(connection, MAX_CLAIMED, LEASE_S))
        if not claimed:
            return
        hosts = CallbackHosts(
            jobs.callback_hosts, lambda of: _own_hosts(snapshot.customers, of), enabled=bool(jobs.callback_secret)
        )
        left = await asyncio.gather(*(self._attempt(jobs, hosts, alert) for alert in claimed))
        for alert, (pending, is_final) in zip(claimed, left, strict=True):
            wait_s = None
            if pending and not is_final and alert.tries <= len(DELAYS_S):
                wait_s = DELAYS_S[alert.tries - 1]
            if pending:
                log.warning("quota_alert_not_sent", id=alert.id, to=pending, again_s=wait_s)
            await session.run(_recording(alert.id, pending, wait_s))

    async def _attempt(self, jobs: JobConfig, hosts: CallbackHosts, alert: ClaimedAlert) -> tuple[list[str], bool]:
        """Send an alert to all its destinations. Returns those that have not accepted it, and whether all of them are gone."""
        statuses: dict[str, int | None] = {}
        body = encode_json(alert_body(alert))
        for destination in alert.pending:
            of_customer = destination == CUSTOMER
            url, private = alert.url if of_customer else jobs.alert_url, not of_customer or jobs.private_addresses
            problem = "There is no URL, or no TIERLANE_CALLBACK_SECRET."
            if url and jobs.callback_secret:
                problem = ""
                if of_customer:
                    problem = alert_url_problem(url, hosts.of(alert.customer_id), private=private) or ""
            if problem or not url:
                log.warning("quota_alert_url", customer=alert.customer, problem=problem)
                statuses[destination] = None
                continue
            secret = jobs.callback_secret
            keys = [customer_key(secret, alert.customer_id, number) for number in alert.secrets]
            keys = keys if of_customer else [installation_key(secret)]
            async with webhook_client(private=private) as client:
                sent_at = int(time.time())
                statuses[destination] = await post_signed(client, url, keys, alert.id, body, at_s=sent_at)
        failed = [name for name, status in statuses.items() if status is None or not 200 <= status < 300]
        return failed, all(statuses[name] == GONE for name in failed)


def _recording(alert_id: str, pending: Sequence[str], wait_s: float | None) -> Callable[[Connection], Awaitable[None]]:
    return lambda connection: record_alert_attempt(connection, alert_id, pending, wait_s)


def _destinations(jobs: JobConfig, customer: Customer) -> str:
    """Where the alerts of a customer are sent; nowhere without a secret to sign them."""
    if not jobs.callback_secret:
        return ""
    found = [CUSTOMER] if customer.alert_url else []
    return ",".join([*found, INSTALLATION] if jobs.alert_url else found)


def _own_hosts(customers: Mapping[str, Customer], customer_id: str) -> str | None:
    customer = customers.get(customer_id)
    return None if customer is None else customer.callback_hosts
