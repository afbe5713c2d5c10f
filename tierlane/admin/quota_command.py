"""`tierlane quota` as a command: its verbs and their options. What a verb does is imported when it is run."""
# ruff: noqa: PLC0415 - help must be quick, so what a verb does is imported when it is run

from typing import Annotated, TypeAlias

import typer

from tierlane.admin.options import Work, reads, writes
from tierlane.command import no_variable, run_group, verb_group

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

app = verb_group(
    "Quotas: requests per day, month, ... of a customer, or of each customer of a tier. List, set, remove."
)


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(app, "quota", argv)


@reads(app, "list")
def list_(
    customer: Annotated[
        str | None,
        no_variable("--customer", "All that hold for this customer, by name or id.", metavar="NAME_OR_ID"),
    ] = None,
    tier: Annotated[str | None, no_variable("--tier", "Of this tier.", metavar="NAME")] = None,
) -> Work:
    """Show all."""
    from tierlane.admin.quotas import show_all

    return show_all(customer, tier)


@writes(app, "set")
def set_(words: Quota, tier: OfTier = None) -> Work:
    """Give one, such as 10000/day; another amount for the same period takes its place, and what was spent counts."""
    from tierlane.admin.quotas import give

    return give(words, tier)


@writes(app, "remove")
def remove(words: OldQuota, tier: OfTier = None) -> Work:
    """Take one away."""
    from tierlane.admin.quotas import take

    return take(words, tier)
