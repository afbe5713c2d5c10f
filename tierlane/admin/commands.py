"""`tierlane customer`, `key`, `quota`, `tier` and `model` as commands: their verbs and options.

What a verb does is imported when it is run.
"""
# ruff: noqa: PLC0415 - help must be quick, so what a verb does is imported when it is run

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeAlias

import typer

from tierlane.admin.options import (
    CUSTOMER,
    KEY,
    MODEL,
    TIER,
    CustomerName,
    Field,
    Given,
    KeyId,
    Limit,
    Name,
    Work,
    Yes,
    reads,
    writes,
)
from tierlane.command import no_variable, run_group, verb_group

if TYPE_CHECKING:
    from tierlane.admin.tiers_and_models import NamedRows


customer_app = verb_group("Customers: who may send requests. List, show, create, set, suspend, activate, delete.")


def customer_main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(customer_app, "customer", argv)


@reads(customer_app, "list")
def customer_list(
    limit: Limit = 100,
    tier: Annotated[str | None, no_variable("--tier", "Of this tier.", metavar="NAME")] = None,
    status: Annotated[Literal["active", "suspended"] | None, no_variable("--status", "Of this status.")] = None,
) -> Work:
    """Show the first by name, with their own limits."""
    from tierlane.admin.customers import show_all

    return show_all(limit, tier, status)


@reads(customer_app, "show")
def customer_show(
    name: CustomerName,
    webhook_secret: Annotated[  # noqa: FBT002 - typer reads switches from the signature
        bool, no_variable("--webhook-secret", "Show the secret alone that signs its callbacks.", "off")
    ] = False,
) -> Work:
    """Show base limits, own or inherited, quotas and keys of one; or the secret that signs its callbacks."""
    from tierlane.admin.customers import show_one, show_secret

    return show_secret(name) if webhook_secret else show_one(name)


@writes(customer_app, "create", CUSTOMER, new=True)
def customer_create(name: Name, given: Given) -> Work:
    """Add one; limits that are left out are the tier's."""
    from tierlane.admin.customers import create as create_customer
    from tierlane.admin.values import new_row

    return create_customer(name, new_row(CUSTOMER, given))


@writes(customer_app, "set", CUSTOMER)
def customer_set(name: CustomerName, given: Given) -> Work:
    """Change tier or own limits of one; `none` is to inherit the tier's again."""
    from tierlane.admin.customers import alter_one
    from tierlane.admin.values import changes_of

    return alter_one(name, changes_of(CUSTOMER, given))


@writes(customer_app, "suspend")
def customer_suspend(name: CustomerName) -> Work:
    """Refuse every request of one with 403."""
    from tierlane.admin.customers import alter_one

    return alter_one(name, {"status": "suspended"})


@writes(customer_app, "activate")
def customer_activate(name: CustomerName) -> Work:
    """Serve a suspended one again."""
    from tierlane.admin.customers import alter_one

    return alter_one(name, {"status": "active"})


@writes(customer_app, "delete")
def customer_delete(name: CustomerName, yes: Yes = False) -> Work:  # noqa: FBT002 - typer reads switches from the signature
    """Delete one for good, with its keys and quotas; the audit of its requests stays."""
    from tierlane.admin.customers import delete as delete_customer

    return delete_customer(name, sure=yes)


Purpose: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="What the key is for, for people.")]
ExpiresIn: TypeAlias = Annotated[
    str | None, no_variable("--expires-in", "Refuse the key after this time, such as 30d.", "never", metavar="TIME")
]

key_app = verb_group("API keys. List, show, create, rotate, revoke.")


def key_main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(key_app, "key", argv)


@reads(key_app, "list")
def key_list(
    limit: Limit = 100,
    customer: Annotated[
        str | None, no_variable("--customer", "Of this customer, by name or id.", metavar="NAME_OR_ID")
    ] = None,
) -> Work:
    """Show the newest; never their secrets, which are kept nowhere."""
    from tierlane.admin.keys import show_all

    return show_all(limit, customer)


