"""`tierlane price`: its verbs and options."""

from typing import Annotated, TypeAlias

import typer

from tierlane.admin.fields import PRICE
from tierlane.admin.options import Given, Work, changes, reads, writes
from tierlane.command import option, verb_group
from tierlane.lazy import tiers_and_models, values

PricedModel: TypeAlias = Annotated[str, typer.Argument(metavar="MODEL", help="The model, by name.")]

app = verb_group("Prices of models in USD: list, set, remove.", "price set tiny --usd-per-gpu-s 0.002")


@reads(app, "list", "price list tiny")
def price_list(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Only of this model.", show_default=False)
    ] = None,
) -> Work:
    """Show prices and when they begin, the latest first; a model without one is free."""
    return tiers_and_models.show_prices(model)


@writes(
    app,
    "set",
    "price set tiny --usd-per-gpu-s 0.002\nprice set tiny --usd-per-1000-tokens 0.4 --from 2027-01-01",
    PRICE,
)
def price_set(
    model: PricedModel,
    given: Given,
    since: Annotated[
        str | None,
        option("--from", "First time that it applies to, such as 2027-01-01, in UTC.", "now", metavar="TIME"),
    ] = None,
) -> Work:
    """Set the price of a model for requests from now or a later time on. Earlier prices stay, for exports of usage."""
    row = values.changes_of(PRICE, given)
    start = None if since is None else values.time("--from", since)
    return changes(lambda connection: tiers_and_models.set_price(connection, model, row, start))


@writes(app, "remove", "price remove tiny 2026-11-01T12:30:00")
def price_remove(
    model: PricedModel,
    since: Annotated[str, typer.Argument(metavar="FROM", help="When it begins, as `price list` shows it.")],
) -> Work:
    """Remove a price; the one before it applies instead."""
    start = values.time("FROM", since)
    return changes(lambda connection: tiers_and_models.remove_price(connection, model, start))
