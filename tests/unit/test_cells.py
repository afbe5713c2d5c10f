"""Cells: homes by rendezvous hash, how many workers each cell should have, and which workers move."""

from collections import Counter

import pytest

from ledger.catalog.snapshot import CellRow
from ratelimit.shares import TierShare
from scheduler.cells.placement import (
    READY,
    Cell,
    CellLoad,
    destination,
    fair_workers,
    home,
    homes,
    move_chances,
    ready_workers,
    shares_in_cells,
    workers_needed,
)
from scheduler.cells.places import cell_urls, cells_of, former_homes, login_options
from scheduler.redis_client.keys import Keys, tag_of

TIERS = (TierShare("enterprise", 1, 0.05), TierShare("free", 3, 0.1))
CUSTOMERS = [f"customer-{number}" for number in range(4000)]


def cells(*names: str, closed: str = "") -> list[Cell]:
    return [Cell(name, is_open=name != closed) for name in names]


def load(
    name: str, workers: int, *, enterprise: float = 0.0, free: float = 0.0, deciding: float = 1e9, ready: float = 0.0
) -> CellLoad:
    return CellLoad(
        name, workers, {"enterprise": enterprise, "free": free}, min(deciding, workers), ready=ready, above=enterprise
    )


def test_homes_of_known_customers() -> None:
    """Homes are the same in all processes and releases: customers would move otherwise."""
    assert [home(name, cells("a", "b", "c")) for name in ("acme", "globex", "initech", "umbrella")] == [
        "a",
        "b",
        "b",
        "b",
    ]
    assert homes("acme", cells("a", "b", "c"), 3) == ["a", "c", "b"]


def test_a_cell_that_is_added_takes_customers_and_moves_no_others() -> None:
    """A quarter of the customers moves to the fourth cell; all others stay."""
    before = {name: home(name, cells("a", "b", "c")) for name in CUSTOMERS}
    after = {name: home(name, cells("a", "b", "c", "d")) for name in CUSTOMERS}

    moved = [name for name in CUSTOMERS if before[name] != after[name]]
    assert {after[name] for name in moved} == {"d"}
    assert 0.22 < len(moved) / len(CUSTOMERS) < 0.28


def test_a_closed_cell_gives_its_customers_to_all_others() -> None:
    """Those of the other cells stay."""
    before = {name: home(name, cells("a", "b", "c")) for name in CUSTOMERS}
    after = {name: home(name, cells("a", "b", "c", closed="b")) for name in CUSTOMERS}

    assert [name for name in CUSTOMERS if before[name] != "b" and before[name] != after[name]] == []
    assert set(Counter(after[name] for name in CUSTOMERS if before[name] == "b")) == {"a", "c"}


def test_weights_divide_the_customers() -> None:
    """A cell of weight 3 has three times as many as one of weight 1."""
    counts = Counter(home(name, [Cell("a", 3.0), Cell("b", 1.0)]) for name in CUSTOMERS)

    assert counts["a"] / counts["b"] == pytest.approx(3, rel=0.1)


def test_without_an_open_cell_there_is_no_home() -> None:
    """The error says what to do."""
    with pytest.raises(ValueError, match="No cell is open: open one"):
        home("acme", cells("a", closed="a"))


def test_needed_workers() -> None:
    """100 requests/s of 20 ms need two workers, and 50 waiting requests two more, to be served in half a second."""
    assert workers_needed(100, 0, 20) == 2
    assert workers_needed(100, 50, 20) == 4


def test_ready_workers() -> None:
    """For tiers above the lowest one: few requests want one worker, many want five."""
    found = [ready_workers(TIERS, {"enterprise": rps, "free": 100.0}, 200.0) for rps in (0, 0.1, 5, 1000)]

    assert found == pytest.approx([0.0, 0.303, 3.0, READY], abs=0.001)


