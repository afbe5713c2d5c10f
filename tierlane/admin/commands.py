"""`tierlane customer`, `key`, `quota`, `tier`, `model`, `price` and `config-changes`: their verbs and options."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from tierlane.admin.fields import CUSTOMER, KEY, MODEL, PRICE, TIER, Field
from tierlane.admin.options import CustomerName, Given, KeyId, Limit, Name, Work, Yes, limit_option, reads, writes
from tierlane.command import STYLE, LazyModule, no_variable, verb_group

if TYPE_CHECKING:
    from tierlane.admin import config_history, customers, tiers_and_models, values
else:
    # Help must be fast.
    config_history = LazyModule("tierlane.admin.config_history")
    customers = LazyModule("tierlane.admin.customers")
    values = LazyModule("tierlane.admin.values")
    tiers_and_models = LazyModule("tierlane.admin.tiers_and_models")

customer_app = verb_group(
    "Customers: list, show, create, set, suspend, activate, delete.", "customer create acme --tier paid"
)


@reads(customer_app, "list", "customer list --tier paid --status active")
def customer_list(
    limit: Limit = 100,
    tier: Annotated[str | None, no_variable("--tier", "Only customers of this tier.", metavar="NAME")] = None,
    status: Annotated[
        Literal["active", "suspended"] | None, no_variable("--status", "Only customers with this status.")
    ] = None,
) -> Work:
    """Show customers in the order of their names, with their own limits."""
    return customers.show_customers(limit, tier, status)


@reads(customer_app, "show", "customer show acme")
def customer_show(
    name: CustomerName,
    webhook_secret: Annotated[  # noqa: FBT002 - typer reads switches from the signature
        bool, no_variable("--webhook-secret", "Show only the secret that signs its callbacks.", "off")
    ] = False,
) -> Work:
    """Show a customer's base limits and their sources, quotas and keys; or the secret that signs its callbacks."""
    return customers.show_secret(name) if webhook_secret else customers.show_customer(name)


@writes(customer_app, "create", "customer create acme --tier paid --requests-per-second 50", CUSTOMER, new=True)
def customer_create(name: Name, given: Given) -> Work:
    """Create a customer; it inherits the limits that are not given from its tier."""
    return customers.create_customer(name, values.new_row(CUSTOMER, given))


@writes(customer_app, "set", "customer set acme --tier enterprise --burst none", CUSTOMER)
def customer_set(name: CustomerName, given: Given) -> Work:
    """Change the tier or own limits of a customer; with `none` it inherits the limit of its tier."""
    return customers.alter_customer(name, values.changes_of(CUSTOMER, given))


@writes(customer_app, "suspend", "customer suspend acme")
def customer_suspend(name: CustomerName) -> Work:
    """Reject all requests of a customer with 403."""
    return customers.alter_customer(name, {"status": "suspended"})


@writes(customer_app, "activate", "customer activate acme")
def customer_activate(name: CustomerName) -> Work:
    """Accept requests of a suspended customer again."""
    return customers.alter_customer(name, {"status": "active"})


@writes(customer_app, "delete", "customer delete acme --dry-run")
def customer_delete(name: CustomerName, yes: Yes = False) -> Work:  # noqa: FBT002 - typer reads switches from the signature
    """Delete a customer with its keys and quotas. The audit of its requests is kept."""
    return customers.delete_customer(name, sure=yes)


Purpose: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="The purpose of the key.")]
ExpiresIn: TypeAlias = Annotated[
    str | None, no_variable("--expires-in", "Reject the key after this time, such as 30d.", "never", metavar="TIME")
]

key_app = verb_group("API keys: list, show, create, rotate, revoke.", "key create acme ci")


OnlyCustomer: TypeAlias = Annotated[
    str | None, typer.Argument(metavar="CUSTOMER", help="Only of this customer, by name or id.", show_default=False)
]
CustomerOption: TypeAlias = Annotated[
    str | None, no_variable("--customer", "The same as the argument.", metavar="NAME_OR_ID")
]


