"""The options that select a pool or a cell."""

from typing import Annotated, TypeAlias

from tierlane.command import option

OfPool: TypeAlias = Annotated[str | None, option("--pool", "Only this pool.", "all pools", metavar="NAME")]
OfCell: TypeAlias = Annotated[str | None, option("--cell", "Only this cell.", "all cells", metavar="NAME")]
