"""`tierlane tier` as a command: what its help says, and which rows and fields its verbs work on."""

from typing import TYPE_CHECKING

from tierlane.admin.fields import TIER
from tierlane.admin.named_verbs import Says, add_named_verbs
from tierlane.command import run_group, verb_group

if TYPE_CHECKING:
    from tierlane.admin.tiers_and_models import NamedRows

SAYS = Says(
    list_="Show all in order of service.",
    set_="Change the limits of one; customers without limits of their own follow.",
    delete="Delete one that has no customers, and its quotas.",
)


def _rows() -> "NamedRows":
    from tierlane.admin.tiers import TIERS  # noqa: PLC0415 - help must be quick

    return TIERS


app = verb_group("Tiers: the service classes. List, show, set, create, delete.")
add_named_verbs(app, TIER, _rows, SAYS)


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(app, "tier", argv)