@pytest.mark.parametrize(
    ("loads", "fair"),
    [
        # nobody needs anything: all stay
        ([load("a", 3), load("b", 1)], {"a": 3, "b": 1}),
        # what is left over is spread so that cells are equally busy
        ([load("a", 4, free=1), load("b", 4, free=3)], {"a": 2, "b": 6}),
        # too few: enterprise of any cell comes before free of any other
        ([load("a", 10, free=20), load("b", 0, enterprise=5.5)], {"a": 4, "b": 6}),
        # the guaranteed share of free remains
        ([load("a", 10, free=20), load("b", 0, enterprise=20)], {"a": 1, "b": 9}),
        # within a tier, in proportion to the needs
        ([load("a", 5, free=10), load("b", 5, free=30)], {"a": 2.5, "b": 7.5}),
        # whole workers for enterprise, at most 80 % busy if they are few
        ([load("a", 1, enterprise=1.2), load("b", 3, free=9)], {"a": 2, "b": 2}),
        ([load("a", 1, enterprise=0.9), load("b", 3, free=9)], {"a": 2, "b": 2}),
        # but not beside workers that serve free there
        ([load("a", 4, enterprise=1.2, free=3), load("b", 0, free=3)], {"a": 2.6, "b": 1.4}),
    ],
)
def test_fair_workers(loads: list[CellLoad], fair: dict[str, float]) -> None:
    """The tiers of all cells share the workers as in a single queue."""
    assert fair_workers(loads, TIERS) == pytest.approx(fair)


def test_fair_workers_of_a_single_tier() -> None:
    """It is the lowest one too, and is divided in proportion to the needs, not by whole workers."""
    loads = [load("a", 3, free=9), load("b", 1, free=1)]

    assert fair_workers(loads, [TierShare("free", 1, 0.1)]) == pytest.approx({"a": 3.6, "b": 0.4})


@pytest.mark.parametrize(
    ("loads", "shares"),
    [
        # as much of both tiers in every cell
        (
            [load("a", 4, enterprise=8, free=8), load("b", 4, enterprise=8, free=8)],
            {"a": (0.05, 0.1), "b": (0.05, 0.1)},
        ),
        # all of free in one cell: a tenth of all workers is a fifth of this half of them
        ([load("a", 4, enterprise=40), load("b", 4, enterprise=40, free=5)], {"a": (0.05, None), "b": (0.05, 0.2)}),
        # not more than it needs
        ([load("a", 4, enterprise=40), load("b", 4, enterprise=40, free=0.6)], {"a": (0.05, None), "b": (0.05, 0.15)}),
        ([load("a", 4, enterprise=40), load("b", 4, enterprise=40, free=0.1)], {"a": (0.05, None), "b": (0.05, 0.1)}),
        # less where it needs less than elsewhere
        (
            [load("a", 4, enterprise=40, free=9), load("b", 4, enterprise=40, free=1)],
            {"a": (0.05, 0.18), "b": (0.05, 0.02)},
        ),
        # the first worker of a cell that should have four is not given to free
        (
            [load("a", 7, enterprise=40), load("b", 1, enterprise=40, free=5)],
            {"a": (0.2 / 7, None), "b": (0.2 / 2.2, 0.8 / 2.2)},
        ),
    ],
)
def test_guaranteed_shares_in_cells(loads: list[CellLoad], shares: dict[str, tuple[float, float | None]]) -> None:
    """A tier has its share of the workers of all cells together, wherever its requests are."""
    found = shares_in_cells(loads, TIERS)

    assert {name: (of["enterprise"], of.get("free")) for name, of in found.items()} == {
        name: (pytest.approx(enterprise), free if free is None else pytest.approx(free))
        for name, (enterprise, free) in shares.items()
    }


