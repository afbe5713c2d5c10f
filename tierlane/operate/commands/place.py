"""The options that select a pool or a cell."""

from typing import Annotated, TypeAlias

from tierlane.command import no_variable

OfPool: TypeAlias = Annotated[str | None, no_variable("--pool", "Only this pool.", "all pools", metavar="NAME")]
OfCell: TypeAlias = Annotated[str | None, no_variable("--cell", "Only this cell.", "all cells", metavar="NAME")]
