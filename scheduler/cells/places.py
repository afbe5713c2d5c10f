"""Which cells exist, their URLs, and the cells of a customer, from the rows of the table `cells`. Pure.

Without a row there is one cell, the default one, at TIERLANE_REDIS_URL. The rows of other cells have no user and password in
their URLs, so that the table has no secrets: all cells use those of TIERLANE_REDIS_URL.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from scheduler.cells.placement import Cell, homes
from scheduler.redis_client.keys import DEFAULT_CELL

_SENTINEL_LOGIN = ("sentinel_user=", "sentinel_password=")


class CellServer(Protocol):
    """The server of a cell, and its state: open, draining or closed."""

    @property
    def name(self) -> str: ...
    @property
    def redis_url(self) -> str | None: ...
    @property
    def state(self) -> str: ...


class CellView(CellServer, Protocol):
    """One row of `cells`."""

    @property
    def weight(self) -> float: ...


def cell_urls(base_url: str, rows: Iterable[CellServer], *, closed: bool = False) -> dict[str, str]:
    """The URLs of all cells, by name; the default cell first. `base_url`: TIERLANE_REDIS_URL; `closed`: also of closed cells."""
    base = base_url.partition("#")[0]
    urls = {DEFAULT_CELL: base}
    for row in rows:
        if row.name != DEFAULT_CELL and (closed or row.state != "closed"):
            server = base if row.redis_url is None else with_credentials(row.redis_url, base)
            urls[row.name] = f"{server}#{row.name}"
    return urls


def with_credentials(url: str, base_url: str) -> str:
    """The URL with user, password and, for TLS, the options of `base_url`, if it has none; with the login at Sentinels."""
    scheme, _, rest = url.partition("://")
    base_scheme, _, base_rest = base_url.partition("://")
    credentials, at, _ = base_rest.partition("?")[0].rpartition("@")
    inherited: tuple[str, ...] = ()
    if scheme.endswith("+sentinel") and base_scheme.endswith("+sentinel"):
        inherited = _SENTINEL_LOGIN
    if scheme.startswith("rediss") and base_scheme.startswith("rediss") and "?" not in url:
        inherited += ("ssl_", "sentinel_tls=") if inherited else ("ssl_",)
    options = [option for option in base_rest.partition("?")[2].split("&") if option.startswith(inherited)]
    found = f"{scheme}://{credentials}{at}{rest}"
    return f"{found}{'&' if '?' in url else '?'}{'&'.join(options)}" if options else found


def login_options(url: str) -> list[str]:
    """The names of the options of a URL that are a login at Sentinels."""
    given = url.partition("#")[0].partition("?")[2].split("&")
    return [name.rstrip("=") for name in _SENTINEL_LOGIN if any(option.startswith(name) for option in given)]


def without_credentials(url: str) -> str:
    """The URL of the server without user, password, options and cell."""
    scheme, _, rest = url.partition("#")[0].partition("?")[0].partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def former_homes(customer_id: str, rows: Sequence[CellView], home: str, override: str | None = None) -> frozenset[str]:
    """The cells that probably were a customer's home before `home`, if it has just become that.

    Those that come before it in the order of its cells, since they were open; with an override, any cell.
    """
    names = {row.name for row in rows if row.state != "closed"} | {DEFAULT_CELL}
    if override == home:
        return frozenset(names - {home})
    cells = [Cell(row.name, row.weight) for row in rows if row.state != "closed"]
    if all(cell.name != DEFAULT_CELL for cell in cells):
        cells.append(Cell(DEFAULT_CELL))
    ranked = homes(customer_id, cells, len(cells))
    before = ranked[: ranked.index(home)] if home in ranked else ranked
    return frozenset([*before, *({override} & names if override else ())])


def cells_of(
    customer_id: str, rows: Sequence[CellView], override: str | None = None, spread: int = 1
) -> tuple[str, ...]:
    """The cells of a customer, the best first; empty if no cell is open.

    `override`: `customers.cell`, which counts while that cell is open. `spread`: the most cells that it uses.
    """
    cells = [Cell(row.name, row.weight, row.state == "open") for row in rows]
    if all(cell.name != DEFAULT_CELL for cell in cells):
        cells.append(Cell(DEFAULT_CELL))
    if not any(cell.is_open for cell in cells):
        return ()
    found = homes(customer_id, cells, spread)
    if override is None or not any(cell.name == override and cell.is_open for cell in cells):
        return tuple(found)
    return (override, *(name for name in found if name != override))[:spread]
