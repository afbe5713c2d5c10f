"""The verbs `tierlane customer`, `key` and `quota`. The work of a verb raises ChangeRejected and BadValue."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import typer

from gateway.jobs.webhook_security import customer_key, secret_text
from ledger.admin.changes import Row, add, alter, find, remove
from ledger.admin.customers import create_key as issue_key
from ledger.admin.customers import remove_quota as delete_quota
from ledger.admin.customers import revoke_key as end_key
from ledger.admin.customers import rotate_key as replace_key
from ledger.admin.customers import set_quota as upsert_quota
from ledger.admin.rows import check_tier, count_of, find_customer, find_key, list_customers, list_keys, list_quotas
from ledger.catalog.quotas import parse_quota
from ledger.postgres import Connection
from ledger.schema.catalog import customers, tiers
from tierlane.admin.change_result import ChangeResult
from tierlane.admin.limit_columns import LIMITS
from tierlane.admin.options import VerbCall, Work
from tierlane.admin.runner import apply, fetch, show_rows
from tierlane.connect import UsageError, VerbError
from tierlane.output import Column, aligned, counted, named, print_json, print_rows, printable, readable

INHERITED = (*(column.field for column in LIMITS), "max_queue_ms")
"""Columns in which null means the value of the tier."""

MOST_KEYS = 1000
CUSTOMER_COLUMNS = (
    *named("name", "tier", "weight", "status"),
    *LIMITS,
    Column("max_queue_ms", "WAIT MS"),
    *named("cell", "spread"),
    Column("live_keys", "KEYS"),
    Column("created_at", "CREATED"),
)
KEY_COLUMNS = (
    *named("id", "name", "state"),
    Column("created_at", "CREATED"),
    Column("expires_at", "EXPIRES"),
    Column("last_used_at", "LAST USED"),
    Column("requests_per_second", "RPS"),
    Column("burst", "BURST"),
)
KEY_LIST_COLUMNS = (KEY_COLUMNS[0], Column("customer", "CUSTOMER"), *KEY_COLUMNS[1:])
QUOTA_COLUMNS = named("tier", "customer", "quota")
_LIMIT_SOURCES = (Column("limit", "LIMIT"), Column("value", "VALUE"), Column("source", "FROM"))
_QUOTA_SOURCES = (Column("quota", "QUOTA"), Column("source", "FROM"))
DAYS_AS_WEEKS = (
    "Windows of 7 days begin on Thursdays, since they are counted from 1970-01-01; those of a week begin on Mondays."
)


def show_customers(limit: int, tier: str | None, status: str | None) -> Work:
    """Print the first customers by name, with their own limits."""
    return show_rows(lambda connection: list_customers(connection, limit, tier, status), CUSTOMER_COLUMNS, "customers")


def show_customer(name: str) -> Work:
    """Print a customer with base limits, quotas and keys."""

    async def read(connection: Connection) -> Row:
        customer = await find_customer(connection, name)
        tier = await find(connection, tiers, customer["tier"])
        keys, _ = await list_keys(connection, MOST_KEYS, customer["id"])
        inherited = f"tier {tier['name']}"
        limits = [
            {
                "limit": limit,
                "value": tier[limit] if customer[limit] is None else customer[limit],
                "source": inherited if customer[limit] is None else "own",
            }
            for limit in INHERITED
        ]
        quotas = [
            {"quota": row["quota"], "source": f"tier {row['tier']}" if row["tier"] else "own"}
            for row in await list_quotas(connection, customer)
        ]
        return customer | {"limits": limits, "keys": keys, "quotas": quotas}

    async def work(call: VerbCall) -> int:
        page = await fetch(call, read)
        if call.output == "json":
            print_json(page)
            return 0
        fields = {
            "customer": "name",
            "id": "id",
            "tier": "tier",
            "weight": "weight",
            "status": "status",
            "created": "created_at",
            "callback hosts": "callback_hosts",
            "cell": "cell",
            "spread": "spread",
        }
        typer.echo("\n".join(aligned((title, readable(page[field])) for title, field in fields.items())))
        for part, columns in (("limits", _LIMIT_SOURCES), ("quotas", _QUOTA_SOURCES), ("keys", KEY_COLUMNS)):
            typer.echo("")
            print_rows("table", columns, page[part], part)
        return 0

    return work


def show_secret(name: str) -> Work:
    """Print the secret with which a receiver verifies callbacks. Raises VerbError if the deployment's is not set."""

    async def work(call: VerbCall) -> int:
        deployment = call.settings.callback_key
        if not deployment:
            raise VerbError("TIERLANE_CALLBACK_SECRET is not set. Set it to the value of the gateways.")
        customer = await fetch(call, lambda connection: find_customer(connection, name))
        secret = secret_text(customer_key(deployment, str(customer["id"])))
        if call.output == "json":
            print_json({"name": customer["name"], "webhook_secret": secret})
        else:
            typer.echo(secret)
        return 0

    return work


def create_customer(name: str, values: dict[str, Any]) -> Work:
    async def change(connection: Connection) -> ChangeResult:
        await check_tier(connection, values["tier"])
        row = await add(connection, customers, {"name": name, **values})
        return ChangeResult([row], notes=["The customer has no key yet: `tierlane key create` issues one."])

    return lambda call: apply(call, change)


