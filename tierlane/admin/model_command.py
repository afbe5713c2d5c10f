"""`tierlane model` as a command: what its help says, and which rows and fields its verbs work on."""

from typing import TYPE_CHECKING

from tierlane.admin.fields import MODEL
from tierlane.admin.named_verbs import Says, add_named_verbs
from tierlane.command import run_group, verb_group

if TYPE_CHECKING:
    from tierlane.admin.tiers_and_models import NamedRows

SAYS = Says(
    list_="Show all by name.",
    set_="Change how batches of one are made, or switch it on or off.",
    delete="Delete one; requests for it answer 404.",
)


def _rows() -> "NamedRows":
    from tierlane.admin.models import MODELS  # noqa: PLC0415 - help must be quick

    return MODELS


app = verb_group("Models, and how their batches are made. List, show, set, create, delete.")
add_named_verbs(app, MODEL, _rows, SAYS)


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(app, "model", argv)
