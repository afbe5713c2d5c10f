"""The catalog as a file without servers: what is written reads as the same rows, and faults have a line and a column."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ledger.admin.catalog_plan import KEYS, RowFault, faults_of, plan_catalog
from tierlane.admin.catalog_file import MOST_FAULTS, SECTIONS, read_file, write_file
from tierlane.admin.fields import Field
from tierlane.connect import VerbError

NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=12)
QUOTAS = st.lists(st.sampled_from(["5/day", "5 per day", "6/day", "7 tokens/month", "0.5 usd/week"]), unique=True)
SHARES = st.lists(st.floats(0, 1, exclude_min=True), unique=True, max_size=3).map(sorted)
TEXTS = {"cache_scope": ["customer", "global"], "status": ["active", "suspended"], "state": ["open", "draining"]}
TIMES = st.datetimes(min_value=datetime(1990, 1, 1), max_value=datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001


def values_of(field: Field, *, exact: bool = False) -> st.SearchStrategy[Any]:
    """Any value of a field."""
    numbers: dict[str, st.SearchStrategy[Any]] = {
        "whole": st.integers(-(2**40), 2**40),
        "decimal": st.decimals(0, 10**6, places=12) if exact else st.floats(allow_nan=False, allow_infinity=False),
        "switch": st.booleans(),
        "names": st.lists(NAMES, unique=True, min_size=1),
        "text": st.sampled_from(TEXTS[field.name])
        if field.name in TEXTS
        else NAMES.filter(lambda text: text != "none"),
    }
    return st.none() | numbers[field.kind] if field.none else numbers[field.kind]


@st.composite
def catalogs(draw: st.DrawFn) -> dict[str, list[dict[str, Any]]]:
    """Rows of every table, with any values of the columns that a file has."""
    catalog: dict[str, list[dict[str, Any]]] = {table: [] for table in KEYS}
    for table, fields in SECTIONS.items():
        for number, name in enumerate(draw(st.lists(NAMES, unique=True, max_size=3)), 1):
            row = {field.name: draw(values_of(field, exact=table == "prices")) for field in fields}
            if table == "prices":
                catalog[table] += [
                    {"model": name, "valid_from": at, **row} for at in draw(st.lists(TIMES, unique=True, max_size=2))
                ]
                continue
            catalog[table].append({"name": name, **row})
            if table == "customers":
                row_id = catalog[table][-1]["id"] = UUID(int=number)
                owner = {"customer_id": row_id, "tier": None}
            else:
                owner = {"customer_id": None, "tier": name}
            if table in ("tiers", "customers"):
                catalog["quotas"] += [
                    {**owner, "quota": text, "alert_shares": draw(st.none() | SHARES)} for text in draw(QUOTAS)
                ]
    return catalog


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(catalogs(), st.booleans())
def test_a_written_catalog_reads_as_the_same_rows(catalog: dict[str, list[dict[str, Any]]], prune: bool) -> None:
    """Nothing is to be changed, whatever the values; the document is YAML, and is the same when it is written again."""
    document = write_file(catalog, "1.0")
    file = read_file("catalog.yaml", document.encode())
    plans = plan_catalog(catalog, file.wanted, prune=prune)

    assert file.faults == []
    assert [(table, rows) for table, rows in plans.items() if any(rows)] == []
    assert write_file(catalog, "1.0") == document
    assert isinstance(yaml.safe_load(document), dict)


def faults(text: str) -> list[str]:
    return [f"{line}:{column} {sentence}" for (line, column), sentence in read_file("f", text.encode()).faults]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tires: {}", ["1:1 tires is unknown; there are cells, models, prices, tiers and customers."]),
        ("- tiers", ["1:1 The file must be a mapping from names to values."]),
        ("models: [tiny]", ["1:9 models must be a mapping from names to values."]),
        ("models:\n  tiny: 5", ["2:9 models.tiny must be a mapping from names to values."]),
        ("models:\n  tiny: {}\n  tiny: {}", ["3:3 models has tiny twice."]),
        ("models:\n  tiny: {enabled: on, enabled: off}", ["2:23 models.tiny has enabled twice."]),
        ("models:\n  tiny: {}\nmodels:\n", ["3:1 The file has models twice."]),
        ("models: {tiny: {enabled: [on]}}", ["1:26 models.tiny.enabled must be a single value."]),
        ("models: {tiny: {pool: null}}", ["1:23 models.tiny.pool: must not be null."]),
        ("models: {tiny: {rps_per_gpu: nan}}", ["1:30 models.tiny.rps_per_gpu: must be a number, got nan."]),
        ("models: {a b: {pool: {}}}", ["1:22 models.'a b'.pool must be a single value."]),
        ("models: {[a]: {}}", ["1:10 models has a name that is not text."]),
        ('models: {"a\\0": {}}', ["1:10 models has a name that is not text."]),
        ('models: {a: {pool: "\\0"}}', ["1:20 models.a.pool has a character that PostgreSQL cannot store."]),
        ("customers: {acme: }", ["1:13 customers.acme must have tier."]),
        (
            "customers: {acme: {tier: free, quotas: [{alert_shares: [1]}, {quota: 5/minute, alert_shares: [1]}]}}",
            [
                "1:41 customers.acme.quotas must have quota.",
                "1:62 customers.acme.quotas: alert_shares: quota 5/minute has no alerts: its periods are shorter than an hour.",
            ],
        ),
        ("customers: {acme: {tier: free, quotas: 5/day}}", ["1:40 customers.acme.quotas must be a list."]),
        (
            "customers: {acme: {tier: free, quotas: [5/day, 5/day, [6/day]]}}",
            ["1:48 customers.acme.quotas has 5/day twice.", "1:55 customers.acme.quotas must be a single value."],
        ),
        ("prices: {tiny: {}}", ["1:16 prices.tiny must be a list."]),
        (
            "prices: {tiny: [{valid_from: 9999-12-31T23:59:59-05:00}]}",
            ["1:30 prices.tiny.valid_from: must be a time in the years 1 to 9999, got '9999-12-31T23:59:59-05:00'."],
        ),
        ("prices: {tiny: [{}]}", ["1:17 prices.tiny must have valid_from."]),
        (
            "prices: {tiny: [{valid_from: 2026-01-01}, {valid_from: 2026-01-01T01:00+01:00}]}",
            ["1:56 prices.tiny has two prices from 2026-01-01T01:00+01:00 on."],
        ),
    ],
)
def test_each_fault_has_its_place(text: str, found: list[str]) -> None:
    """One sentence each; the row is named, and odd names are quoted."""
    assert faults(text) == found


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("tiers: {free", "f:2:1: is not YAML: did not find expected ',' or '}'"),
        ("a: 1\n--- \nb: 1", "f:2:1: is not YAML: but found another document."),
        ("a: \x01", "f:1:1: is not YAML: "),
        ("# nothing", "f:1:1: is empty; a catalog has cells, models, prices, tiers and customers."),
        ("a: " + "[" * 5000, "f:2:1: is not YAML: "),
    ],
)
def test_what_is_no_document_is_one_sentence(text: str, start: str) -> None:
    with pytest.raises(VerbError) as error:
        read_file("f", text.encode())

    assert str(error.value).startswith(start)
    assert "\n" not in str(error.value)


def test_all_faults_are_in_one_error_up_to_a_bound() -> None:
    """In the order of the file, those of the database among them; control characters are escaped, long texts are cut."""
    file = read_file("f", b"models:\n  tiny: {enabled: maybe}\n  big: {pool: x}\n  odd: {pool: y}\n")
    with pytest.raises(VerbError) as few:
        file.check([RowFault("models", "big", "pool", "pool \x1b is wrong."), RowFault("models", "odd", "", "x" * 999)])
    first, second, third = str(few.value).splitlines()

    assert first.startswith("f:2:19: models.tiny.enabled: must be on or off, got 'maybe' (")
    assert second == "f:3:15: models.big: pool \\x1b is wrong."
    assert (third.startswith("f:4:3: models.odd: xxx"), len(third) < 600) == (True, True)
    many = read_file("f", b"models:\n" + b"".join(b"  m%d: 5\n" % n for n in range(MOST_FAULTS + 7)))
    with pytest.raises(VerbError) as bounded:
        many.check([])
    assert str(bounded.value).splitlines()[MOST_FAULTS:] == ["7 more faults."]


def row(table: str, **values: Any) -> dict[str, Any]:
    return {field.name: None for field in SECTIONS[table]} | values


ROWS: dict[str, list[dict[str, Any]]] = {
    "cells": [row("cells", name="c2", redis_url="redis://two", state="open")],
    "models": [],
    "prices": [],
    "tiers": [row("tiers", name="free", priority=1), row("tiers", name="paid", priority=2)],
    "customers": [row("customers", id=UUID(int=1), name="acme", tier="free")],
    "quotas": [
        {"id": 1, "customer_id": UUID(int=1), "tier": None, "quota": "5/day", "alert_shares": None},
        {"id": 2, "customer_id": UUID(int=1), "tier": None, "quota": "9/month", "alert_shares": [0.5]},
    ],
}


def planned(text: str, *, prune: bool = False) -> dict[str, Any]:
    return plan_catalog(ROWS, read_file("f", text.encode()).wanted, prune=prune)


def test_a_quota_takes_the_place_of_that_of_its_period_and_unit() -> None:
    """The others are kept, or deleted with `prune`."""
    text = "customers: {acme: {tier: free, quotas: [6 per day, 7 tokens/day]}}"
    kept, pruned = planned(text)["quotas"], planned(text, prune=True)["quotas"]

    assert [(old["id"], new["quota"]) for old, new in kept.changed] == [(1, "6 per day")]
    assert [row["quota"] for row in kept.created] == ["7 tokens/day"]
    assert ([row["id"] for row in kept.kept], kept.deleted) == ([2], [])
    assert ([row["id"] for row in pruned.deleted], pruned.kept) == ([2], [])


def test_alert_shares_of_quotas_are_changed_in_place() -> None:
    """A quota with shares is a mapping; without them it gets the usual ones; an empty list and `off` are none."""
    text = "customers: {acme: {tier: free, quotas: [{quota: 5/day, alert_shares: [1, 0.5]}, 9/month]}}"
    off = "customers: {acme: {tier: free, quotas: [{quota: 5/day, alert_shares: []}, {quota: 9/month, alert_shares: off}]}}"

    assert [(new["id"], new["alert_shares"]) for _, new in planned(text)["quotas"].changed] == [
        (1, [0.5, 1.0]),
        (2, None),
    ]
    assert [(new["id"], new["alert_shares"]) for _, new in planned(off)["quotas"].changed] == [(1, []), (2, [])]


def test_prune_deletes_in_the_sections_of_the_file() -> None:
    """Cells never; a tier with customers cannot be deleted."""
    plans = planned("tiers: {}\ncells: {}", prune=True)

    assert ([row["name"] for row in plans["tiers"].deleted], plans["customers"].deleted) == (["free", "paid"], [])
    assert (plans["cells"].deleted, [row["name"] for row in plans["cells"].kept]) == ([], ["c2"])
    assert faults_of(ROWS, plans) == [
        RowFault("tiers", "", "", "There must be a tier: every customer needs one."),
        RowFault("tiers", "free", "", "Tier free cannot be deleted: it has 1 customer."),
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("cells: {c2: {redis_url: redis://three}}", "Cell c2 is open at another server: drain and close it first."),
        ("cells: {c2: {redis_url: redis://two, state: closed}}", "Cell c2 is open: `tierlane cell close` checks"),
        ("cells: {c3: {redis_url: 'redis+sentinel://s/x?sentinel_password=y'}}", "redis_url must not have "),
        (
            "cells: {default: {state: draining}, c2: {redis_url: redis://two, state: draining}}",
            "A cell must be open, for its customers.",
        ),
        ("customers: {acme: {tier: gold}}", "There is no tier named gold; there are free, paid."),
        ("customers: {acme: {tier: free, models: [tin]}}", "There is no model named tin; there are none."),
        ("customers: {beta: {tier: free, cell: c9}}", "There is no cell named c9."),
    ],
)
def test_what_the_catalog_as_a_whole_cannot_have(text: str, sentence: str) -> None:
    (found,) = faults_of(ROWS, planned(text))

    assert found.sentence.startswith(sentence)


def test_prices_are_exact() -> None:
    """As decimals, however many digits they have; times have microseconds."""
    row = {
        "model": "tiny",
        "valid_from": datetime(2026, 1, 2, 3, 4, 5, 678901, UTC),
        "usd_per_gpu_s": Decimal("0.1234567890123456789012"),
        "usd_per_1000_tokens": Decimal(0),
    }
    document = write_file({table: [row] if table == "prices" else [] for table in KEYS}, "1.0")

    assert read_file("f", document.encode()).wanted.rows["prices"] == {
        ("tiny", row["valid_from"]): {name: row[name] for name in ("usd_per_gpu_s", "usd_per_1000_tokens")}
    }