def alter_customer(name: str, values: dict[str, Any]) -> Work:
    async def change(connection: Connection) -> ChangeResult:
        if "tier" in values:
            await check_tier(connection, values["tier"])
        old = await find_customer(connection, name, lock=True)
        return ChangeResult([await alter(connection, customers, old, values)])

    return lambda call: apply(call, change)


def delete_customer(name: str, *, sure: bool) -> Work:
    """Delete a customer with its keys and quotas, after a confirmation unless `sure` or with --dry-run."""

    async def contents(connection: Connection, customer: Row) -> str:
        keys, quotas = await count_of(connection, customer)
        return f"{counted(keys, 'key')} and {counted(quotas, 'quota')}"

    async def confirm(connection: Connection) -> None:
        customer = await find_customer(connection, name)
        keys_and_quotas = await contents(connection, customer)
        typer.confirm(f"Delete customer {printable(customer['name'])} with {keys_and_quotas}?", abort=True)

    async def change(connection: Connection) -> ChangeResult:
        old = await find_customer(connection, name, lock=True)
        note = f"Deleted with it: {await contents(connection, old)}."
        return ChangeResult([await remove(connection, customers, old)], notes=[note])

    async def work(call: VerbCall) -> int:
        if not (sure or call.dry_run):
            await fetch(call, confirm)
        return await apply(call, change)

    return work


def key_id(text: str) -> str:
    """The public part of a key. A complete key contains it between two underscores."""
    return text.split("_")[1] if text.startswith("tl_") else text


def show_keys(limit: int, customer: str | None) -> Work:
    """Print the newest keys, of one customer or of all."""

    async def read(connection: Connection) -> tuple[list[Row], int]:
        owner = (await find_customer(connection, customer))["id"] if customer is not None else None
        return await list_keys(connection, limit, owner)

    return show_rows(read, KEY_LIST_COLUMNS, "keys")


def show_key(text: str) -> Work:
    async def work(call: VerbCall) -> int:
        row = await fetch(call, lambda connection: find_key(connection, key_id(text)))
        if call.output == "json":
            print_json(row)
        else:
            typer.echo("\n".join(aligned((field, readable(value)) for field, value in row.items())))
        return 0

    return work


def create_key(customer: str, name: str, lifetime: timedelta | None, limit: dict[str, Any]) -> Work:
    """Issue a key. A rate without a burst gets a burst of one second. Raises UsageError for a burst without a rate."""
    rate, burst = limit.get("requests_per_second"), limit.get("burst")
    if rate is None and burst is not None:
        raise UsageError("--burst: requires --requests-per-second")
    if rate is not None and burst is None:
        limit = limit | {"burst": max(1.0, rate)}

    async def change(connection: Connection) -> ChangeResult:
        key, row = await issue_key(connection, customer, name, lifetime, limit)
        return ChangeResult([row], key)

    return lambda call: apply(call, change)


def rotate_key(text: str, grace: timedelta, lifetime: timedelta | None) -> Work:
    """Issue a second key, and let the old one expire after `grace`."""

    async def change(connection: Connection) -> ChangeResult:
        key, changes = await replace_key(connection, key_id(text), grace, lifetime)
        until = readable((changes[-1].new or {}).get("expires_at"))
        return ChangeResult(changes, key, notes=[f"Both keys work until {until}, then only the new one."])

    return lambda call: apply(call, change)


def revoke_key(text: str) -> Work:
    async def change(connection: Connection) -> ChangeResult:
        return ChangeResult([await end_key(connection, key_id(text))])

    return lambda call: apply(call, change)


def show_quotas(customer: str | None, tier: str | None) -> Work:
    """Print all quotas, or those that apply to a customer, or those of a tier."""

    async def read(connection: Connection) -> tuple[list[Row], int]:
        if tier is not None:
            await check_tier(connection, tier)
        owner = await find_customer(connection, customer) if customer is not None else None
        return await list_quotas(connection, owner, tier), 0

    return show_rows(read, QUOTA_COLUMNS, "quotas")


def set_quota(words: Sequence[str], tier: str | None) -> Work:
    """Set a quota of a customer or a tier. Raises UsageError."""
    customer, text = _owner_and_quota(words, tier)

    async def change(connection: Connection) -> ChangeResult:
        changes = await upsert_quota(connection, customer, tier, text)
        quota = parse_quota(None, "any", text)
        return ChangeResult(changes, notes=[DAYS_AS_WEEKS] if quota.unit == "day" and quota.every % 7 == 0 else [])

    return lambda call: apply(call, change)


def remove_quota(words: Sequence[str], tier: str | None) -> Work:
    """Remove a quota of a customer or a tier. Raises UsageError."""
    customer, text = _owner_and_quota(words, tier)

    async def change(connection: Connection) -> ChangeResult:
        return ChangeResult(await delete_quota(connection, customer, tier, text))

    return lambda call: apply(call, change)


def _owner_and_quota(words: Sequence[str], tier: str | None) -> tuple[str | None, str]:
    """The customer, None with a tier, and the quota. Raises UsageError for another number of words."""
    if len(words) != (2 if tier is None else 1):
        raise UsageError("Specify CUSTOMER QUOTA, or --tier TIER QUOTA, such as acme 10000/day.")
    return (words[0], words[1]) if tier is None else (None, words[0])
