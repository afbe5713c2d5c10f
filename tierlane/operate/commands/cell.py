"""`tierlane cell`: its verbs and options."""

from typing import Annotated

from tierlane.admin.fields import CELL
from tierlane.admin.options import Given, Name, Work, reads, writes
from tierlane.command import option, verb_group
from tierlane.lazy import cells, values

app = verb_group(
    "Cells: list, open, drain, close.", "cell open c2 --redis-url redis://redis-2.internal:6379/0\ncell list"
)


@reads(app, "list", "cell list")
def cell_list() -> Work:
    """Show each cell with its server, the customers that name it, and what waits and runs there."""
    return cells.show_cells


@writes(app, "open", "cell open c2 --redis-url redis://redis-2.internal:6379/0 --weight 2", CELL, new=True)
def cell_open(
    name: Name,
    given: Given,
    *,
    force: Annotated[bool, option("--force", "Also if its server cannot be used from here.", "off")] = False,
) -> Work:
    """Add a cell, or open it again. Its part of the customers moves there within a second."""
    row = values.values_of(CELL, given)
    return lambda call: cells.open_(call, name, row, force=force)


@writes(app, "drain", "cell drain c2")
def cell_drain(name: Name) -> Work:
    """Send no new requests to a cell: its customers move to the others. What it has ends there."""
    return lambda call: cells.drain(call, name)


@writes(app, "close", "cell close c2")
def cell_close(
    name: Name,
    *,
    force: Annotated[bool, option("--force", "Also if it is open, not finished, or does not respond.", "off")] = False,
) -> Work:
    """Stop serving a drained cell that is finished. Its server is not needed any more."""
    return lambda call: cells.close(call, name, force=force)
