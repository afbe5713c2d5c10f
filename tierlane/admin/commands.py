"""`tierlane customer`, `key`, `quota`, `tier` and `model`: their verbs and options."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

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
from tierlane.command import LazyModule, no_variable, verb_group

if TYPE_CHECKING:
    from tierlane.admin import customers, runner, tiers_and_models
else:
    # Help must be fast.
    customers = LazyModule("tierlane.admin.customers")
    runner = LazyModule("tierlane.admin.runner")
    tiers_and_models = LazyModule("tierlane.admin.tiers_and_models")

customer_app = verb_group("Customers: list, show, create, set, suspend, activate, delete.")


@reads(customer_app, "list")
def customer_list(
    limit: Limit = 100,
    tier: Annotated[str | None, no_variable("--tier", "Only customers of this tier.", metavar="NAME")] = None,
    status: Annotated[
        Literal["active", "suspended"] | None, no_variable("--status", "Only customers with this status.")
    ] = None,
) -> Work:
    """Show customers in the order of their names, with their own limits."""
    return customers.show_customers(limit, tier, status)


@reads(customer_app, "show")
def customer_show(
    name: CustomerName,
    webhook_secret: Annotated[  # noqa: FBT002 - typer reads switches from the signature
        bool, no_variable("--webhook-secret", "Show only the secret that signs its callbacks.", "off")
    ] = False,
) -> Work:
    """Show a customer's base limits and their sources, quotas and keys; or the secret that signs its callbacks."""
    return customers.show_secret(name) if webhook_secret else customers.show_customer(name)


@writes(customer_app, "create", CUSTOMER, new=True)
def customer_create(name: Name, given: Given) -> Work:
    """Create a customer; it inherits the limits that are not given from its tier."""
    return customers.create_customer(name, runner.new_row(CUSTOMER, given))


@writes(customer_app, "set", CUSTOMER)
def customer_set(name: CustomerName, given: Given) -> Work:
    """Change the tier or own limits of a customer; with `none` it inherits the limit of its tier."""
    return customers.alter_customer(name, runner.changes_of(CUSTOMER, given))


@writes(customer_app, "suspend")
def customer_suspend(name: CustomerName) -> Work:
    """Reject all requests of a customer with 403."""
    return customers.alter_customer(name, {"status": "suspended"})


@writes(customer_app, "activate")
def customer_activate(name: CustomerName) -> Work:
    """Accept requests of a suspended customer again."""
    return customers.alter_customer(name, {"status": "active"})


@writes(customer_app, "delete")
def customer_delete(name: CustomerName, yes: Yes = False) -> Work:  # noqa: FBT002 - typer reads switches from the signature
    """Delete a customer with its keys and quotas. The audit of its requests is kept."""
    return customers.delete_customer(name, sure=yes)


Purpose: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="The purpose of the key.")]
ExpiresIn: TypeAlias = Annotated[
    str | None, no_variable("--expires-in", "Reject the key after this time, such as 30d.", "never", metavar="TIME")
]

key_app = verb_group("API keys: list, show, create, rotate, revoke.")


@reads(key_app, "list")
def key_list(
    limit: Limit = 100,
    customer: Annotated[
        str | None, no_variable("--customer", "Only keys of this customer, by name or id.", metavar="NAME_OR_ID")
    ] = None,
) -> Work:
    """Show the newest keys, without their secrets, which are not stored."""
    return customers.show_keys(limit, customer)


@reads(key_app, "show")
def key_show(key: KeyId) -> Work:
    """Show a key."""
    return customers.show_key(key)


@writes(key_app, "create", KEY, new=True)
def key_create(customer: CustomerName, name: Purpose, given: Given, expires_in: ExpiresIn = None) -> Work:
    """Issue a key and print it, only this once. A rate without a burst gets a burst of one second."""
    lifetime = None if expires_in is None else runner.duration("--expires-in", expires_in)
    return customers.create_key(customer, name, lifetime, runner.new_row(KEY, given))