@reads(key_app, "show")
def key_show(key: KeyId) -> Work:
    """Show all that is known of one."""
    from tierlane.admin.keys import show_one

    return show_one(key)


@writes(key_app, "create", KEY, new=True)
def key_create(customer: CustomerName, name: Purpose, given: Given, expires_in: ExpiresIn = None) -> Work:
    """Issue one and print it, this once; a rate without a burst gets a burst of one second."""
    from tierlane.admin.keys import create as create_key
    from tierlane.admin.values import new_row, span

    lifetime = None if expires_in is None else span("--expires-in", expires_in)
    return create_key(customer, name, lifetime, new_row(KEY, given))


@writes(key_app, "rotate")
def key_rotate(
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


@writes(key_app, "revoke")
def key_revoke(key: KeyId) -> Work:
    """Refuse one from now on, for good."""
    from tierlane.admin.keys import revoke as revoke_key

    return revoke_key(key)


OfTier: TypeAlias = Annotated[
    str | None, no_variable("--tier", "Of each customer of this tier, instead of one customer.", metavar="NAME")
]
Quota: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        metavar="[CUSTOMER] QUOTA", help="The customer, by name or id, unless --tier; and the quota, such as 10000/day."
    ),
]
OldQuota: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        metavar="[CUSTOMER] QUOTA",
        help="The customer, by name or id, unless --tier; and the quota, such as 10000/day, or its period: day.",
    ),
]

quota_app = verb_group(
    "Quotas: requests per day, month, ... of a customer, or of each customer of a tier. List, set, remove."
)


def quota_main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(quota_app, "quota", argv)


@reads(quota_app, "list")
def quota_list(
    customer: Annotated[
        str | None,
        no_variable("--customer", "All that hold for this customer, by name or id.", metavar="NAME_OR_ID"),
    ] = None,
    tier: Annotated[str | None, no_variable("--tier", "Of this tier.", metavar="NAME")] = None,
) -> Work:
    """Show all."""
    from tierlane.admin.quotas import show_all

    return show_all(customer, tier)


@writes(quota_app, "set")
def quota_set(words: Quota, tier: OfTier = None) -> Work:
    """Give one, such as 10000/day; another amount for the same period takes its place, and what was spent counts."""
    from tierlane.admin.quotas import give

    return give(words, tier)


@writes(quota_app, "remove")
def quota_remove(words: OldQuota, tier: OfTier = None) -> Work:
    """Take one away."""
    from tierlane.admin.quotas import take

    return take(words, tier)


class VerbTexts(NamedTuple):
    """What help says of the verbs that are not the same for every kind of row."""

    list_: str
    set_: str
    delete: str


def add_named_verbs(
    app: typer.Typer, fields: Sequence[Field], rows: Callable[[], "NamedRows"], says: VerbTexts
) -> None:
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


TIER_SAYS = VerbTexts(
    list_="Show all in order of service.",
    set_="Change the limits of one; customers without limits of their own follow.",
    delete="Delete one that has no customers, and its quotas.",
)


def _tier_rows() -> "NamedRows":
    from tierlane.admin.tiers_and_models import TIERS

    return TIERS


tier_app = verb_group("Tiers: the service classes. List, show, set, create, delete.")
add_named_verbs(tier_app, TIER, _tier_rows, TIER_SAYS)


def tier_main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(tier_app, "tier", argv)


MODEL_SAYS = VerbTexts(
    list_="Show all by name.",
    set_="Change how batches of one are made, or switch it on or off.",
    delete="Delete one; requests for it answer 404.",
)


def _model_rows() -> "NamedRows":
    from tierlane.admin.tiers_and_models import MODELS

    return MODELS


model_app = verb_group("Models, and how their batches are made. List, show, set, create, delete.")
add_named_verbs(model_app, MODEL, _model_rows, MODEL_SAYS)


def model_main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(model_app, "model", argv)
