"""`tierlane config-changes`: its options."""

from typing import Annotated, Literal

import typer

from tierlane.admin.options import Work, limit_option, reads
from tierlane.command import option, single_verb
from tierlane.lazy import config_history, values

app = single_verb()


@reads(app, "config-changes", "config-changes acme --since 7d\nconfig-changes --table tiers --by alice")
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
        str | None, option("--since", "Only changes of this time, such as 24h or 7d.", "all", metavar="TIME")
    ] = None,
    table: Annotated[
        Literal[
            "tiers",
            "cells",
            "customers",
            "api_keys",
            "quotas",
            "models",
            "prices",
            "cordons",
            "operators",
            "dead_letters",
        ]
        | None,
        option(
            "--table",
            "Only rows of this table: tiers, cells, customers, api_keys, quotas, models, prices, cordons, operators or dead_letters.",
            "all tables",
            metavar="NAME",
        ),
    ] = None,
    by: Annotated[str | None, option("--by", "Only changes of this actor or operator.", "all", metavar="NAME")] = None,
    limit: Annotated[int, limit_option("TIERLANE_ADMIN_LIMIT", 50, 1_000_000)] = 50,
) -> Work:
    """Show who changed which row of the configuration from what to what, the newest first."""
    age = None if since is None else values.duration("--since", since)
    return lambda call: config_history.show_changes(call, limit, customer=customer, since=age, table=table, by=by)
