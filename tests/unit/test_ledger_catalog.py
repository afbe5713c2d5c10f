"""Rows of the catalog to a snapshot: inherited limits, bad rows, quotas and their windows, and partial reads."""

import re
from datetime import UTC, datetime
from decimal import Decimal
from math import inf, nan
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.catalog.changes import MAX_CHANGES, ChangedIds, changed_by
from ledger.catalog.loader import SnapshotBuild, models_from, readable, tiers_from
from ledger.catalog.quotas import BadCatalogRow, name_of, parse_quota
from ledger.catalog.snapshot import Quota, Snapshot
from ledger.schema.catalog import QUOTA_PATTERN
from ratelimit.limits import value_of
from ratelimit.periods import window_number, window_start
from ratelimit.quotas import NOTATIONS, PERIOD_S

PAID = ("paid", 2, 0.25, 1000.0, 1000.0, 500, None, 10_000, 2000, 500, 1500, False)
FREE = ("free", 3, 0.10, 200.0, 200.0, 100, None, 5000, 2000, 100, 1000, True)
ACME = ("c1", "acme", "paid", False, None, None, None, None, None, None, 1.0, None, 1, None, None, None)
KEY = ("k1", "c1", b"x" * 32, None, False, None, None, None, None, None, "k1")
MODEL = ("tiny", "default", 32, None, 40, 100.0, 0.8, 0, True, "customer", False, None, None)
DAILY = ("c1", None, "10000/day")


class Rows(NamedTuple):
    """The rows of one version, columns as in ledger/sql/catalog_*.sql."""

    version: int
    tiers: list[Any]
    customers: list[Any]
    keys: list[Any]
    models: list[Any]
    quotas: list[Any]


def rows(**changes: Any) -> Rows:
    return Rows(7, [FREE, PAID], [ACME], [KEY], [MODEL], [DAILY])._replace(**changes)


def changed(row: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*row[:at], value, *row[at + 1 :])


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def snapshot(catalog: Rows, known: Snapshot | None = None) -> Snapshot:
    """As the loader does it, in one step."""
    with readable():
        build = SnapshotBuild(tiers_from(catalog.tiers), known)
        models = models_from(catalog.models)
    build.add_quotas(catalog.quotas)
    build.add_customers(catalog.customers)
    build.add_keys(catalog.keys)
    return build.finish(catalog.version, models)


def test_tiers_are_in_order_of_priority_and_limits_are_inherited() -> None:
    """A customer without limits of its own has those of its tier; a key without a limit has rate and burst 0."""
    made = snapshot(rows(keys=[KEY, ("k2", "c1", b"y" * 32, None, False, 2.5, 4.0, 3.0, None, None, "k2")]))
    identity, limited = made.keys["k1"].identity, made.keys["k2"].identity

    assert ([tier.name for tier in made.tiers], made.version) == (["paid", "free"], 7)
    assert made.tier("free").shed_depth == 100
    assert (made.tier("free").shadow, made.tier("paid").shadow) == (True, False)
    assert value_of(made.customers["c1"].limits, "requests_per_second") == 1000.0
    assert (value_of(identity.limits, "max_concurrency"), identity.priority) == (500, PAID[1])
    assert (identity.key_rate, identity.key_burst, limited.key_rate, limited.key_burst) == (0.0, 0.0, 2.5, 4.0)
    assert (identity.key_weight, limited.key_weight) == (0.0, 3.0)
    assert value_of(limited.limits, "requests_per_second") == 1000.0
    assert made.keys["k1"].expires_at == inf
    assert made.models["tiny"].max_batch_size == 32
    assert made.quotas == (Quota("c1", None, 10_000, 1, "day", "10000/day"),)


