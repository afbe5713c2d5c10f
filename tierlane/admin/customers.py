"""The verbs `tierlane customer`, `key` and `quota`. The work of a verb raises ChangeRejected and BadValue."""

from collections.abc import Sequence
from datetime import timedelta

import typer

from gateway.jobs.webhook_security import customer_key, installation_key, secret_text
from ledger.admin.changes import Row
from ledger.admin.customers import key_limit as completed_limit
from ledger.catalog.quotas import parse_quota
from ledger.postgres import Connection
from ledger.schema.catalog import customers, tiers
from tierlane.admin.change_result import ChangeResult, changed_columns
from tierlane.admin.limit_columns import LIMITS
from tierlane.admin.options import VerbCall, Work
from tierlane.admin.remote import alter_customer as change_customer
from tierlane.admin.remote import alter_key as change_key
from tierlane.admin.remote import (
    catalog,
    check_tier,
    count_of,
    find,
    find_customer,
    find_key,
    list_alerts,
    list_customers,
    list_keys,
    list_quotas,
    remove,
    rotate_webhook_secret,
)
from tierlane.admin.remote import create_customer as add_customer
from tierlane.admin.remote import create_key as issue_key
from tierlane.admin.remote import remove_quota as delete_quota
from tierlane.admin.remote import revoke_key as end_key
from tierlane.admin.remote import rotate_key as replace_key
from tierlane.admin.remote import set_quota as upsert_quota
from tierlane.admin.runner import apply, show_rows
from tierlane.connect import UsageError, VerbError
from tierlane.output import Column, aligned, counted, named, print_json, print_rows, printable, readable

INHERITED = (*(column.field for column in LIMITS), "max_queue_ms")
"""Columns in which null means the value of the tier."""

MOST_KEYS = 1000
CUSTOMER_COLUMNS = (
    *named("name", "tier", "weight", "status"),
    *LIMITS,
    Column("max_queue_ms", "WAIT MS"),
    *named("cell", "spread", "models"),
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
    Column("models", "MODELS"),
    Column("quotas", "QUOTAS"),
)
KEY_LIST_COLUMNS = (KEY_COLUMNS[0], Column("customer", "CUSTOMER"), *KEY_COLUMNS[1:])
QUOTA_COLUMNS = (*named("tier", "customer", "key", "quota"), Column("alert_shares", "ALERTS AT"))
ALERT_COLUMNS = (
    Column("reached_at", "REACHED"),
    *named("customer"),
    Column("key_id", "KEY"),
    *named("quota", "share", "used", "amount", "unit"),
    Column("period_end", "PERIOD ENDS"),
    *named("sent"),
)
_LIMIT_SOURCES = (Column("limit", "LIMIT"), Column("value", "VALUE"), Column("source", "FROM"))
_QUOTA_SOURCES = (Column("quota", "QUOTA"), Column("source", "FROM"))
DAYS_AS_WEEKS = (
    "Windows of 7 days begin on Thursdays, since they are counted from 1970-01-01; those of a week begin on Mondays."
)


def show_customers(limit: int, tier: str | None, status: str | None) -> Work:
    """Print the first customers by name, with their own limits."""
    return show_rows(lambda connection: list_customers(connection, limit, tier, status), CUSTOMER_COLUMNS, "customers")


async def show_customer(call: VerbCall, name: str) -> int:
    """Print a customer with base limits, quotas and keys."""
    async with catalog(call) as connection:
        customer = await find_customer(connection, name)
        tier = await find(connection, tiers, customer["tier"])
        keys, _ = await list_keys(connection, MOST_KEYS, customer["id"])
        held = await list_quotas(connection, customer)
    limits = base_limits(customer, tier)
    quotas = [{"quota": row["quota"], "source": f"tier {row['tier']}" if row["tier"] else "own"} for row in held]
    page = customer | {"limits": limits, "keys": keys, "quotas": quotas}
    if call.output == "json":
        print_json(page)
        return 0
    fields = {"customer": "name", "id": "id", "tier": "tier", "weight": "weight", "status": "status"}
    fields |= {"created": "created_at", "callback hosts": "callback_hosts", "cell": "cell", "spread": "spread"}
    fields |= {"models": "models", "manages keys": "manages_keys", "time zone": "time_zone", "alert URL": "alert_url"}
    typer.echo("\n".join(aligned((title, readable(page[field])) for title, field in fields.items())))
    for part, columns in (("limits", _LIMIT_SOURCES), ("quotas", _QUOTA_SOURCES), ("keys", KEY_COLUMNS)):
        typer.echo("")
        print_rows("table", columns, page[part], part)
    return 0


