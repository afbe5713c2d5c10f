"""`tierlane customer` as a command: its verbs and their options. What a verb does is imported when it is run."""
# ruff: noqa: PLC0415 - help must be quick, so what a verb does is imported when it is run

from typing import Annotated, Literal

from tierlane.admin.fields import CUSTOMER
from tierlane.admin.options import CustomerName, Given, Limit, Name, Work, Yes, reads, writes
from tierlane.command import no_variable, run_group, verb_group

app = verb_group("Customers: who may send requests. List, show, create, set, suspend, activate, delete.")


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(app, "customer", argv)


@reads(app, "list")
def list_(
    limit: Limit = 100,
    tier: Annotated[str | None, no_variable("--tier", "Of this tier.", metavar="NAME")] = None,
    status: Annotated[Literal["active", "suspended"] | None, no_variable("--status", "Of this status.")] = None,
) -> Work:
    """Show the first by name, with their own limits."""
    from tierlane.admin.customers import show_all

    return show_all(limit, tier, status)


@reads(app, "show")
def show(
    name: CustomerName,
    webhook_secret: Annotated[  # noqa: FBT002 - typer reads switches from the signature
        bool, no_variable("--webhook-secret", "Show the secret alone that signs its callbacks.", "off")
    ] = False,
) -> Work:
    """Show base limits, own or inherited, quotas and keys of one; or the secret that signs its callbacks."""
    from tierlane.admin.customers import show_one, show_secret

    return show_secret(name) if webhook_secret else show_one(name)


@writes(app, "create", CUSTOMER, new=True)
def create(name: Name, given: Given) -> Work:
    """Add one; limits that are left out are the tier's."""
    from tierlane.admin.customers import create as create_customer
    from tierlane.admin.values import new_row

    return create_customer(name, new_row(CUSTOMER, given))


@writes(app, "set", CUSTOMER)
def set_(name: CustomerName, given: Given) -> Work:
    """Change tier or own limits of one; `none` is to inherit the tier's again."""
    from tierlane.admin.customers import alter_one
    from tierlane.admin.values import changes_of

    return alter_one(name, changes_of(CUSTOMER, given))


@writes(app, "suspend")
def suspend(name: CustomerName) -> Work:
    """Refuse every request of one with 403."""
    from tierlane.admin.customers import alter_one

    return alter_one(name, {"status": "suspended"})


@writes(app, "activate")
def activate(name: CustomerName) -> Work:
    """Serve a suspended one again."""
    from tierlane.admin.customers import alter_one

    return alter_one(name, {"status": "active"})


@writes(app, "delete")
def delete(name: CustomerName, yes: Yes = False) -> Work:  # noqa: FBT002 - typer reads switches from the signature
    """Delete one for good, with its keys and quotas; the audit of its requests stays."""
    from tierlane.admin.customers import delete as delete_customer

    return delete_customer(name, sure=yes)
