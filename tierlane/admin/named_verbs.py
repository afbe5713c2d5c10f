"""Verbs on rows that go by a name of their own, as commands: what tiers and models have in common on the command line."""
# ruff: noqa: PLC0415 - help must be quick, so what a verb does is imported when it is run

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import typer

from tierlane.admin.fields import Field
from tierlane.admin.options import Given, Name, Work, reads, writes

if TYPE_CHECKING:
    from tierlane.admin.tiers_and_models import NamedRows


class Says(NamedTuple):
    """What help says of the verbs that are not the same for every kind of row."""

    list_: str
    set_: str
    delete: str


def add_named_verbs(app: typer.Typer, fields: Sequence[Field], rows: Callable[[], "NamedRows"], says: Says) -> None:
    """Add list, show, set, create and delete to a group; `rows` is called when one of them is run."""

    @reads(app, "list", says=says.list_)
    def list_() -> Work:
        return rows().show_all()

    @reads(app, "show", says="Show one, with what its columns mean.")
    def show(name: Name) -> Work:
        return rows().show_one(name)

    @writes(app, "set", fields, says=says.set_)
    def set_(name: Name, given: Given) -> Work:
        from tierlane.admin.values import changes_of

        return rows().alter(name, changes_of(fields, given))

    @writes(app, "create", fields, new=True, says="Add one.")
    def create(name: Name, given: Given) -> Work:
        from tierlane.admin.values import new_row

        return rows().create(name, new_row(fields, given))

    @writes(app, "delete", says=says.delete)
    def delete(name: Name) -> Work:
        return rows().delete(name)
