"""`tierlane usage export`: its sums are those of the audit, to the request."""

import csv
import io
from collections import defaultdict
from decimal import Decimal
from typing import Any

import pytest

from integration.admin_fixtures import Admin, customer
from integration.ledger_fixtures import database_url, db, postgres_server

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
DAYS = ("2026-11-01", "2026-11-02", "2026-11-03")
PERIOD = ("usage", "export", "--from", DAYS[0], "--to", DAYS[1])
PRICES = {("tiny", "2026-11-01"): ("0.5", "0.01"), ("tiny", "2026-11-02"): ("2", "0")}


async def audit(db: Connection) -> list[tuple[Any, ...]]:
    """Requests of two customers on three days, some without GPU time or tokens; rows (day, name, model, tokens, cost_ms)."""
    owners = {name: await customer(db, name) for name in ("acme", "beta")}
    for (model, day), (gpu, tokens) in PRICES.items():
        await db.execute(
            "INSERT INTO prices VALUES ($1, $2::text::timestamptz, $3, $4)",
            model,
            day + "Z",
            Decimal(gpu),
            Decimal(tokens),
        )
    rows = []
    for n in range(120):
        day, name, model = DAYS[n % 3], ("acme", "beta")[n % 2], ("tiny", "free-model")[n % 5 == 0]
        failed = n % 7 == 0
        tokens, cost_ms = n % 11 * 100, None if failed else (n + 1) / 8
        await db.execute(
            "INSERT INTO requests (id, created_at, customer_id, api_key_id, tier, model, status, error_code, tokens_used, cost_ms) "
            "VALUES ($1, $2::text::timestamptz, $3, $4, 'paid', $5, $6, $7, $8, $9)",
            f"req_{n:032x}", f"{day} 23:59:59Z", owners[name], f"key-{name}", model,
            *(("failed", "cancelled") if failed else ("completed", None)), tokens, cost_ms,
        )  # fmt: skip
        rows.append((day, name, model, tokens, Decimal(cost_ms or 0)))
    return rows


def expected(rows: list[tuple[Any, ...]], *, daily: bool) -> dict[tuple[str, ...], tuple[Any, ...]]:
    """The same sums, request by request."""
    sums: dict[tuple[str, ...], list[Any]] = defaultdict(lambda: [0, 0, Decimal(0), None])
    for day, name, model, tokens, cost_ms in rows:
        if day == DAYS[2]:
            continue
        found = sums[(day, name, model) if daily else (name, model)]
        found[:3] = found[0] + 1, found[1] + tokens, found[2] + cost_ms / 1000
        if (model, day) in PRICES:
            gpu, per_1000 = map(Decimal, PRICES[model, day])
            found[3] = (found[3] or 0) + cost_ms / 1000 * gpu + tokens * per_1000 / 1000
    return {key: tuple(values) for key, values in sums.items()}


@pytest.mark.parametrize("daily", [True, False])
async def test_sums_equal_the_audit(database_url: str, db: Connection, *, daily: bool) -> None:
    """By customer, key and model; the last day is included, the price is that of the day; CSV and JSON are the same."""
    rows, admin = await audit(db), Admin(database_url)
    by = ("--by", "day" if daily else "total")

    found = list(csv.DictReader(io.StringIO(await admin.done(*PERIOD, *by))))

    key = ("day", "customer", "model") if daily else ("customer", "model")
    assert {
        tuple(line[name] for name in key): (
            int(line["requests"]), int(line["tokens"]), Decimal(line["gpu_s"]),
            Decimal(line["cost_usd"]) if line["cost_usd"] else None,
        ) for line in found
    } == expected(rows, daily=daily)  # fmt: skip
    assert {line["key_id"] for line in found} == {"key-acme", "key-beta"}
    document = await admin.json(*PERIOD, *by)
    assert [(line["requests"], line["gpu_s"]) for line in document] == [
        (int(line["requests"]), float(line["gpu_s"])) for line in found
    ]


async def test_no_usage_is_a_heading_or_an_empty_list(database_url: str) -> None:
    """Without a line, both forms are complete documents."""
    admin = Admin(database_url)

    assert (await admin.done(*PERIOD)).startswith(
        "day,customer_id,customer,key_id,model,requests,tokens,gpu_s,cost_usd\n"
    )
    assert await admin.json(*PERIOD) == []


@pytest.mark.parametrize(
    ("first", "last", "named"),
    [
        ("2026-13-01", "2026-11-30", "--from: must be a day as YYYY-MM-DD"),
        ("2026-11-01", "30.11.2026", "--to: must be a day as YYYY-MM-DD"),
        ("2026-11-02", "2026-11-01", "--to: must not be before --from"),
        ("2000-01-01", "2099-11-01", "--to: must be less than 3,660 days after"),
    ],
)
async def test_invalid_days_are_named(database_url: str, first: str, last: str, named: str) -> None:
    """Exit code 2 and one sentence."""
    assert named in await Admin(database_url).fault(2, "usage", "export", "--from", first, "--to", last)
