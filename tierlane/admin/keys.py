"""What the verbs of `tierlane key` do."""

from datetime import timedelta
from typing import Any

import typer

from ledger.admin.changes import Row
from ledger.admin.customers import create_key, revoke_key, rotate_key
from ledger.admin.rows import find_customer, find_key, list_keys
from ledger.postgres import Connection
from tierlane.admin.options import VerbCall, Work
from tierlane.admin.runner import ChangeResult, changed, looked
from tierlane.connect import UsageError
from tierlane.output import Column, aligned, print_json, print_rows, readable

KEY_COLUMNS = (
    Column("id", "ID"),
    Column("name", "NAME"),
    Column("state", "STATE"),
    Column("created_at", "CREATED"),
    Column("expires_at", "EXPIRES"),
    Column("last_used_at", "LAST USED"),
    Column("requests_per_second", "RPS"),
    Column("burst", "BURST"),
)
COLUMNS = (KEY_COLUMNS[0], Column("customer", "CUSTOMER"), *KEY_COLUMNS[1:])


def key_id(text: str) -> str:
    """The public part of what was given as an id: a whole key has it between two underscores, and is not repeated."""
    return text.split("_")[1] if text.startswith("tl_") else text


def show_all(limit: int, customer: str | None) -> Work:
    """Print the newest, of one customer or of all. The work raises Refused for an unknown customer."""

    async def read(connection: Connection) -> tuple[list[Row], int]:
        owner = (await find_customer(connection, customer))["id"] if customer is not None else None
        return await list_keys(connection, limit, owner)

    async def work(call: VerbCall) -> int:
        rows, total = await looked(call, read)
        print_rows(call.output, COLUMNS, rows, "keys", total)
        return 0

    return work


def show_one(text: str) -> Work:
    """Print one. The work raises Refused where there is none."""

    async def work(call: VerbCall) -> int:
        row = await looked(call, lambda connection: find_key(connection, key_id(text)))
        if call.output == "json":
            print_json(row)
        else:
            typer.echo("\n".join(aligned((field, readable(value)) for field, value in row.items())))
        return 0

    return work


def create(customer: str, name: str, lifetime: timedelta | None, limit: dict[str, Any]) -> Work:
    """Issue one. Raises UsageError; the work raises Refused."""
    limit = own_limit(limit)

    async def make(connection: Connection) -> ChangeResult:
        key, change = await create_key(connection, customer, name, lifetime, limit)
        return ChangeResult([change], key)

    return lambda call: changed(call, make)


def own_limit(given: dict[str, Any]) -> dict[str, Any]:
    """A rate without a bucket size gets one second's worth. Raises UsageError for a bucket without a rate."""
    rate, burst = given.get("requests_per_second"), given.get("burst")
    if rate is None and burst is not None:
        raise UsageError("--burst: needs --requests-per-second, for a key has a limit of its own or none")
    return given if rate is None or burst is not None else given | {"burst": max(1.0, rate)}


def rotate(text: str, grace: timedelta, lifetime: timedelta | None) -> Work:
    """Issue a second one and let the old one expire. The work raises Refused."""

    async def make(connection: Connection) -> ChangeResult:
        key, changes = await rotate_key(connection, key_id(text), grace, lifetime)
        old = changes[-1]
        until = readable((old.new or {}).get("expires_at"))
        return ChangeResult(changes, key, notes=[f"Both keys work until {until}, then the new one alone."])

    return lambda call: changed(call, make)


def revoke(text: str) -> Work:
    """Refuse one from now on. The work raises Refused where there is none."""

    async def make(connection: Connection) -> ChangeResult:
        return ChangeResult([await revoke_key(connection, key_id(text))])

    return lambda call: changed(call, make)