@reads(key_app, "list", "key list acme")
def key_list(customer: OnlyCustomer = None, named: CustomerOption = None, limit: Limit = 100) -> Work:
    """Show the newest keys, without their secrets, which are not stored."""
    return customers.show_keys(limit, values.one_of("CUSTOMER", customer, "--customer", named))


@reads(key_app, "show", "key show 0123456789ab")
def key_show(key: KeyId) -> Work:
    """Show a key."""
    return customers.show_key(key)


@writes(key_app, "create", "key create acme ci --expires-in 90d", KEY, new=True)
def key_create(customer: CustomerName, name: Purpose, given: Given, expires_in: ExpiresIn = None) -> Work:
    """Issue a key and print it, only this once. A rate without a burst gets a burst of one second."""
    lifetime = None if expires_in is None else values.duration("--expires-in", expires_in)
    return customers.create_key(customer, name, lifetime, values.new_row(KEY, given))


@writes(key_app, "rotate", "key rotate 0123456789ab --grace 24h")
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
    lifetime = None if expires_in is None else values.duration("--expires-in", expires_in)
    return customers.rotate_key(key, values.duration("--grace", grace), lifetime)


@writes(key_app, "revoke", "key revoke 0123456789ab")
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
        help="The customer, by name or id, without --tier; and the quota, such as 10000/day or '3600 gpu-s/day'.",
    ),
]
OldQuota: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        metavar="[CUSTOMER] QUOTA",
        help="The customer, by name or id, without --tier; and the quota, or only its period and unit: day, usd/month.",
    ),
]

quota_app = verb_group(
    "Quotas: requests, GPU time, tokens or money per day, week, month, ... of a customer, or of each of a tier.",
    "quota set acme 10000/day",
)


@reads(quota_app, "list", "quota list acme")
def quota_list(
    customer: OnlyCustomer = None,
    named: CustomerOption = None,
    tier: Annotated[str | None, no_variable("--tier", "Only quotas of this tier.", metavar="NAME")] = None,
) -> Work:
    """Show quotas; of a customer, all that apply to it."""
    return customers.show_quotas(values.one_of("CUSTOMER", customer, "--customer", named), tier)


@writes(quota_app, "set", "quota set acme 10000/day\nquota set --tier free '100 usd/month'")
def quota_set(words: Quota, tier: OfTier = None) -> Work:
    """Set a quota, such as 10000/day. It replaces that of the same period and unit; requests already made count."""
    return customers.set_quota(words, tier)


@writes(quota_app, "remove", "quota remove acme day")
def quota_remove(words: OldQuota, tier: OfTier = None) -> Work:
    """Remove a quota."""
    return customers.remove_quota(words, tier)


def _add_verbs(
    app: typer.Typer,
    fields: Sequence[Field],
    rows: Callable[[], "tiers_and_models.NamedRows"],
    texts: tuple[str, str, str],
    name_and_options: tuple[str, str, str, str],
) -> None:
    """Add list, show, set, create and delete to a group; `texts` are the helps of list, set and delete.

    `name_and_options`, for the examples: the noun, a name, options of `set`, options of `create`.
    """
    list_help, set_help, delete_help = texts
    noun, example, set_options, create_options = name_and_options

    @reads(app, "list", f"{noun} list", says=list_help)
    def list_() -> Work:
        return rows().show_all()

    @reads(app, "show", f"{noun} show {example}", says="Show one with the meaning of its columns.")
    def show(name: Name) -> Work:
        return rows().show_one(name)

    @writes(app, "set", f"{noun} set {example} {set_options}", fields, says=set_help)
    def set_(name: Name, given: Given) -> Work:
        return rows().alter(name, values.changes_of(fields, given))

    @writes(app, "create", f"{noun} create {create_options}", fields, new=True, says="Create one.")
    def create(name: Name, given: Given) -> Work:
        return rows().create(name, values.new_row(fields, given))

    @writes(app, "delete", f"{noun} delete {example} --dry-run", says=delete_help)
    def delete(name: Name) -> Work:
        return rows().delete(name)