def base_limits(customer: Row, tier: Row) -> list[Row]:
    """Each base limit that applies to a customer of this tier, and its source."""
    return [
        {
            "limit": limit,
            "value": tier[limit] if customer[limit] is None else customer[limit],
            "source": f"tier {tier['name']}" if customer[limit] is None else "own",
        }
        for limit in INHERITED
    ]


async def show_secret(call: VerbCall, name: str) -> int:
    """Print the secret with which a receiver verifies callbacks. Raises VerbError if the deployment's is not set."""
    deployment = call.settings.callback_key
    if not deployment:
        raise VerbError("TIERLANE_CALLBACK_SECRET is not set. Set it to the value of the gateways.")
    async with catalog(call) as connection:
        customer = await find_customer(connection, name)
    secret = secret_text(customer_key(deployment, str(customer["id"]), customer["webhook_secret"]))
    if call.output == "json":
        print_json({"name": customer["name"], "webhook_secret": secret})
    else:
        typer.echo(secret)
    return 0


async def create_customer(connection: Connection, name: str, values: Row) -> ChangeResult:
    row = await add_customer(connection, name, values)
    return ChangeResult([row], notes=["The customer has no key yet: `tierlane key create` issues one."])


async def alter_customer(connection: Connection, name: str, values: Row) -> ChangeResult:
    """Change a customer. A new tier, or a limit that is inherited again, has a note with the limits before and after."""
    change = await change_customer(connection, name, values)
    old, new = change.old or {}, change.new or {}
    inherits = any(values.get(limit, 0) is None for limit in INHERITED)
    if old == new or not ("tier" in values or inherits):
        return ChangeResult([change])
    before, after = [await _tier_effects(connection, row) for row in (old, new)]
    steps = ", ".join(" ".join(step) for step in changed_columns(before, after))
    return ChangeResult([change], notes=[f"Limits in force: {steps or 'the same as before'}."])


async def _tier_effects(connection: Connection, customer: Row) -> Row:
    """The base limits of a customer by name, and the quotas of its tier, which follow the tier."""
    tier = await find(connection, tiers, customer["tier"])
    limits = {each["limit"]: each["value"] for each in base_limits(customer, tier)}
    held = [row["quota"] for row in await list_quotas(connection, tier=customer["tier"])]
    return limits | {"quotas of the tier": held}


async def rotate_secret(connection: Connection, name: str, grace: timedelta) -> ChangeResult:
    """Add a webhook secret, and let the earlier ones end after `grace`."""
    change = await rotate_webhook_secret(connection, name, grace)
    until = readable((change.new or {})["webhook_secret_until"])
    show = f"`tierlane customer show {printable(change.name)} --webhook-secret` prints the new secret."
    return ChangeResult([change], notes=[f"Until {until} callbacks are also signed with the earlier secrets. {show}"])


async def delete_customer(call: VerbCall, name: str, *, sure: bool) -> int:
    """Delete a customer with its keys and quotas, after a confirmation unless `sure` or with --dry-run."""

    async def contents(connection: Connection, customer: Row) -> str:
        keys, quotas = await count_of(connection, customer)
        return f"{counted(keys, 'key')} and {counted(quotas, 'quota')}"

    async def change(connection: Connection) -> ChangeResult:
        old = await find_customer(connection, name, lock=True)
        note = f"Deleted with it: {await contents(connection, old)}."
        return ChangeResult([await remove(connection, customers, old)], notes=[note])

    if not (sure or call.dry_run):
        async with catalog(call) as connection:
            customer = await find_customer(connection, name)
            keys_and_quotas = await contents(connection, customer)
        typer.confirm(f"Delete customer {printable(customer['name'])} with {keys_and_quotas}?", abort=True)
    return await apply(call, change)


def key_id(text: str) -> str:
    """The public part of a key. A complete key contains it between two underscores."""
    return text.split("_")[1] if text.startswith("tl_") else text


def show_keys(limit: int, customer: str | None) -> Work:
    """Print the newest keys, of one customer or of all."""

    async def read(connection: Connection) -> tuple[list[Row], int]:
        owner = (await find_customer(connection, customer))["id"] if customer is not None else None
        return await list_keys(connection, limit, owner)

    return show_rows(read, KEY_LIST_COLUMNS, "keys")


async def show_key(call: VerbCall, text: str) -> int:
    async with catalog(call) as connection:
        row = await find_key(connection, key_id(text))
    if call.output == "json":
        print_json(row)
    else:
        typer.echo("\n".join(aligned((field, readable(value)) for field, value in row.items())))
    return 0


