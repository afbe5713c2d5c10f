"""`tierlane operator`: its verbs and options."""

from typing import Annotated, Literal, TypeAlias

import typer

from tierlane.admin.options import Work, changes, reads, writes
from tierlane.command import option, verb_group
from tierlane.lazy import operators, values

Operator: TypeAlias = Annotated[
    str, typer.Argument(metavar="NAME", help="The operator, such as ann or ann@example.com.")
]
ExpiresIn: TypeAlias = Annotated[
    str | None, option("--expires-in", "Reject the token after this time, such as 30d.", "never", metavar="TIME")
]

RoleName: TypeAlias = Literal["viewer", "operator", "admin"]
ROLES = "viewer reads; operator also cordons, drains, suspends and revokes keys; admin changes everything."

app = verb_group("Operators of the admin API: list, create, set, rotate, revoke.", "operator create ann --role admin")


@reads(app, "list", "operator list")
def operator_list() -> Work:
    """Show operators, without their tokens, which are not stored."""
    return operators.show_all()


@writes(app, "create", "operator create ann --role operator --expires-in 90d")
def operator_create(
    name: Operator,
    *,
    role: Annotated[RoleName, option("--role", ROLES, "viewer")] = "viewer",
    expires_in: ExpiresIn = None,
) -> Work:
    """Add an operator and print the token, only this once."""
    lifetime = None if expires_in is None else values.duration("--expires-in", expires_in)
    return changes(lambda connection: operators.create(connection, name, role, lifetime))


@writes(app, "set", "operator set ann --role viewer")
def operator_set(name: Operator, *, role: Annotated[RoleName, option("--role", ROLES, "required")]) -> Work:
    """Change the role of an operator, also of its sessions. Its token stays."""
    return changes(lambda connection: operators.set_role(connection, name, role))


@writes(app, "rotate", "operator rotate ann")
def operator_rotate(
    name: Operator,
    expires_in: Annotated[
        str | None,
        option("--expires-in", "Reject the new token after this time.", "the lifetime of the old one", metavar="TIME"),
    ] = None,
) -> Work:
    """Replace the token of an operator, also one that is revoked, and print the new one. The old one is rejected at once."""
    lifetime = None if expires_in is None else values.duration("--expires-in", expires_in)
    return changes(lambda connection: operators.rotate(connection, name, lifetime))


@writes(app, "revoke", "operator revoke ann")
def operator_revoke(name: Operator) -> Work:
    """Reject the token of an operator."""
    return changes(lambda connection: operators.revoke(connection, name))
