"""`tierlane key` as a command: its verbs and their options. What a verb does is imported when it is run."""
# ruff: noqa: PLC0415 - help must be quick, so what a verb does is imported when it is run

from typing import Annotated, TypeAlias

import typer

from tierlane.admin.fields import KEY
from tierlane.admin.options import CustomerName, Given, KeyId, Limit, Work, reads, writes
from tierlane.command import no_variable, run_group, verb_group

Purpose: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="What the key is for, for people.")]
ExpiresIn: TypeAlias = Annotated[
    str | None, no_variable("--expires-in", "Refuse the key after this time, such as 30d.", "never", metavar="TIME")
]

app = verb_group("API keys. List, show, create, rotate, revoke.")


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(app, "key", argv)


@reads(app, "list")
def list_(
    limit: Limit = 100,
    customer: Annotated[
        str | None, no_variable("--customer", "Of this customer, by name or id.", metavar="NAME_OR_ID")
    ] = None,
) -> Work:
    """Show the newest; never their secrets, which are kept nowhere."""
    from tierlane.admin.keys import show_all

    return show_all(limit, customer)


@reads(app, "show")
def show(key: KeyId) -> Work:
    """Show all that is known of one."""
    from tierlane.admin.keys import show_one

    return show_one(key)


@writes(app, "create", KEY, new=True)
def create(customer: CustomerName, name: Purpose, given: Given, expires_in: ExpiresIn = None) -> Work:
    """Issue one and print it, this once; a rate without a burst gets a burst of one second."""
    from tierlane.admin.keys import create as create_key
    from tierlane.admin.values import new_row, span

    lifetime = None if expires_in is None else span("--expires-in", expires_in)
    return create_key(customer, name, lifetime, new_row(KEY, given))


@writes(app, "rotate")
def rotate(
    key: KeyId,
    grace: Annotated[str, no_variable("--grace", "How long the old key goes on.", "24h", metavar="TIME")] = "24h",
    expires_in: Annotated[
        str | None,
        no_variable(
            "--expires-in", "Refuse the new key after this time.", "as long as the old one was to live", metavar="TIME"
        ),
    ] = None,
) -> Work:
    """Issue a second one of the same name and limits; both work until the old one expires after the grace."""
    from tierlane.admin.keys import rotate as rotate_key
    from tierlane.admin.values import span

    lifetime = None if expires_in is None else span("--expires-in", expires_in)
    return rotate_key(key, span("--grace", grace), lifetime)


@writes(app, "revoke")
def revoke(key: KeyId) -> Work:
    """Refuse one from now on, for good."""
    from tierlane.admin.keys import revoke as revoke_key

    return revoke_key(key)
