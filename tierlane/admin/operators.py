"""The verbs `tierlane operator`. The work of a verb raises ChangeRejected and BadValue."""

from datetime import timedelta

from ledger.admin.changes import Row
from ledger.postgres import Connection
from ledger.schema.catalog import operators
from tierlane.admin.change_result import ChangeResult
from tierlane.admin.options import Work
from tierlane.admin.remote import alter, find, list_operators, revoke_operator, rotate_operator
from tierlane.admin.remote import create_operator as add_operator
from tierlane.admin.runner import show_rows
from tierlane.output import Column, named

OPERATOR_COLUMNS = (
    *named("name", "role", "state"),
    Column("created_at", "CREATED"),
    Column("expires_at", "EXPIRES"),
    Column("last_used_at", "LAST USED"),
)
TOKEN = "token"  # noqa: S105 - the name of the value


def show_all() -> Work:
    """Print all operators by name."""

    async def read(connection: Connection) -> tuple[list[Row], int]:
        return await list_operators(connection), 0

    return show_rows(read, OPERATOR_COLUMNS, "operators")


async def create(connection: Connection, name: str, role: str, lifetime: timedelta | None) -> ChangeResult:
    """Add an operator with a token."""
    token, change = await add_operator(connection, name, role, lifetime)
    return ChangeResult([change], token.text, secret_name=TOKEN)


async def set_role(connection: Connection, name: str, role: str) -> ChangeResult:
    """Change the role of an operator."""
    old = await find(connection, operators, name)
    return ChangeResult([await alter(connection, operators, old, {"role": role})])


async def rotate(connection: Connection, name: str, lifetime: timedelta | None) -> ChangeResult:
    """Replace the token of an operator."""
    token, change = await rotate_operator(connection, name, lifetime)
    return ChangeResult([change], token.text, ["The old token is rejected at once."], TOKEN)


async def revoke(connection: Connection, name: str) -> ChangeResult:
    """Revoke the token of an operator."""
    return ChangeResult([await revoke_operator(connection, name)])
