"""Tiers and models: rows with a name, all of whose settable columns are fields."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Table

from gateway.admin_api.bodies import FieldOf, Page, body_type, row_type, text_field
from gateway.admin_api.route import PAGES, AdminCall, AdminResult, AdminRoute, change_route, etag_of, read_route
from ledger.admin.changes import Change, Row, add, alter, missing, remove
from ledger.admin.columns import settable
from ledger.admin.errors import THINGS
from ledger.admin.rows import delete_tier, list_models, list_tiers
from ledger.postgres import Connection
from ledger.schema.catalog import models, tiers


async def _delete_tier(call: AdminCall, row: Row) -> Sequence[Change]:
    return await delete_tier(call.connection, row["name"])


async def _delete_model(call: AdminCall, row: Row) -> Sequence[Change]:
    return [await remove(call.connection, models, row)]


class NamedResource(NamedTuple):
    """Handlers and routes of a table; `read` returns all rows or the named one, `drop` deletes one."""

    table: Table
    read: Callable[[Connection, str | None], Awaitable[list[Row]]]
    drop: Callable[[AdminCall, Row], Awaitable[Sequence[Change]]]
    extra: Sequence[FieldOf] = ()

    async def get_all(self, call: AdminCall) -> AdminResult:
        return call.page(await self.read(call.connection, None), lambda row: str(row["name"]))

    async def get(self, call: AdminCall) -> AdminResult:
        rows = await self.read(call.connection, call.path["name"])
        if not rows:
            raise missing(self.table, call.path["name"])
        return AdminResult(rows[0], etag_of(self.table, rows[0]))

    async def create(self, call: AdminCall) -> AdminResult:
        return call.changed([await add(call.connection, self.table, call.values)], self.table)

    async def alter(self, call: AdminCall) -> AdminResult:
        old = await call.lock(self.table, call.path["name"])
        return call.changed([await alter(call.connection, self.table, old, call.values)], self.table)

    async def delete(self, call: AdminCall) -> AdminResult:
        return call.changed(await self.drop(call, await call.lock(self.table, call.path["name"])))

    def routes(self, example: dict[str, Any]) -> list[AdminRoute]:
        """The five routes; `example`: the body of a change."""
        thing, columns = THINGS[self.table.name], settable(self.table)
        kind = row_type(thing.capitalize(), self.table, self.extra)
        name = text_field("name", self.table.c["name"].comment or "", required=True)
        new = body_type(f"New{thing.capitalize()}", columns, [name], new=True)
        changed = body_type(f"{thing.capitalize()}Changes", columns)
        all_, one = f"/{self.table.name}", f"/{self.table.name}/{{name}}"
        parts = {"name": f"Name of the {thing}."}
        return [
            read_route(all_, f"List {thing}s", self.get_all, Page[kind], query=PAGES),  # type: ignore[valid-type]
            read_route(one, f"Show a {thing}", self.get, kind, etag=True, parts=parts),
            change_route(
                "POST",
                all_,
                f"Create a {thing}",
                self.create,
                body=new,
                status=201,
            ),
            change_route(
                "PATCH",
                one,
                f"Change a {thing}",
                self.alter,
                body=changed,
                example=example,
                parts=parts,
            ),
            change_route(
                "DELETE",
                one,
                f"Delete a {thing}",
                self.delete,
                parts=parts,
            ),
        ]


TIERS = NamedResource(tiers, list_tiers, _delete_tier, [("quotas", list[str]), ("customers", int)])
MODELS = NamedResource(models, list_models, _delete_model)
ROUTES = [*TIERS.routes({"requests_per_second": 50, "burst": 100}), *MODELS.routes({"max_batch_size": 16})]
