"""Verbs on rows that go by a name of their own, tiers and models: list, show, set, create, delete."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from ledger.admin.changes import Change, add, alter, find, missing
from ledger.admin.query import Row
from ledger.postgres import Connection
from tierlane.admin.options import Call, Work
from tierlane.admin.runner import Done, changed, looked
from tierlane.output import Column, print_json, print_rows, readable

_MEANING = (Column("field", "FIELD"), Column("value", "VALUE"), Column("meaning", "MEANING"))


class NamedRows(NamedTuple):
    """One kind of row: its table, how rows are read (all, or the named one) and deleted, and what a list shows."""

    table: Any
    read: Callable[[Connection, str | None], Awaitable[list[Row]]]
    drop: Callable[[Connection, str], Awaitable[Sequence[Change]]]
    columns: Sequence[Column]

    def show_all(self) -> Work:
        """Print all."""

        async def work(call: Call) -> int:
            rows = await looked(call, lambda connection: self.read(connection, None))
            print_rows(call.output, self.columns, rows, self.table.name)
            return 0

        return work

    def show_one(self, name: str) -> Work:
        """Print one, with what its columns mean. The work raises Refused where there is none."""

        async def work(call: Call) -> int:
            rows = await looked(call, lambda connection: self.read(connection, name))
            if not rows:
                raise missing(self.table, name)
            if call.output == "json":
                print_json(rows[0])
            else:
                explained = [self._explained(field, value) for field, value in rows[0].items()]
                print_rows("table", _MEANING, explained, "columns")
            return 0

        return work

    def alter(self, name: str, values: Row) -> Work:
        """Set columns of one. The work raises Refused."""

        async def make(connection: Connection) -> Done:
            return Done([await alter(connection, self.table, await find(connection, self.table, name), values)])

        return lambda call: changed(call, make)

    def create(self, name: str, values: Row) -> Work:
        """Add one. The work raises Refused."""

        async def make(connection: Connection) -> Done:
            return Done([await add(connection, self.table, {"name": name, **values})])

        return lambda call: changed(call, make)

    def delete(self, name: str) -> Work:
        """Delete one. The work raises Refused."""

        async def make(connection: Connection) -> Done:
            return Done(await self.drop(connection, name))

        return lambda call: changed(call, make)

    def _explained(self, field: str, value: object) -> Row:
        meaning = self.table.c[field].comment if field in self.table.c else ""
        return {"field": field, "value": readable(value), "meaning": meaning}
