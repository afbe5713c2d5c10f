"""What customers have used of their quotas and budgets in the current periods, counted from the audit."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import datetime
from uuid import UUID

import msgspec
from sqlalchemy import ARRAY, Text, Uuid, cast, func, or_, select

from ledger.admin.changes import Row, fetch, transaction_time
from ledger.audit.quota_restore import quota_spent
from ledger.catalog.quotas import name_of, parse_quota
from ledger.catalog.snapshot import Customer, Snapshot
from ledger.postgres import Connection
from ledger.schema.catalog import quotas
from ratelimit.periods import window_number, window_start
from ratelimit.quotas import shown_amount, unit_of

TIMEOUT_MS = 10_000
"""Of one statement, which counts the requests of one period."""


class CountedQuota(msgspec.Struct, frozen=True):
    """A quota that applies to a customer. `tier`: null for its own. `used` and `amount` are in `unit`; `until`: the next reset."""

    id: int
    quota: str
    tier: str | None
    unit: str
    used: float
    amount: float
    since: datetime
    until: datetime


async def quota_usage(connection: Connection, owners: Sequence[Row]) -> dict[UUID, list[CountedQuota]]:
    """The quotas of each of the customers `owners`, in order, with what is used. Raises what asyncpg raises."""
    held = await _quotas_of(connection, owners)
    now = await transaction_time(connection)
    parsed = {row["id"]: parse_quota("any", None, row["quota"]) for rows in held.values() for row in rows}
    customers = {}
    for owner in owners:
        names = {name_of(parsed[row["id"]]) for row in held[owner["id"]]}
        counted = tuple((name, 0) for name in sorted(names))
        customers[str(owner["id"])] = Customer(
            id=str(owner["id"]),
            name="",
            tier=owner["tier"],
            suspended=False,
            limits=(),
            max_queue_ms=None,
            quotas=counted,
            zone=owner["time_zone"] or "",
        )
    snapshot = Snapshot(0, (), customers, {}, {}, ())
    spent = await quota_spent(connection, snapshot, now=now, timeout_ms=TIMEOUT_MS)
    units = {(each.customer_id, each.period): each.spent for each in spent}
    found: dict[UUID, list[CountedQuota]] = {}
    for owner in owners:
        found[owner["id"]] = []
        for row in held[owner["id"]]:
            quota = parsed[row["id"]]
            name = name_of(quota)
            zone = owner["time_zone"] or ""
            number = window_number(name, now, zone)
            found[owner["id"]].append(
                CountedQuota(
                    row["id"],
                    row["quota"],
                    row["tier"],
                    unit_of(name).word,
                    float(shown_amount(name, units.get((str(owner["id"]), name), 0))),
                    float(shown_amount(name, quota.amount)),
                    window_start(name, number, zone),
                    window_start(name, number + 1, zone),
                )
            )
    return found


async def _quotas_of(connection: Connection, owners: Collection[Row]) -> dict[UUID, list[Row]]:
    """The rows that apply to each customer: its own first, then its tier's."""
    column = quotas.c
    ids, tiers = [owner["id"] for owner in owners], {owner["tier"] for owner in owners}
    wanted = or_(
        column.customer_id == func.any(cast(ids, ARRAY(Uuid))),
        column.tier == func.any(cast(sorted(tiers), ARRAY(Text))),
    )
    own, of_tier = defaultdict[UUID, list[Row]](list), defaultdict[str, list[Row]](list)
    for row in await fetch(connection, select(quotas).where(wanted).order_by(column.id)):
        (own[row["customer_id"]] if row["customer_id"] else of_tier[row["tier"]]).append(row)
    return {owner["id"]: [*own[owner["id"]], *of_tier[owner["tier"]]] for owner in owners}