@writes(key_app, "rotate")
def key_rotate(
    key: KeyId,
    grace: Annotated[str, no_variable("--grace", "How long the old key stays valid.", "24h", metavar="TIME")] = "24h",
    expires_in: Annotated[
        str | None,
        no_variable(
            "--expires-in", "Reject the new key after this time.", "the lifetime of the old key", metavar="TIME"
        ),
    ] = None,
) -> Work:
    """Issue a second key with the same name and limits. Both work until the old one expires after the grace time."""
    lifetime = None if expires_in is None else runner.duration("--expires-in", expires_in)
    return customers.rotate_key(key, runner.duration("--grace", grace), lifetime)


@writes(key_app, "revoke")
def key_revoke(key: KeyId) -> Work:
    """Reject a key permanently."""
    return customers.revoke_key(key)


OfTier: TypeAlias = Annotated[
    str | None, no_variable("--tier", "For each customer of this tier, instead of one customer.", metavar="NAME")
]
Quota: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        metavar="[CUSTOMER] QUOTA",
        help="The customer, by name or id, without --tier; and the quota, such as 10000/day.",
    ),
]
OldQuota: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        metavar="[CUSTOMER] QUOTA",
        help="The customer, by name or id, without --tier; and the quota, such as 10000/day, or its period, such as day.",
    ),
]

quota_app = verb_group(
    "Quotas: requests per day, month, ... of a customer, or of each customer of a tier. List, set, remove."
)


@reads(quota_app, "list")
def quota_list(
    customer: Annotated[
        str | None,
        no_variable("--customer", "All quotas that apply to this customer, by name or id.", metavar="NAME_OR_ID"),
    ] = None,
    tier: Annotated[str | None, no_variable("--tier", "Only quotas of this tier.", metavar="NAME")] = None,
) -> Work:
    """Show quotas."""
    return customers.show_quotas(customer, tier)


@writes(quota_app, "set")
def quota_set(words: Quota, tier: OfTier = None) -> Work:
    """Set a quota, such as 10000/day. It replaces the quota of the same period; requests already made count."""
    return customers.set_quota(words, tier)


@writes(quota_app, "remove")
def quota_remove(words: OldQuota, tier: OfTier = None) -> Work:
    """Remove a quota."""
    return customers.remove_quota(words, tier)


def _add_verbs(
    app: typer.Typer,
    fields: Sequence[Field],
    rows: Callable[[], "tiers_and_models.NamedRows"],
    texts: tuple[str, str, str],
) -> None:
    """Add list, show, set, create and delete to a group; `texts` are the helps of list, set and delete."""
    list_help, set_help, delete_help = texts

    @reads(app, "list", says=list_help)
    def list_() -> Work:
        return rows().show_all()

    @reads(app, "show", says="Show one with the meaning of its columns.")
    def show(name: Name) -> Work:
        return rows().show_one(name)

    @writes(app, "set", fields, says=set_help)
    def set_(name: Name, given: Given) -> Work:
        return rows().alter(name, runner.changes_of(fields, given))

    @writes(app, "create", fields, new=True, says="Create one.")
    def create(name: Name, given: Given) -> Work:
        return rows().create(name, runner.new_row(fields, given))

    @writes(app, "delete", says=delete_help)
    def delete(name: Name) -> Work:
        return rows().delete(name)


tier_app = verb_group("Tiers: list, show, set, create, delete.")
_add_verbs(
    tier_app,
    TIER,
    lambda: tiers_and_models.TIERS,
    (
        "Show all tiers in order of priority.",
        "Change the limits of a tier; customers without their own limits follow.",
        "Delete a tier without customers, and its quotas.",
    ),
)

model_app = verb_group("Models and their batch settings: list, show, set, create, delete.")
_add_verbs(
    model_app,
    MODEL,
    lambda: tiers_and_models.MODELS,
    (
        "Show all models in the order of their names.",
        "Change the batch settings of a model, or enable or disable it.",
        "Delete a model. Requests for it get 404.",
    ),
)
