"""The batch policy of a pool, and the customers of several cells, from the rows of the catalog."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from configs import BACKGROUND_SHARE
from ledger.catalog.snapshot import CellRow, Customer, Model, Snapshot, Tier
from ratelimit.shares import TierShare
from scheduler.batching.tier_policy import BatchPolicy, TierPolicy
from scheduler.cells.moves import PoolPlan
from tierlane.roles.allotter import SharedCustomers
from tierlane.roles.leaving_tiers import LEAVING_S, LeavingTiers
from tierlane.roles.pool_policy import DEFAULT_TIERS, batch_policy, pool_model, pool_plan, without_paused
from tierlane.settings.model import Settings

SETTINGS = Settings(batch_lookahead_workers=4, ageing_ms=1000, batch_headroom=0.03, background_share=0.1, gone_ms=1200)


def model(name: str, pool: str = "default", size: int = 8, enabled: bool = True) -> Model:
    return Model(name, pool, size, None, 25, 20.0, 0.85, 0, enabled)


@pytest.mark.parametrize(
    ("models", "chosen"),
    [
        ([], None),
        ([model("a", enabled=False)], None),
        ([model("a", pool="other")], None),
        ([model("a", size=8), model("b", size=4), model("c", size=2, enabled=False)], "b"),  # the smallest size
    ],
)
def test_the_model_of_a_pool(models: list[Model], chosen: str | None) -> None:
    """Of several enabled models, the one with the smallest batches."""
    found = pool_model(models, "default")

    assert (found.name if found else None) == chosen


def test_the_policy_of_a_pool() -> None:
    """Size, window and token limit from the model's row, tiers from their rows, the rest from the settings; the defaults
    without a catalog, so that a scheduler works while PostgreSQL is unavailable.
    """
    gold = Tier("gold", 1, 0.5, (10.0, 10.0, 5, None), 100, 2000, None, None)
    tiny = msgspec.structs.replace(model("tiny"), max_batch_tokens=4096)
    snapshot = Snapshot(3, (gold,), {}, {}, {"tiny": tiny}, ())

    assert batch_policy(snapshot, SETTINGS) == BatchPolicy(
        8, 25, 4, 1000, (TierPolicy("gold", 1, 0.5),), 0.1, 4096, 0.03
    )
    assert batch_policy(None, SETTINGS) == BatchPolicy(32, 40.0, 4, 1000, DEFAULT_TIERS, 0.1, 0, 0.03)


def test_what_the_moves_of_a_pool_depend_on() -> None:
    """The tiers, with the paused ones, and the rows of the pool's model; the defaults without a catalog."""
    gold = Tier("gold", 1, 0.5, (10.0, 10.0, 5, None), 100, 2000, None, None, paused=True)
    snapshot = Snapshot(3, (gold,), {}, {}, {"a": model("a", "large", size=4), "b": model("b")}, ())

    assert pool_plan(snapshot, "large", SETTINGS) == PoolPlan(
        "large", [TierShare("gold", 1, 0.5)], frozenset({"gold"}), 4, 50.0, 1200
    )
    assert pool_plan(None, "large", SETTINGS).tiers == [
        TierShare(*each) for each in (("enterprise", 1, 0.05), ("paid", 2, 0.25), ("free", 3, 0.10))
    ]


def test_no_batch_is_formed_of_a_paused_tier() -> None:
    """It is still a tier of the pool, whose overdue requests must end."""
    gold = Tier("gold", 1, 0.5, (10.0, 10.0, 5, None), 100, 2000, None, None, paused=True)
    basic = msgspec.structs.replace(gold, name="basic", priority=2, guaranteed_share=0.1, paused=False)
    whole = batch_policy(Snapshot(3, (gold, basic), {}, {}, {}, ()), SETTINGS)

    assert [tier.name for tier in whole.tiers] == ["gold", "basic"]
    assert without_paused(whole).tiers == (TierPolicy("basic", 2, 0.1),)
    assert without_paused(without_paused(whole)) == without_paused(whole)


def test_a_renamed_tier_is_still_served() -> None:
    """Requests queued under the old name keep their priority, without a share, until no gateway can use the name."""
    now = 0.0
    leaving = LeavingTiers(lambda: now)
    gold, basic = TierPolicy("gold", 1, 0.5), TierPolicy("basic", 2, 0.1)
    before = BatchPolicy(8, 25, 4, 1000, (gold, basic), BACKGROUND_SHARE)
    after = BatchPolicy(8, 25, 4, 1000, (TierPolicy("or", 1, 0.5), basic), BACKGROUND_SHARE)

    assert leaving.kept(before) == before
    now = 1.0
    assert leaving.kept(after).tiers == (*after.tiers, TierPolicy("gold", 1, 0.0))
    assert leaving.kept(before).tiers == (*before.tiers, TierPolicy("or", 1, 0.0))
    now = 1.0 + LEAVING_S
    assert leaving.kept(before) == before


def test_the_customers_of_several_cells() -> None:
    """With their base limits. The object is the same while none of them changes, whatever else the catalog has."""
    cells = (CellRow("east", None, "open", 1.0), CellRow("west", None, "draining", 1.0))
    limits = (100.0, 200.0, 50, None)
    large = Customer("large", "large", "gold", False, limits, 2000, (("1day", 10),), spread=3)
    small = Customer("small", "small", "gold", False, limits, 2000, cell="east")
    snapshot = Snapshot(3, (), {"large": large, "small": small}, {}, {}, (), cells=cells)
    catalog: Any = SimpleNamespace(snapshot=None)
    customers = SharedCustomers(catalog)
    assert (customers.all(), customers.find("large")) == ({}, None)

    catalog.snapshot = snapshot
    (found,) = customers.all().values()
    assert (found.id, set(found.cells), found.shared) == ("large", {"default", "east"}, True)
    assert ([(b.rate, b.size) for b in found.buckets], found.concurrency, found.quotas) == (
        [(100.0, 200.0)],
        50,
        (("1day", 10),),
    )
    other = customers.find("small")
    assert other is not None
    assert (other.cells, other.shared) == (("east",), False)

    before = customers.all()
    catalog.snapshot = msgspec.structs.replace(snapshot, version=4, customers={"large": large})
    assert customers.all() is before
    catalog.snapshot = msgspec.structs.replace(snapshot, version=5, cells=cells[:1])
    assert customers.all() is before  # A draining cell is closed: nothing changes for it.
    catalog.snapshot = msgspec.structs.replace(
        snapshot, version=6, cells=(*cells[:1], CellRow("west", None, "open", 1.0))
    )
    assert customers.all() is not before
