"""`tierlane apply` and `tierlane export`: their options."""

from typing import Annotated

from tierlane.admin.options import PLACE, REMOTE, Work, add_verb, writes
from tierlane.command import option, single_verb
from tierlane.lazy import apply

apply_app = single_verb()
export_app = single_verb()


@writes(apply_app, "apply", "apply -f catalog.yaml --dry-run\napply -f catalog.yaml --prune")
def apply_(
    file: Annotated[
        str, option("--file -f", "The catalog, in YAML; - reads standard input.", "required", metavar="FILE")
    ],
    *,
    prune: Annotated[
        bool, option("--prune", "Delete rows that are not in the file, of the sections that it has.", "off")
    ] = False,
) -> Work:
    """Make tiers, customers, quotas, models, prices and cells those of a file: all changes or none.

    A second run changes nothing. --dry-run exits with 2 if something would change, 0 if not; 1 is an error, of the file too.
    """
    return lambda call: apply.apply_file(call, file, prune=prune)


def _export() -> Work:
    """Print tiers, customers, quotas, models, prices and cells as a file for `apply`, without keys and secrets."""
    return apply.export_file


add_verb(export_app, "export", _export, {**PLACE, **REMOTE}, "export")