def test_a_customers_own_values_override_those_of_its_tier() -> None:
    """Each value by itself; the suspension and the callback hosts are the customer's. It uses as many cells as a burst of 6 allows."""
    own = ("c1", "acme", "paid", True, 5.0, 6.0, 7, 8, 9, "hooks.example.com", 2.5, "west", 3, ["tiny", "big"])
    own += ("Europe/Amsterdam", "https://hooks.example.com/")
    made = snapshot(rows(customers=[own], quotas=[(*DAILY, [1.0, 0.5]), ("c1", None, "9/month", None)]))
    identity = made.keys["k1"].identity

    assert (identity.limits, identity.max_queue_ms) == ((5.0, 6.0, 7, 8), 9)
    assert made.keys["k1"].suspended
    assert made.customers["c1"].callback_hosts == "hooks.example.com"
    assert (made.customers["c1"].weight, made.keys["k1"].identity.weight) == (2.5, 2.5)
    assert (identity.cell, identity.spread, identity.models) == ("west", 2, ("tiny", "big"))
    assert made.customers["c1"].identity("k1") == identity
    assert (identity.zone, made.customers["c1"].alert_url) == ("Europe/Amsterdam", "https://hooks.example.com/")
    assert made.customers["c1"].alert_shares == (("1day", (0.5, 1.0)),)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tiers": []}, "tiers"),
        ({"tiers": [PAID, changed(FREE, 1, 2)]}, "priority"),
        ({"tiers": [PAID, changed(FREE, 0, "Not A Name")]}, "Not A Name"),
        ({"tiers": [PAID, changed(FREE, 2, 0.9)]}, "capacity"),
        ({"tiers": [PAID, changed(FREE, 2, nan)]}, "guaranteed_share"),
        ({"tiers": [PAID, changed(FREE, 3, 0.0)]}, "'free' has a requests_per_second"),
        ({"tiers": [PAID, changed(FREE, 3, nan)]}, "'free' has a requests_per_second"),
        ({"tiers": [PAID, changed(FREE, 4, inf)]}, "'free' has a burst"),
        ({"tiers": [PAID, changed(FREE, 7, None)]}, "cannot be read"),
        ({"tiers": [PAID, (*FREE, False, None, None, False, 0.0, None)]}, "'free' has a auxiliary_requests_per_second"),
        ({"tiers": [PAID, (*FREE, False, None, None, False, None, nan)]}, "'free' has a auxiliary_burst"),
        ({"customers": [changed(ACME, 2, "gold")]}, "'gold'"),
        ({"customers": [changed(ACME, 4, -1.0)]}, "'acme' has a requests_per_second"),
        ({"keys": [changed(KEY, 1, "nobody")]}, "'k1'"),
        ({"keys": [changed(KEY, 2, b"short")]}, "'k1'"),
        ({"keys": [changed(KEY, 5, 3.0)]}, "'k1' has a burst"),
        ({"keys": [changed(KEY, 6, 3.0)]}, "'k1' has a rate"),
        ({"keys": [(*KEY[:5], nan, 1.0, *KEY[7:])]}, "'k1' has a rate"),
        ({"keys": [(*KEY[:5], 1.0, -1.0, *KEY[7:])]}, "'k1' has a burst"),
        ({"keys": [changed(KEY, 9, ["much"])]}, "'k1': quotas row 'much'"),
        ({"keys": [KEY[:5]]}, "cannot be read"),
        ({"models": [changed(MODEL, 2, 0)]}, "'tiny' has a batch"),
        ({"models": [changed(MODEL, 6, 1.5)]}, "target_utilization"),
        ({"quotas": [("c1", None, "plenty")]}, "'plenty'"),
        ({"quotas": [("c1", "paid", "10/day")]}, "10/day"),
        ({"quotas": [(None, None, "10/day")]}, "10/day"),
    ],
)
def test_a_bad_row_rejects_the_whole_catalog_and_is_named(changes: dict[str, Any], named: str) -> None:
    """Part of a change is worse than the old catalog."""
    with pytest.raises(BadCatalogRow, match=named):
        snapshot(rows(**changes))


@given(st.from_regex(re.compile(QUOTA_PATTERN.removesuffix("$"), re.ASCII), fullmatch=True))
def test_a_quota_that_the_table_accepts_is_read_with_the_same_meaning(text: str) -> None:
    """What passes the CHECK of the table is never a bad row, nor another number."""
    form = r"([0-9.]+)(?: ([a-z-]+?))? ?(?:/|per) ?([0-9]+)? ?([a-z]+?)s?"
    amount, word, every, unit = re.fullmatch(form, text, re.ASCII).groups()
    mark, parts = NOTATIONS[word] if word else ("", 1)
    quota = parse_quota("c1", None, text)

    assert (quota.amount, quota.every, quota.unit, quota.mark) == (Decimal(amount) * parts, int(every or 1), unit, mark)