tier_app = verb_group("Tiers: list, show, set, create, delete.", "tier set free --requests-per-second 50 --burst 100")
_add_verbs(
    tier_app,
    TIER,
    lambda: tiers_and_models.TIERS,
    (
        "Show all tiers in order of priority.",
        "Change the limits of a tier; customers without their own limits follow.",
        "Delete a tier without customers, and its quotas.",
    ),
    (
        "tier",
        "free",
        "--requests-per-second 50 --burst 100",
        (
            "trial --priority 4 --guaranteed-share 0 \\\n"
            "  --requests-per-second 5 --burst 10 --max-concurrency 2 \\\n"
            "  --max-queue-depth 100 --max-queue-ms 1000"
        ),
    ),
)

model_app = verb_group("Models and their batch settings: list, show, set, create, delete.", "model list")
_add_verbs(
    model_app,
    MODEL,
    lambda: tiers_and_models.MODELS,
    (
        "Show all models in the order of their names.",
        "Change the batch settings of a model, or enable or disable it.",
        "Delete a model. Requests for it get 404.",
    ),
    ("model", "tiny", "--max-batch-size 16 --max-wait-ms 20", "big --pool default --max-batch-size 8"),
)

PricedModel: TypeAlias = Annotated[str, typer.Argument(metavar="MODEL", help="The model, by name.")]

price_app = verb_group("Prices of models in USD: list, set, remove.", "price set tiny --usd-per-gpu-s 0.002")


@reads(price_app, "list", "price list tiny")
def price_list(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Only of this model.", show_default=False)
    ] = None,
) -> Work:
    """Show prices and when they begin, the latest first; a model without one is free."""
    return tiers_and_models.show_prices(model)


@writes(
    price_app,
    "set",
    "price set tiny --usd-per-gpu-s 0.002\nprice set tiny --usd-per-1000-tokens 0.4 --from 2027-01-01",
    PRICE,
)
def price_set(
    model: PricedModel,
    given: Given,
    since: Annotated[
        str | None,
        no_variable("--from", "First time that it applies to, such as 2027-01-01, in UTC.", "now", metavar="TIME"),
    ] = None,
) -> Work:
    """Set the price of a model for requests from now or a later time on. Earlier prices stay, for exports of usage."""
    return tiers_and_models.set_price(model, values.changes_of(PRICE, given), since)


@writes(price_app, "remove", "price remove tiny 2026-11-01T12:30:00")
def price_remove(
    model: PricedModel,
    since: Annotated[str, typer.Argument(metavar="FROM", help="When it begins, as `price list` shows it.")],
) -> Work:
    """Remove a price; the one before it applies instead."""
    return tiers_and_models.remove_price(model, since)


config_changes_app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=STYLE
)


@reads(config_changes_app, "config-changes", "config-changes acme --since 7d\nconfig-changes --table tiers --by alice")
def config_changes(
    customer: Annotated[
        str | None,
        typer.Argument(
            metavar="CUSTOMER",
            help="Only changes of this customer, its keys and its quotas, by name or id; it may be deleted.",
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        str | None, no_variable("--since", "Only changes of this time, such as 24h or 7d.", "all", metavar="TIME")
    ] = None,
    table: Annotated[
        Literal["tiers", "cells", "customers", "api_keys", "quotas", "models", "prices", "cordons", "dead_letters"]
        | None,
        no_variable(
            "--table",
            "Only rows of this table: tiers, cells, customers, api_keys, quotas, models, prices, cordons or dead_letters.",
            "all tables",
            metavar="NAME",
        ),
    ] = None,
    by: Annotated[str | None, no_variable("--by", "Only changes of this actor.", "all", metavar="NAME")] = None,
    limit: Annotated[int, limit_option("TIERLANE_ADMIN_LIMIT", 50, 1_000_000)] = 50,
) -> Work:
    """Show who changed which row of the configuration from what to what, the newest first."""
    age = None if since is None else values.duration("--since", since)
    return config_history.show_changes(limit, customer, age, table, by)
