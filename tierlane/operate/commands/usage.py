"""`tierlane usage`: its verb and options."""

from typing import Annotated, Literal

from tierlane.admin.options import PLACE, REMOTE, Work, add_verb
from tierlane.command import option, verb_group
from tierlane.lazy import usage

app = verb_group("Usage of customers: export.", "usage export --from 2026-11-01 --to 2026-11-30")

_OUTPUT = option("--output -o", "Output format.", "csv", variable="TIERLANE_USAGE_OUTPUT")


def usage_export(
    *,
    first: Annotated[str, option("--from", "First day, in UTC.", "required", metavar="YYYY-MM-DD")],
    last: Annotated[str, option("--to", "Last day, in UTC; it is included.", "required", metavar="YYYY-MM-DD")],
    by: Annotated[Literal["day", "total"], option("--by", "Lines for each day, or for the whole time.", "day")] = "day",
) -> Work:
    """Export requests, tokens, GPU seconds and cost by customer, key and model, from the audit and the table prices."""
    return usage.export(first, last, daily=by == "day")


add_verb(
    app,
    "export",
    usage_export,
    {"output": (Annotated[Literal["csv", "json"], _OUTPUT], "csv"), **PLACE, **REMOTE},
    "usage export --from 2026-11-01 --to 2026-11-30 --by total",
)