@pytest.mark.parametrize(
    ("text", "name", "amount"),
    [
        ("10000/day", "1day", 10_000),
        ("3600 gpu-s/day", "1day:gpu", 3_600_000_000),
        ("1500 gpu-ms per 2 hours", "2hour:gpu", 1_500_000),
        ("1.5 gpu-h/month", "1month:gpu", 5_400_000_000),
        ("1000000 tokens/day", "1day:tokens", 1_000_000),
        ("1000/week", "1week", 1000),
        ("5000 tokens per 2 weeks", "2week:tokens", 5000),
        ("0.05 usd per 15minutes", "15minute:usd", 50_000_000),
        ("100 usd/month", "1month:usd", 100_000_000_000),
    ],
)
def test_notations_of_quotas(text: str, name: str, amount: int) -> None:
    """Of GPU time, tokens and money, too; the table accepts each of them."""
    assert re.fullmatch(QUOTA_PATTERN, text, re.ASCII)
    quota = parse_quota("c1", None, text)
    assert (name_of(quota), quota.amount) == (name, amount)


def test_the_price_of_a_model_is_the_latest_that_has_begun() -> None:
    """A model without one is free, and so is a part that is null; a negative price rejects the catalog."""
    prices = [("tiny", 200.0, 2.0, None), ("tiny", 100.0, None, 0.5), ("other", 0.0, 1.0, 1.0)]
    model = models_from([MODEL], prices)["tiny"]

    assert [model.price_at(now)[1:] for now in (99.0, 150.0, 200.0)] == [(0.0, 0.0), (0.0, 0.5), (2.0, 0.0)]
    with pytest.raises(BadCatalogRow, match="prices row 'tiny'"):
        models_from([MODEL], [("tiny", 0.0, -1.0, None)])


def test_an_objective_of_a_model_is_above_0() -> None:
    """Another value rejects the catalog; without one there is none."""
    assert models_from([MODEL])["tiny"].tpot_ms is None
    assert models_from([(*MODEL[:-1], 12.5)])["tiny"].tpot_ms == 12.5
    with pytest.raises(BadCatalogRow, match="tpot_ms"):
        models_from([(*MODEL[:-1], -1.0)])


@pytest.mark.parametrize(
    "value",
    [
        *("", "10", "day", "10/day;5/hour", "10/day, 10/day", "0/day", "-1/day", "1.5/day", "10/fortnight"),
        *(f"{10**15}/day", "10/10000 days", "1/day x", "1/day\n5"),
        *("0 gpu-s/day", "5 gpu/day", "1.5 tokens/day", "0.0001 gpu-ms/day", "1000001 usd/day", "1 usd/day; 2/day"),
        *(None, 5),
    ],
)
def test_a_value_that_is_not_one_quota_is_rejected(value: Any) -> None:
    """A row is one quota of an amount above 0. The value is in the message."""
    with pytest.raises(BadCatalogRow) as error:
        snapshot(rows(quotas=[("c1", None, value)]))

    assert repr(value) in str(error.value)


def test_the_quotas_of_a_customer_are_its_own_and_those_of_its_tier() -> None:
    """Each period has the smallest amount, the shortest period is first; a day and 24 hours are two periods."""
    of_tier = [(None, "paid", "500/day"), (None, "paid", "9000/month"), (None, "free", "1/hour")]
    made = snapshot(rows(quotas=[DAILY, ("c1", None, "5 per 2 hours"), *of_tier]))
    other = snapshot(rows(quotas=of_tier, customers=[ACME, ("c2", "free one", "free", *ACME[3:])]))
    day = snapshot(rows(quotas=[("c1", None, text) for text in ("10/day", "20/24 hours", "30/day")]))

    assert made.customers["c1"].quotas == (("2hour", 5), ("1day", 500), ("1month", 9000))
    assert made.keys["k1"].identity.quotas is made.customers["c1"].quotas
    assert len(made.quotas) == 5
    assert other.customers["c2"].quotas == (("1hour", 1),)
    assert snapshot(rows(quotas=[])).keys["k1"].identity.quotas == ()
    assert set(day.customers["c1"].quotas) == {("1day", 10), ("24hour", 20)}