@pytest.mark.parametrize(
    ("loads", "chances"),
    [
        # a busy cell attracts the idle workers of another one
        ([load("a", 4), load("b", 4, free=8)], {"a": {"b": 1.0}}),
        # the last worker stays while its cell has requests
        ([load("a", 4, free=0.1), load("b", 4, free=79.9)], {"a": {"b": 3 / 4}}),
        # no cell is busy: nobody moves, however uneven they are
        ([load("a", 4, free=0.1), load("b", 4, free=3)], {}),
        # a cell that lacks less than a tenth attracts nobody
        ([load("a", 10, free=10), load("b", 10, free=12)], {}),
        # nor does one that lacks less than half a worker
        ([load("a", 2, free=2.2), load("b", 2, free=2.8)], {}),
        # fewer decide than should move: each of them more probably
        ([load("a", 10, deciding=4, free=10), load("b", 10, free=15)], {"a": {"b": 0.5}}),
        # workers of the lowest tier become ready ones of a higher tier, although its cell is not busy
        ([load("a", 14, free=30), load("b", 2, enterprise=1, ready=5)], {"a": {"b": 3 / 14}}),
        # but not those that it needs, as long as there are enough for all requests
        ([load("a", 8, free=8), load("b", 2, enterprise=1, ready=5)], {}),
        ([load("a", 14, free=10), load("b", 2, enterprise=1, ready=5)], {"a": {"b": 3 / 14}}),
        # those of the same tier do not
        ([load("a", 14, enterprise=13, ready=5), load("b", 2, enterprise=1.5, ready=5)], {}),
        # so do idle ones, but only for a higher tier
        ([load("a", 14), load("b", 2, enterprise=1, ready=5)], {"a": {"b": 3 / 14}}),
        ([load("a", 14), load("b", 2, free=1)], {}),
        # the cell that gives keeps its own ready workers
        ([load("a", 6, enterprise=1, free=9, ready=5), load("b", 2, enterprise=1, ready=5)], {"a": {"b": 1 / 6}}),
        # two cells that lack workers divide those that move
        ([load("a", 6), load("b", 3, free=6), load("c", 3, free=6)], {"a": {"b": 0.5, "c": 0.5}}),
        # a cell without workers attracts three instead of one
        ([load("a", 10, free=30), load("b", 0, enterprise=0.1)], {"a": {"b": 0.3}}),
        # fewer workers than cells with requests: the worker goes round
        ([load("a", 1, free=9), load("b", 0, free=1)], {"a": {"b": 0.5}}),
        # the lowest tier has its share of the time if enterprise needs the others
        (
            [load("a", 2, enterprise=1.2, ready=5), load("b", 2, enterprise=1.2, ready=5), load("c", 0, free=3)],
            {"a": {"c": 0.1}, "b": {"c": 0.1}},
        ),
        # workers of a cell that accepts none leave it, also if nobody needs them
        ([CellLoad("a", 2, {}, 2, accepts=False), load("b", 4)], {"a": {"b": 1.0}}),
    ],
)
def test_chances_of_a_move(loads: list[CellLoad], chances: dict[str, dict[str, float]]) -> None:
    """By cell and destination."""
    found = move_chances(loads, TIERS)

    assert {cell: set(to) for cell, to in found.items()} == {cell: set(to) for cell, to in chances.items()}
    for cell, to in chances.items():
        assert found[cell] == pytest.approx(to)


def test_as_many_move_as_are_missing_and_no_herd() -> None:
    """The expected number of movers is what the busy cells lack, over all cells that give, however many workers they have."""
    loads = [load("a", 400), load("b", 100, free=20), load("c", 50, free=90), load("d", 0, free=10)]

    chances = move_chances(loads, TIERS)
    moving = sum(load.deciding * sum(chances.get(load.name, {}).values()) for load in loads)

    fair = fair_workers(loads, TIERS)
    assert moving == pytest.approx(fair["c"] - 50 + fair["d"], rel=0.01)


@pytest.mark.parametrize(
    ("draw", "cell"), [(0.0, "b"), (0.24, "b"), (0.25, "c"), (0.74, "c"), (0.75, None), (0.99, None)]
)
def test_destination(draw: float, cell: str | None) -> None:
    """The draw selects a cell by its chance, or none."""
    assert destination({"b": 0.25, "c": 0.5}, draw) == cell


ROWS = [CellRow("west", "redis://west:1/0", "open", 1.0), CellRow("north", None, "draining", 1.0)]


