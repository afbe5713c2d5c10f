"""The verb `tierlane config-changes`: who changed which row of the configuration from what to what."""

from datetime import datetime, timedelta
from typing import Any

from ledger.admin.changes import Row
from ledger.admin.errors import THINGS
from tierlane.admin.change_result import NUMBERS, changed_columns
from tierlane.admin.options import VerbCall
from tierlane.admin.remote import catalog, list_config_changes
from tierlane.output import Column, named, print_rows, readable

COLUMNS = (
    Column("changed_at", "WHEN"),
    Column("changed_by", "WHO"),
    *named("row", "change"),
)
_NOT_SHOWN = frozenset({"id", "name", "customer_id", "created_at", "last_used_at"}) | NUMBERS
"""Columns of a new row that repeat the other cells, or say nothing about it."""


async def show_changes(
    call: VerbCall, limit: int, *, customer: str | None, since: timedelta | None, table: str | None, by: str | None
) -> int:
    """Print the newest changes; the arguments that are not None select them."""
    async with catalog(call) as connection:
        rows, total = await list_config_changes(connection, limit, customer=customer, since=since, table=table, by=by)
    if call.output == "table":
        rows = [row | {"row": name_of(row), "change": words_of(row["old"], row["new"])} for row in rows]
    print_rows(call.output, COLUMNS, rows, "changes", total)
    return 0


def name_of(row: Row) -> str:
    """The changed row for readers, such as `customer acme` or `key 0123456789ab of acme`."""
    values = row["new"] or row["old"]
    name = values.get("quota") if row["table_name"] == "quotas" else values.get("name")
    if row["table_name"] == "api_keys" or name is None:
        name = row["row_key"]
    owner = None
    if row["table_name"] in ("api_keys", "quotas"):  # A deleted customer has no name any more.
        owner = row["customer"] or values.get("customer_id")
    if row["table_name"] == "quotas" and owner is None:
        owner = f"tier {values.get('tier')}"
    thing = THINGS.get(row["table_name"], "dead letters")
    return f"{thing} {name}" + (f" of {owner}" if owner else "")


def words_of(old: dict[str, Any] | None, new: dict[str, Any] | None) -> str:
    """`created` with its values, `deleted`, or each changed column with its value before and after."""
    if old is None:
        values = [
            f"{k} {readable(v)}" for k, v in _with_times(new or {}).items() if v is not None and k not in _NOT_SHOWN
        ]
        return f"created: {', '.join(values)}" if values else "created"
    if new is None:
        return "deleted"
    return ", ".join(f"{column} {step}" for column, step in changed_columns(_with_times(old), _with_times(new)))


def _with_times(values: dict[str, Any]) -> dict[str, Any]:
    """The values with times instead of their JSON texts."""
    return {
        name: datetime.fromisoformat(value) if name.endswith("_at") and isinstance(value, str) else value
        for name, value in values.items()
    }