def key_limit(values: Row) -> Row:
    """The limit of a new key. Raises UsageError for a burst without a rate."""
    if values.get("requests_per_second") is None and values.get("burst") is not None:
        raise UsageError("--burst: requires --requests-per-second")
    return completed_limit(values)


async def create_key(
    connection: Connection, customer: str, name: str, lifetime: timedelta | None, limit: Row
) -> ChangeResult:
    """Issue a key with a limit of `key_limit`."""
    key, row = await issue_key(connection, customer, name, lifetime, limit)
    return ChangeResult([row], key.text)


async def alter_key(connection: Connection, text: str, values: Row) -> ChangeResult:
    """Change the limit, the weight or the models of a key."""
    return ChangeResult([await change_key(connection, key_id(text), values)])


async def rotate_key(connection: Connection, text: str, grace: timedelta, lifetime: timedelta | None) -> ChangeResult:
    """Issue a second key, and let the old one expire after `grace`."""
    key, changes = await replace_key(connection, key_id(text), grace, lifetime)
    until = readable((changes[-1].new or {}).get("expires_at"))
    return ChangeResult(changes, key.text, notes=[f"Both keys work until {until}, then only the new one."])


async def revoke_key(connection: Connection, text: str) -> ChangeResult:
    return ChangeResult([await end_key(connection, key_id(text))])


def show_quotas(customer: str | None, tier: str | None) -> Work:
    """Print all quotas, or those that apply to a customer with those of its live keys, or those of a tier."""

    async def read(connection: Connection) -> tuple[list[Row], int]:
        if tier is not None:
            await check_tier(connection, tier)
        if customer is None:
            return [row | {"key": None} for row in await list_quotas(connection, None, tier)], 0
        owner = await find_customer(connection, customer)
        rows = [row | {"key": None} for row in await list_quotas(connection, owner, tier)]
        keys, _ = await list_keys(connection, MOST_KEYS, owner["id"])
        of_key = dict.fromkeys(("id", "customer_id", "tier", "alert_shares")) | {"customer": owner["name"]}
        live = [key for key in keys if key["state"] == "live" and tier is None]
        return rows + [of_key | {"quota": text, "key": key["id"]} for key in live for text in key["quotas"] or ()], 0

    return show_rows(read, QUOTA_COLUMNS, "quotas")


def show_alerts(limit: int, customer: str | None) -> Work:
    """Print the newest shares of quotas that were reached, of one customer or of all."""

    async def read(connection: Connection) -> tuple[list[Row], int]:
        owner = (await find_customer(connection, customer))["id"] if customer is not None else None
        return [row | {"sent": _delivery(row)} for row in await list_alerts(connection, limit, owner)], 0

    return show_rows(read, ALERT_COLUMNS, "alerts")


def _delivery(alert: Row) -> str:
    """Whether an alert was sent everywhere."""
    if not alert["pending"]:
        return "yes" if alert["tries"] else "no URL"
    return "waiting" if alert["due_at"] is not None else "failed"


async def show_installation_secret(call: VerbCall) -> int:
    """Print the secret with which TIERLANE_ALERT_URL verifies alerts. Raises VerbError if the deployment's is not set."""
    if not call.settings.callback_key:
        raise VerbError("TIERLANE_CALLBACK_SECRET is not set. Set it to the value of the gateways.")
    secret = secret_text(installation_key(call.settings.callback_key))
    print_json({"webhook_secret": secret}) if call.output == "json" else typer.echo(secret)
    return 0


async def set_quota(
    connection: Connection, customer: str | None, tier: str | None, text: str, values: Row
) -> ChangeResult:
    """Set a quota of a customer or a tier."""
    changes = await upsert_quota(connection, customer, tier, text, values)
    quota = parse_quota(None, "any", text)
    return ChangeResult(changes, notes=[DAYS_AS_WEEKS] if quota.unit == "day" and quota.every % 7 == 0 else [])


async def remove_quota(connection: Connection, customer: str | None, tier: str | None, text: str) -> ChangeResult:
    """Remove a quota of a customer or a tier."""
    return ChangeResult(await delete_quota(connection, customer, tier, text))


def owner_and_quota(words: Sequence[str], tier: str | None) -> tuple[str | None, str]:
    """The customer, None with a tier, and the quota. Raises UsageError for another number of words."""
    if len(words) != (2 if tier is None else 1):
        raise UsageError("Specify CUSTOMER QUOTA, or --tier TIER QUOTA, such as acme 10000/day.")
    return (words[0], words[1]) if tier is None else (None, words[0])
