"""`tierlane quota`: its verbs and options."""

from typing import Annotated, TypeAlias

import typer

from tierlane.admin.fields import QUOTA
from tierlane.admin.options import CustomerOption, Given, Limit, OnlyCustomer, Work, changes, reads, writes
from tierlane.command import option, verb_group
from tierlane.lazy import customers, values

OfTier: TypeAlias = Annotated[
    str | None, option("--tier", "For each customer of this tier, instead of one customer.", metavar="NAME")
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

app = verb_group(
    "Quotas: requests, GPU time, tokens or money per day, week, month, ... of a customer, or of each of a tier.",
    "quota set acme 10000/day",
)


@reads(app, "list", "quota list acme")
def quota_list(
    customer: OnlyCustomer = None,
    named: CustomerOption = None,
    tier: Annotated[str | None, option("--tier", "Only quotas of this tier.", metavar="NAME")] = None,
) -> Work:
    """Show quotas; of a customer, all that apply to it, and those of its keys."""
    return customers.show_quotas(values.one_of("CUSTOMER", customer, "--customer", named), tier)


@writes(app, "set", "quota set acme 10000/day\nquota set --tier free '100 usd/month' --alert-shares 0.5,0.9,1", QUOTA)
def quota_set(words: Quota, given: Given, tier: OfTier = None) -> Work:
    """Set a quota, such as 10000/day. It replaces that of the same period and unit; requests already made count."""
    customer, text = customers.owner_and_quota(words, tier)
    row = values.values_of(QUOTA, given)
    return changes(lambda connection: customers.set_quota(connection, customer, tier, text, row))


@writes(app, "remove", "quota remove acme day")
def quota_remove(words: OldQuota, tier: OfTier = None) -> Work:
    """Remove a quota."""
    customer, text = customers.owner_and_quota(words, tier)
    return changes(lambda connection: customers.remove_quota(connection, customer, tier, text))


@reads(app, "alerts", "quota alerts acme")
def quota_alerts(
    customer: OnlyCustomer = None,
    named: CustomerOption = None,
    limit: Limit = 100,
    webhook_secret: Annotated[  # noqa: FBT002 - typer reads switches from the signature
        bool, option("--webhook-secret", "Show only the secret that signs alerts to TIERLANE_ALERT_URL.", "off")
    ] = False,
) -> Work:
    """Show shares of quotas that customers reached, the newest first, and whether they were sent."""
    if webhook_secret:
        return customers.show_installation_secret
    return customers.show_alerts(limit, values.one_of("CUSTOMER", customer, "--customer", named))