@pytest.mark.parametrize(
    ("period", "now", "starts", "ends"),
    [
        ("1day", "2026-02-28 23:59:59.999999", "2026-02-28", "2026-03-01"),
        ("1week", "2026-11-29 23:59:59.999999", "2026-11-23", "2026-11-30"),
        ("1week", "2026-11-30", "2026-11-30", "2026-12-07"),
        ("1week", "2027-01-01", "2026-12-28", "2027-01-04"),
        ("2week", "2026-11-29", "2026-11-16", "2026-11-30"),
        ("1week", "1970-01-01", "1969-12-29", "1970-01-05"),
        ("7day", "2026-11-29", "2026-11-26", "2026-12-03"),
        ("1month", "2026-03-01", "2026-03-01", "2026-04-01"),
        ("3month", "2026-12-31 12:00", "2026-10-01", "2027-01-01"),
        ("1year", "2024-02-29", "2024-01-01", "2025-01-01"),
        ("2hour", "1970-01-01 03:00:01", "1970-01-01 02:00", "1970-01-01 04:00"),
        ("30second", "2026-01-01 00:00:30", "2026-01-01 00:00:30", "2026-01-01 00:01"),
    ],
)
def test_windows_begin_and_end_in_utc(period: str, now: str, starts: str, ends: str) -> None:
    """Days are those of UTC, weeks begin on Monday, months and years are those of the calendar; seven days are no week."""
    number = window_number(period, utc(now))

    assert window_start(period, number) == utc(starts)
    assert window_start(period, number + 1) == utc(ends)


@given(
    st.sampled_from([*PERIOD_S]),
    st.integers(1, 9999),
    st.integers(0, 230 * 365 * 86400).map(lambda at: datetime.fromtimestamp(at, UTC)),
)
def test_each_time_is_in_its_window(unit: str, every: int, now: datetime) -> None:
    """For any period that the CHECK of the table accepts, without an overflow."""
    period = f"{every}{unit}"
    number = window_number(period, now)

    assert window_start(period, number) <= now < window_start(period, number + 1)


def test_equal_rows_are_shared_with_the_snapshot_before() -> None:
    """A large catalog that is read again takes hardly any memory; a row that differs is new."""
    before = snapshot(rows(customers=[ACME, ("c2", "two", "free", *ACME[3:])], keys=[KEY, ("k2", "c2", *KEY[2:])]))
    two = ("c2", "two", "free", True, *ACME[4:])
    after = snapshot(rows(customers=[ACME, two], keys=[KEY, ("k2", "c2", *KEY[2:])]), before)

    assert after.customers["c1"] is before.customers["c1"]
    assert after.keys["k1"] is before.keys["k1"]
    assert after.customers["c2"].suspended
    assert after.keys["k2"].suspended
    assert not before.keys["k2"].suspended


def test_a_partial_read_is_merged_with_the_snapshot_before() -> None:
    """A changed row that is not found any more is removed; the snapshot before stays unchanged."""
    before = snapshot(rows(keys=[KEY, ("k2", *KEY[1:]), ("k3", *KEY[1:])]))
    build = SnapshotBuild(before.tiers, before)
    build.merge_customers([])
    build.add_keys([("k2", "c1", b"y" * 32, None, True, None, None, None, None, None, "k2")])
    build.merge_keys(["k2", "k3", "k4"])
    after = build.finish(8, dict(before.models), before.quotas)

    assert sorted(after.keys) == ["k1", "k2"]
    assert (after.keys["k2"].revoked, before.keys["k2"].revoked) == (True, False)
    assert sorted(before.keys) == ["k1", "k2", "k3"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], ChangedIds(set(), set(), set(), set())),
        ([("customers", "c1", "c2", None, None, True)], ChangedIds({"c1", "c2"}, set(), set(), {"customers"})),
        ([("api_keys", "k1", None, "c1", "c1", False)], ChangedIds(set(), {"k1"}, set(), {"api_keys"})),
        ([("quotas", "1", "1", "c1", "c2", False)], ChangedIds({"c1", "c2"}, set(), {"c1", "c2"}, {"quotas"})),
        ([("quotas", "1", "1", None, None, True)], None),
        (
            [("models", *[None] * 4, False), ("tiers", *[None] * 4, False)],
            ChangedIds(set(), set(), set(), {"models", "tiers"}),
        ),
        ([("an_unknown_table", *[None] * 4, False)], None),
        ([("models", *[None] * 4, False)] * (MAX_CHANGES + 1), None),
    ],
)
def test_the_rows_that_changes_affect(changes: list[Any], expected: ChangedIds | None) -> None:
    """None: the whole catalog is read."""
    assert changed_by(changes) == expected
