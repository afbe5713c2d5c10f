"""The verbs on tiers and models: list, show, set, create, delete. The work of a verb raises ChangeRejected and BadValue."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from ledger.admin.changes import Change, Row, add, alter, find, missing, remove
from ledger.admin.rows import delete_tier, list_models, list_tiers
from ledger.postgres import Connection
from ledger.schema.catalog import models, tiers
from tierlane.admin.options import VerbCall, Work, without_sql
from tierlane.admin.runner import LIMITS, ChangeResult, apply, fetch, show_rows
from tierlane.output import Column, print_json, print_rows, readable

_MEANING = (Column("field", "FIELD"), Column("value", "VALUE"), Column("meaning", "MEANING"))


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

    def show_one(self, name: str) -> Work:
        """Print a row with the meaning of its columns."""

        async def work(call: VerbCall) -> int:
            rows = await fetch(call, lambda connection: self.read(connection, name))
            if not rows:
                raise missing(self.table, name)
            if call.output == "json":
                print_json(rows[0])
            else:
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

        return work

    def alter(self, name: str, values: Row) -> Work:
        async def change(connection: Connection) -> ChangeResult:
            return ChangeResult([await alter(connection, self.table, await find(connection, self.table, name), values)])

        return lambda call: apply(call, change)

    def create(self, name: str, values: Row) -> Work:
        async def change(connection: Connection) -> ChangeResult:
            return ChangeResult([await add(connection, self.table, {"name": name, **values})])

        return lambda call: apply(call, change)

    def delete(self, name: str) -> Work:
        async def change(connection: Connection) -> ChangeResult:
            return ChangeResult(await self.drop(connection, name))

        return lambda call: apply(call, change)


TIERS = NamedRows(
    table=tiers,
    read=list_tiers,
    drop=delete_tier,
    columns=(
        Column("name", "NAME"),
        Column("priority", "PRIO"),
        Column("guaranteed_share", "SHARE"),
        *LIMITS,
        Column("max_queue_depth", "DEPTH"),
        Column("max_queue_ms", "WAIT MS"),
        Column("shed_depth", "SHED DEPTH"),
        Column("shed_wait_ms", "SHED MS"),
        Column("shadow", "SHADOW"),
        Column("paused", "PAUSED"),
        Column("slo_ms", "SLO MS"),
        Column("slo_success", "SLO"),
        Column("quotas", "QUOTAS"),
        Column("customers", "CUSTOMERS"),
    ),
)


async def _delete_model(connection: Connection, name: str) -> list[Change]:
    return [await remove(connection, models, await find(connection, models, name))]


MODELS = NamedRows(
    table=models,
    read=list_models,
    drop=_delete_model,
    columns=(
        Column("name", "NAME"),
        Column("enabled", "ENABLED"),
        Column("pool", "POOL"),
        Column("max_batch_size", "BATCH"),
        Column("max_batch_tokens", "BATCH TOKENS"),
        Column("max_wait_ms", "WAIT MS"),
        Column("gpu_timeout_ms", "TIMEOUT MS"),
        Column("rps_per_gpu", "RPS/GPU"),
        Column("rps_per_gpu_fixed", "FIXED"),
        Column("target_utilization", "TARGET"),
        Column("cache_ttl_s", "CACHE S"),
        Column("cache_scope", "SHARED"),
        Column("capabilities", "CAPABILITIES"),
    ),
)
