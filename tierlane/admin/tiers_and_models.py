"""The verbs on tiers, models and prices. The work of a verb raises ChangeRejected and BadValue."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from ledger.admin.changes import Change, Row, missing
from ledger.postgres import Connection
from ledger.schema.catalog import models, tiers
from tierlane.admin.change_result import ChangeResult
from tierlane.admin.fields import without_sql
from tierlane.admin.limit_columns import LIMITS
from tierlane.admin.options import VerbCall, Work
from tierlane.admin.remote import (
    add,
    alter,
    catalog,
    delete_tier,
    find,
    list_models,
    list_prices,
    list_tiers,
    remove,
)
from tierlane.admin.remote import remove_price as delete_price
from tierlane.admin.remote import set_price as upsert_price
from tierlane.admin.runner import show_rows
from tierlane.output import Column, named, print_json, print_rows, readable

_MEANING = (Column("field", "FIELD"), Column("value", "VALUE"), Column("meaning", "MEANING"))

PRICE_COLUMNS = (
    Column("model", "MODEL"),
    Column("valid_from", "FROM"),
    Column("usd_per_gpu_s", "USD/GPU-S"),
    Column("usd_per_1000_tokens", "USD/1000 TOKENS"),
    Column("state", "IN FORCE"),
)


class NamedRows(NamedTuple):
    """A table: how its rows are read (all, or the named one) and deleted, and the columns of the list."""

    table: Any
    read: Callable[[Connection, str | None], Awaitable[list[Row]]]
    drop: Callable[[Connection, str], Awaitable[Sequence[Change]]]
    columns: Sequence[Column]

    def show_all(self) -> Work:
        async def read(connection: Connection) -> tuple[list[Row], int]:
            return await self.read(connection, None), 0

        return show_rows(read, self.columns, self.table.name)

    async def show_one(self, call: VerbCall, name: str) -> int:
        """Print a row with the meaning of its columns."""
        async with catalog(call) as connection:
            rows = await self.read(connection, name)
        if not rows:
            raise missing(self.table, name)
        if call.output == "json":
            print_json(rows[0])
            return 0
        described = [
            {
                "field": field,
                "value": readable(value),
                "meaning": without_sql(self.table.c[field].comment or "") if field in self.table.c else "",
            }
            for field, value in rows[0].items()
        ]
        print_rows("table", _MEANING, described, "columns")
        return 0

    async def alter(self, connection: Connection, name: str, values: Row) -> ChangeResult:
        return ChangeResult([await alter(connection, self.table, await find(connection, self.table, name), values)])

    async def create(self, connection: Connection, name: str, values: Row) -> ChangeResult:
        return ChangeResult([await add(connection, self.table, {"name": name, **values})])

    async def delete(self, connection: Connection, name: str) -> ChangeResult:
        return ChangeResult(await self.drop(connection, name))


TIERS = NamedRows(
    table=tiers,
    read=list_tiers,
    drop=delete_tier,
    columns=(
        Column("name", "NAME"),
        Column("priority", "PRIO"),
        Column("guaranteed_share", "SHARE"),
        *LIMITS,
        Column("auxiliary_requests_per_second", "AUX RPS"),
        Column("auxiliary_burst", "AUX BURST"),
        Column("max_queue_depth", "DEPTH"),
        Column("max_queue_ms", "WAIT MS"),
        Column("shed_depth", "SHED DEPTH"),
        Column("shed_wait_ms", "SHED MS"),
        *named("shadow", "paused", "slo_ms"),
        Column("slo_success", "SLO"),
        Column("interactive_jobs", "JOBS"),
        *named("quotas", "customers"),
    ),
)


async def _delete_model(connection: Connection, name: str) -> list[Change]:
    return [await remove(connection, models, await find(connection, models, name))]


MODELS = NamedRows(
    table=models,
    read=list_models,
    drop=_delete_model,
    columns=(
        *named("name", "enabled", "pool"),
        Column("max_batch_size", "BATCH"),
        Column("max_batch_tokens", "BATCH TOKENS"),
        Column("max_wait_ms", "WAIT MS"),
        Column("rps_per_gpu", "RPS/GPU"),
        Column("rps_per_gpu_fixed", "FIXED"),
        Column("target_utilization", "TARGET"),
        Column("tpot_ms", "TPOT MS"),
        Column("cache_ttl_s", "CACHE S"),
        Column("cache_scope", "SHARED"),
        Column("capabilities", "CAPABILITIES"),
    ),
)


def show_prices(model: str | None) -> Work:
    """Print the prices of all models or of one, the latest first."""

    async def read(connection: Connection) -> tuple[list[Row], int]:
        return await list_prices(connection, model), 0

    return show_rows(read, PRICE_COLUMNS, "prices")


async def set_price(connection: Connection, model: str, values: Row, start: datetime | None) -> ChangeResult:
    """Set prices of a model, from now or from a time on."""
    made = await upsert_price(connection, model, values, start)
    is_past = start is not None and start < datetime.now(UTC) and made.old != made.new
    notes = ["The cost of earlier requests changes in exports; quotas keep what was charged."]
    return ChangeResult([made], notes=notes if is_past else [])


async def remove_price(connection: Connection, model: str, start: datetime) -> ChangeResult:
    """Remove the price of a model that applies from a time on."""
    return ChangeResult(await delete_price(connection, model, start))
