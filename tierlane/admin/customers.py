"""What the verbs of `tierlane customer` do."""

from typing import Any, NamedTuple

import typer

from gateway.jobs.webhook_security import customer_key, secret_text
from ledger.admin.changes import Row, add, alter, find, remove
from ledger.admin.rows import check_tier, count_of, find_customer, list_customers, list_keys, list_quotas
from ledger.postgres import Connection
from ledger.schema.catalog import customers, tiers
from tierlane.admin.keys import KEY_COLUMNS
from tierlane.admin.options import CUSTOMER_LIMITS, CUSTOMER_TIER, VerbCall, Work
from tierlane.admin.runner import ChangeResult, changed, looked
from tierlane.connect import VerbError
from tierlane.output import Column, aligned, print_json, print_rows, printable, readable

LIMITS = tuple(field.name for field in CUSTOMER_LIMITS if field is not CUSTOMER_TIER)
MOST_KEYS = 1000
COLUMNS = (
    Column("name", "NAME"),
    Column("tier", "TIER"),
    Column("status", "STATUS"),
    Column("requests_per_second", "RPS"),
    Column("burst", "BURST"),
    Column("max_concurrency", "CONCURRENCY"),
    Column("tokens_per_minute", "TOKENS/MIN"),
    Column("max_queue_ms", "WAIT MS"),
    Column("live_keys", "KEYS"),
    Column("created_at", "CREATED"),
)
_LIMIT_COLUMNS = (Column("limit", "LIMIT"), Column("value", "VALUE"), Column("source", "FROM"))
_QUOTA_COLUMNS = (Column("quota", "QUOTA"), Column("source", "FROM"))


class CustomerPage(NamedTuple):
    """All that is shown of one customer."""

    customer: Row
    tier: Row
    keys: list[Row]
    quotas: list[Row]

    def limits(self) -> list[Row]:
        """Each base limit and whose it is."""
        return [
            {"limit": name, "value": self.customer[name], "source": "own"}
            if self.customer[name] is not None
            else {"limit": name, "value": self.tier[name], "source": f"tier {self.tier['name']}"}
            for name in LIMITS
        ]


def show_all(limit: int, tier: str | None, status: str | None) -> Work:
    """Print the first by name; limits of their own, `-` where they have the tier's."""

    async def work(call: VerbCall) -> int:
        rows, total = await looked(call, lambda connection: list_customers(connection, limit, tier, status))
        print_rows(call.output, COLUMNS, rows, "customers", total)
        return 0

    return work


def show_one(name: str) -> Work:
    """Print all about one. The work raises Refused where there is none."""

    async def work(call: VerbCall) -> int:
        page = await looked(call, lambda connection: _page(connection, name))
        if call.output == "json":
            print_json(page.customer | {"limits": page.limits(), "keys": page.keys, "quotas": page.quotas})
        else:
            _print_page(page)
        return 0

    return work


def show_secret(name: str) -> Work:
    """Print the secret that a receiver needs to verify one's callbacks. The work raises VerbError without the deployment's."""

    async def work(call: VerbCall) -> int:
        deployment = call.settings.callback_key
        if not deployment:
            raise VerbError("TIERLANE_CALLBACK_SECRET is not set here: set it as the gateways have it.")
        customer = await looked(call, lambda connection: find_customer(connection, name))
        secret = secret_text(customer_key(deployment, str(customer["id"])))
        if call.output == "json":
            print_json({"name": customer["name"], "webhook_secret": secret})
        else:
            typer.echo(secret)
        return 0

    return work


def create(name: str, values: dict[str, Any]) -> Work:
    """Add one. The work raises Refused."""

    async def make(connection: Connection) -> ChangeResult:
        await check_tier(connection, values["tier"])
        change = await add(connection, customers, {"name": name, **values})
        return ChangeResult([change], notes=["It has no key yet: `tierlane key create` issues one."])

    return lambda call: changed(call, make)


def alter_one(name: str, values: dict[str, Any]) -> Work:
    """Set columns of one. The work raises Refused."""

    async def make(connection: Connection) -> ChangeResult:
        if "tier" in values:
            await check_tier(connection, values["tier"])
        old = await find_customer(connection, name, lock=True)
        return ChangeResult([await alter(connection, customers, old, values)])

    return lambda call: changed(call, make)


def delete(name: str, *, sure: bool) -> Work:
    """Delete one with its keys and quotas, and ask before unless `sure` or trying. The work raises Refused."""

    async def ask(connection: Connection) -> None:
        customer = await find_customer(connection, name)
        with_it = await _going(connection, customer)
        typer.confirm(f"Delete customer {printable(customer['name'])} with {with_it} for good?", abort=True)

    async def make(connection: Connection) -> ChangeResult:
        old = await find_customer(connection, name, lock=True)
        with_it = await _going(connection, old)
        return ChangeResult([await remove(connection, customers, old)], notes=[f"With it: {with_it}."])

    async def work(call: VerbCall) -> int:
        if not (sure or call.dry_run):
            await looked(call, ask)
        return await changed(call, make)

    return work


async def _going(connection: Connection, customer: Row) -> str:
    keys, quotas = await count_of(connection, customer)
    return f"{_counted(keys, 'key')} and {_counted(quotas, 'quota')}"


async def _page(connection: Connection, name: str) -> CustomerPage:
    customer = await find_customer(connection, name)
    tier = await find(connection, tiers, customer["tier"])
    keys, _ = await list_keys(connection, MOST_KEYS, customer["id"])
    quotas = await list_quotas(connection, customer)
    sourced = [{"quota": row["quota"], "source": f"tier {row['tier']}" if row["tier"] else "own"} for row in quotas]
    return CustomerPage(customer, tier, keys, sourced)


def _print_page(page: CustomerPage) -> None:
    customer = page.customer
    about = [("customer", "name"), ("id", "id"), ("tier", "tier"), ("status", "status"), ("created", "created_at")]
    about.append(("callback hosts", "callback_hosts"))
    typer.echo("\n".join(aligned((title, readable(customer[field])) for title, field in about)))
    typer.echo("")
    print_rows("table", _LIMIT_COLUMNS, page.limits(), "limits")
    typer.echo("")
    print_rows("table", _QUOTA_COLUMNS, page.quotas, "quotas")
    typer.echo("")
    print_rows("table", KEY_COLUMNS, page.keys, "keys")


def _counted(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count:,} {what}s"
