"""Catalog rows to snapshot: limits filled in, nonsense refused with the row named."""

import asyncio
from math import inf, nan
from typing import Any

import pytest
from limits import parse as parse_limit

from ledger.catalog_load import KEYS_A_STEP, build
from ledger.catalog_rows import BadCatalogRow, CatalogRows, parse_quota
from ledger.snapshot import Quota, Snapshot

PAID = ("paid", 2, 0.25, 1000.0, 1000.0, 500, None, 10_000, 2000, 500, 1500)
FREE = ("free", 3, 0.10, 200.0, 200.0, 100, None, 5000, 2000, 100, 1000)
ACME = ("c1", "acme", "paid", False, None, None, None, None, None)
KEY = ("k1", "c1", b"x" * 32, None, False)
MODEL = ("tiny", "default", 32, None, 40, 3000, 100.0, 0.8, 0, True)


def rows(**changes: Any) -> CatalogRows:
    return CatalogRows(7, [FREE, PAID], [ACME], [KEY], [MODEL], [("c1", None, "10000/day")])._replace(**changes)


def changed(row: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*row[:at], value, *row[at + 1 :])


def snapshot(catalog: CatalogRows) -> Snapshot:
    return asyncio.run(build(catalog))


def test_tiers_come_by_priority_and_limits_by_inheritance() -> None:
    """A customer without limits of its own has its tier's."""
    made = snapshot(rows())

    assert [tier.name for tier in made.tiers] == ["paid", "free"]
    assert made.version == 7
    assert made.tier("free").shed_depth == 100
    assert made.customers["c1"].requests_per_second == 1000.0
    assert made.keys["k1"].identity.max_concurrency == 500
    assert made.keys["k1"].expires_at == inf
    assert made.models["tiny"].max_batch_size == 32
    assert made.quotas == (Quota("c1", None, 10_000, 1, "day", "10000/day"),)


def test_a_customers_own_limit_wins_over_its_tiers() -> None:
    """Each override stands for itself; the rest is inherited."""
    own = ("c1", "acme", "paid", True, 5.0, 6.0, 7, 8, 9)
    identity = snapshot(rows(customers=[own])).keys["k1"].identity

    assert (identity.requests_per_second, identity.burst, identity.max_concurrency) == (5.0, 6.0, 7)
    assert (identity.tokens_per_minute, identity.max_queue_ms) == (8, 9)
    assert snapshot(rows(customers=[own])).keys["k1"].suspended


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tiers": []}, "tiers"),
        ({"tiers": [PAID, changed(FREE, 1, 2)]}, "priority"),
        ({"tiers": [PAID, changed(FREE, 0, "Not A Name")]}, "Not A Name"),
        ({"tiers": [PAID, changed(FREE, 2, 0.9)]}, "capacity"),
        ({"tiers": [PAID, changed(FREE, 2, nan)]}, "guaranteed_share"),
        ({"tiers": [PAID, changed(FREE, 3, 0.0)]}, "'free' has a rate"),
        ({"tiers": [PAID, changed(FREE, 3, nan)]}, "'free' has a rate"),
        ({"tiers": [PAID, changed(FREE, 4, inf)]}, "'free' has a burst"),
        ({"tiers": [PAID, changed(FREE, 7, None)]}, "cannot be read"),
        ({"customers": [changed(ACME, 2, "gold")]}, "'gold'"),
        ({"customers": [changed(ACME, 4, -1.0)]}, "'acme' has a rate"),
        ({"keys": [changed(KEY, 1, "nobody")]}, "'k1'"),
        ({"keys": [changed(KEY, 2, b"short")]}, "'k1'"),
        ({"models": [changed(MODEL, 2, 0)]}, "'tiny' has a batch"),
        ({"models": [changed(MODEL, 7, 1.5)]}, "target_utilization"),
        ({"quotas": [("c1", None, "plenty")]}, "'plenty'"),
        ({"quotas": [("c1", "paid", "10/day")]}, "10/day"),
        ({"quotas": [(None, None, "10/day")]}, "10/day"),
    ],
)
def test_a_bad_row_refuses_the_whole_picture_and_is_named(changes: dict[str, Any], named: str) -> None:
    """Half a change is worse than an old picture."""
    with pytest.raises(BadCatalogRow, match=named):
        snapshot(rows(**changes))


@pytest.mark.parametrize("text", ["10000/day", "1 per minute", "5/2 hours", "100 per 30 seconds", "7/month", "9/ year"])
def test_quotas_are_read_as_the_library_limits_reads_them(text: str) -> None:
    """One notation, two readers, one meaning."""
    ours, theirs = parse_quota("c1", None, text), parse_limit(text)

    assert (ours.amount, ours.every, ours.unit) == (theirs.amount, theirs.multiples, theirs.GRANULARITY.name)


def test_many_keys_are_built_in_steps() -> None:
    """None is lost at the steps' edges."""
    many = [(f"k{n}", "c1", b"x" * 32, 1.0, False) for n in range(2 * KEYS_A_STEP + 1)]

    assert len(snapshot(rows(keys=many)).keys) == 2 * KEYS_A_STEP + 1


async def test_others_run_while_many_keys_are_built() -> None:
    """A large catalog does not hold up the requests of the same process."""
    many = [(f"k{n}", "c1", b"x" * 32, None, False) for n in range(10 * KEYS_A_STEP)]
    building = asyncio.create_task(build(rows(keys=many)))
    turns = 0
    while not building.done():
        await asyncio.sleep(0)
        turns += 1

    assert turns >= 10
