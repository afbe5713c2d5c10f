"""Which shares of quotas customers have reached, from what admission reports with each verdict.

A quota of requests is counted exactly when they are admitted. Metered quotas have reservations of requests in progress, and a cell
of several only its own part, so their use is read from the audit once they may have reached a share; and a request that is
rejected while no other one is in progress shows that a quota is used up.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from gateway.limits.quota_uses import QuotaUse
from ledger.alerts import NewAlert
from ledger.catalog.quotas import Held
from ledger.catalog.snapshot import Customer
from ratelimit.alerts import USUAL_SHARES, event_id, has_alerts, reached
from ratelimit.periods import window_ending, window_start
from ratelimit.quotas import is_metered, key_of
from scheduler.bounded_dict import BoundedDict
from scheduler.protocol.limits import QuotaSpent

NEAR = 0.9
"""The part of a share from which on the audit is read: later requests may cost more than was reserved."""

READ_EVERY_S = 5.0
READ_FOR_S = 60.0
"""How often, and for how long after its last request, the audit is read for a customer."""

MAX_CUSTOMERS = 10_000
MAX_KNOWN = 100_000
READS_AT_ONCE = 16


class _Unread(NamedTuple):
    """Quotas whose use has to be read from the audit, at monotonic times."""

    quotas: Held
    next_read: float
    until: float


class AlertDetection:
    """The alerts that PostgreSQL does not have yet, as far as this gateway knows."""

    def __init__(self) -> None:
        self._known: BoundedDict[str, None] = BoundedDict(MAX_KNOWN)
        # By customer and key; the key is "" for quotas of the customer.
        self._unread: BoundedDict[tuple[str, str], _Unread] = BoundedDict(MAX_CUSTOMERS)

    def stored(self, ids: Iterable[str]) -> None:
        """These alerts are in PostgreSQL."""
        for alert_id in ids:
            self._known[alert_id] = None

    def from_admission(
        self, customer: Customer, use: QuotaUse, now: float, wall: datetime, pending: str
    ) -> Iterator[NewAlert]:
        """The shares that a customer has reached by what admission reported. `wall`: about the time of that, in UTC."""
        shares, zone = dict(customer.alert_shares), use.limits.zone
        unread = list[tuple[str, int]]()
        for (name, amount), (left, reset_ms) in zip(use.limits.quotas, use.left.quotas, strict=False):
            wanted = shares.get(name, USUAL_SHARES)
            if not wanted or not has_alerts(name):
                continue
            period = window_ending(name, wall + timedelta(milliseconds=reset_ms), zone)
            used = amount - left
            if not (is_metered(name) or customer.spread > 1):
                found = reached(wanted, amount, used)
                yield from self._new(customer, (name, period, zone), found, amount=amount, used=used, pending=pending)
            elif name in use.spent and customer.spread == 1:
                yield from self._new(customer, (name, period, zone), wanted, amount=amount, used=used, pending=pending)
            elif used >= NEAR * min(self._open(customer.id, name, period, wanted), default=2.0) * amount:
                unread.append((name, amount))
        for key_id in {key_of(name) for name, _ in unread}:
            owner = customer.id, key_id
            known = self._unread.get(owner)
            next_read = now if known is None else known.next_read
            quotas = tuple(quota for quota in unread if key_of(quota[0]) == key_id)
            self._unread[owner] = _Unread(quotas, next_read, now + READ_FOR_S)

    def to_read(self, now: float) -> dict[str, Held]:
        """Customers whose use has to be read from the audit now, and the quotas."""
        for owner, unread in list(self._unread.items()):
            if now > unread.until:
                del self._unread[owner]
        due = [item for item in self._unread.items() if item[1].next_read <= now][:READS_AT_ONCE]
        found: dict[str, Held] = {}
        for owner, unread in due:
            self._unread[owner] = unread._replace(next_read=now + READ_EVERY_S)
            found[owner[0]] = (*found.get(owner[0], ()), *unread.quotas)
        return found

    def from_audit(
        self, customers: Mapping[str, Customer], spent: Iterable[QuotaSpent], pending: Mapping[str, str]
    ) -> Iterator[NewAlert]:
        """The shares that customers have reached by the audit."""
        for row in spent:
            customer = customers[row.customer_id]
            amount = dict(customer.quotas)[row.period]
            wanted = dict(customer.alert_shares).get(row.period, USUAL_SHARES)
            found = reached(wanted, amount, row.spent)
            period = row.period, row.window, customer.zone
            yield from self._new(customer, period, found, amount=amount, used=row.spent, pending=pending[customer.id])

    def _open(self, customer_id: str, name: str, period: int, shares: Iterable[float]) -> Iterator[float]:
        return (share for share in shares if event_id(customer_id, name, period, share) not in self._known)

    def _new(
        self,
        customer: Customer,
        period: tuple[str, int, str],
        shares: Iterable[float],
        *,
        amount: int,
        used: int,
        pending: str,
    ) -> Iterator[NewAlert]:
        """The alerts at `shares` that are not known to be stored. `period`: the quota, the number, and the zone."""
        name, number, zone = period
        start, end = window_start(name, number, zone), window_start(name, number + 1, zone)
        for share in self._open(customer.id, name, number, shares):
            alert_id = event_id(customer.id, name, number, share)
            yield NewAlert(alert_id, customer.id, customer.tier, name, number, start, end, share, amount, used, pending)