def test_the_cells_of_a_customer() -> None:
    """The default cell needs no row. An override counts while its cell is open."""
    by_hash = [cells_of(name, ROWS)[0] for name in CUSTOMERS]

    assert 1800 < Counter(by_hash)["west"] < 2200
    assert set(by_hash) == {"west", "default"}
    assert [cells_of("acme", ROWS, override) for override in ("west", "default")] == [("west",), ("default",)]
    assert cells_of("acme", ROWS, "north") == cells_of("acme", ROWS)
    assert sorted(cells_of("acme", ROWS, spread=4)) == ["default", "west"]
    assert cells_of("acme", ROWS, "west", 2) == ("west", "default")
    assert cells_of("acme", [CellRow("default", None, "draining", 1.0)]) == ()


def test_the_former_homes_of_a_customer() -> None:
    """Cells that were open and would come first; with an override, or after one, the cells that it may have named."""
    first_north = next(name for name in CUSTOMERS if homes(name, cells("west", "north", "default"))[0] == "north")
    second = cells_of(first_north, ROWS)[0]
    first_west = next(name for name in CUSTOMERS if homes(name, cells("west", "north", "default"))[0] == "west")

    assert former_homes(first_north, ROWS, second) == {"north"}
    assert former_homes(first_west, ROWS, "west") == frozenset()
    assert former_homes(first_west, ROWS, "west", "west") == {"north", "default"}
    assert former_homes(first_west, ROWS, "west", "north") == {"north"}
    assert former_homes(first_west, ROWS, "west", "gone") == frozenset()


@pytest.mark.parametrize(
    ("base", "url", "expected"),
    [
        ("redis://one:1/0", None, "redis://one:1/0#west"),
        ("redis://u:p@one:1/0", "redis://two:2/0", "redis://u:p@two:2/0#west"),
        ("rediss://:p@one:1?ssl_ca_certs=ca", "rediss://two:2", "rediss://:p@two:2?ssl_ca_certs=ca#west"),
        (
            "redis+sentinel://u:p@one:1/a?sentinel_password=s",
            "redis+sentinel://two:2/b",
            "redis+sentinel://u:p@two:2/b?sentinel_password=s#west",
        ),
        (
            "rediss+sentinel://one:1/a?ssl_ca_certs=ca&sentinel_tls=on&sentinel_user=n&sentinel_password=s",
            "rediss+sentinel://two:2/b?ssl_ca_certs=x",
            "rediss+sentinel://two:2/b?ssl_ca_certs=x&sentinel_user=n&sentinel_password=s#west",
        ),
        (
            "rediss+sentinel://one:1/a?ssl_ca_certs=ca&sentinel_tls=on&sentinel_password=s",
            "rediss://two:2",
            "rediss://two:2?ssl_ca_certs=ca#west",
        ),
        ("rediss://one:1?ssl_ca_certs=ca", "rediss://two:2?ssl_ca_certs=x", "rediss://two:2?ssl_ca_certs=x#west"),
        ("rediss://one:1?ssl_ca_certs=ca", "redis://two:2", "redis://two:2#west"),
        ("redis+cluster://u:p@one:1,two:2", None, "redis+cluster://u:p@one:1,two:2#west"),
        ("redis://u:p@one:1/0", "unix:///run/redis.sock", "unix://u:p@/run/redis.sock#west"),
    ],
)
def test_the_urls_of_cells_have_the_credentials_of_the_default_one(base: str, url: str | None, expected: str) -> None:
    """So that the table has no secrets. Names in a cell other than the default one begin with its hash tag."""
    urls = cell_urls(base, [CellRow("west", url, "draining", 1.0), CellRow("gone", url, "closed", 1.0)])

    assert urls == {"default": base, "west": expected}
    assert Keys.at(expected, "large").leases == "{cell:west}:{large}:leases"
    assert tag_of(base) == ("{cell:default}:" if "cluster" in base else "")


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("redis+sentinel://h:1/a?sentinel_password=s", ["sentinel_password"]),
        (
            "rediss+sentinel://h:1/a?sentinel_tls=on&sentinel_password=s&sentinel_user=n",
            ["sentinel_user", "sentinel_password"],
        ),
        ("rediss+sentinel://h:1/a?sentinel_tls=on", []),
        ("redis://h:1/0", []),
        ("", []),
    ],
)
def test_a_login_at_sentinels_in_the_url_of_a_cell(url: str, names: list[str]) -> None:
    """It is found, so that the table gets no secret."""
    assert login_options(url) == names
