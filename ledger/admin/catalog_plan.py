"""The difference between the catalog and a wanted one, as rows to create, to change and to delete. Pure.

Rows are matched by name, prices by model and time, quotas by owner and text. A row of the catalog that is not wanted is
deleted only with `prune`, and a table of which nothing is wanted, not even an empty set, is left alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from ledger.admin.changes import Row
from ledger.catalog.quotas import BadCatalogRow, name_of, parse_quota
from ratelimit.periods import zone_of
from scheduler.cells.places import login_options
from scheduler.redis_client.keys import DEFAULT_CELL

RowsByTable = Mapping[str, Sequence[Row]]
"""All rows by table: cells, models, prices, tiers, customers, quotas."""

KEYS: Mapping[str, tuple[str, ...]] = {
    "cells": ("name",),
    "models": ("name",),
    "tiers": ("name",),
    "customers": ("name",),
    "quotas": ("customer_id", "tier", "quota"),
    "prices": ("model", "valid_from"),
}
"""The columns by which the rows of a table are matched, in the order in which tables are written."""

UNCHANGED: Mapping[str, tuple[str, object]] = {
    "cells": ("state", "open"),
    "tiers": ("paused", False),
    "customers": ("status", "active"),
}
"""Columns that keep their value unless one is wanted, with that of a new row: they are changed in operation."""


class WantedCatalog(NamedTuple):
    """`rows` by table and the values of KEYS; all columns that can be set. `quotas` by owner: its table and name.

    The quotas of an owner are texts, each with the other columns of its row.
    """

    rows: Mapping[str, Mapping[tuple[Any, ...], Row]]
    quotas: Mapping[tuple[str, str], Mapping[str, Row]]


class RowFault(NamedTuple):
    """Why a wanted row is not possible; `name` is that in the wanted catalog, `column` "" if it is the whole row."""

    table: str
    name: str
    column: str
    sentence: str


class TablePlan(NamedTuple):
    """The rows of a table to write. A changed row is old and new, with all columns."""

    created: list[Row]
    changed: list[tuple[Row, Row]]
    deleted: list[Row]
    kept: list[Row]
    """Not wanted, and not deleted."""


def plan_catalog(catalog: RowsByTable, wanted: WantedCatalog, *, prune: bool) -> dict[str, TablePlan]:
    """What to write by table. Cells are never deleted: `tierlane cell close` checks what remains in one."""
    plans = {
        table: _plan_rows(table, catalog[table], wanted.rows.get(table), prune=prune and table != "cells")
        for table in KEYS
        if table != "quotas"
    }
    plans["quotas"] = _plan_quotas(catalog, wanted, plans, prune=prune)
    return {table: plans[table] for table in KEYS}


def _plan_rows(
    table: str, rows: Sequence[Row], wanted: Mapping[tuple[Any, ...], Row] | None, *, prune: bool
) -> TablePlan:
    plan = TablePlan([], [], [], [])
    if wanted is None:
        return plan
    have = {tuple(row[column] for column in KEYS[table]): row for row in rows}
    for key, values in wanted.items():
        old = have.get(key)
        if old is None:
            new: Row = dict([UNCHANGED[table]]) if table in UNCHANGED else {}
            new |= {"id": uuid4()} if table == "customers" else {}
            plan.created.append(dict(zip(KEYS[table], key, strict=True)) | new | values)
        elif any(old[column] != value for column, value in values.items()):
            plan.changed.append((old, {**old, **values}))
    (plan.deleted if prune else plan.kept).extend(row for key, row in have.items() if key not in wanted)
    return plan


def _plan_quotas(
    catalog: RowsByTable, wanted: WantedCatalog, plans: Mapping[str, TablePlan], *, prune: bool
) -> TablePlan:
    """A quota whose text is not wanted becomes the wanted one of the same period and unit."""
    plan = TablePlan([], [], [], [])
    have: dict[object, list[Row]] = {}
    for row in catalog["quotas"]:
        have.setdefault(row["customer_id"] or row["tier"], []).append(row)
    ids = {row["name"]: row["id"] for row in (*catalog["customers"], *plans["customers"].created)}
    for (table, name), texts in wanted.quotas.items():
        owner = {"customer_id": ids[name] if table == "customers" else None, "tier": name if table == "tiers" else None}
        rows = have.get(ids[name] if table == "customers" else name, [])
        surplus = [row for row in rows if row["quota"] not in texts]
        for text, values in texts.items():
            old = next((row for row in rows if row["quota"] == text), None)
            if old is None:
                old = next((row for row in surplus if _period(row["quota"]) == _period(text)), None)
                if old is not None:
                    surplus.remove(old)
            new = {**(old or owner), "quota": text, **values}
            if old is None:
                plan.created.append(new)
            elif old != new:
                plan.changed.append((old, new))
        (plan.deleted if prune else plan.kept).extend(surplus)
    return plan


def _period(text: str) -> str:
    """The period and unit of a quota; the text itself if it is none."""
    try:
        return name_of(parse_quota(None, "any", text))
    except BadCatalogRow:
        return text


def faults_of(catalog: RowsByTable, plans: Mapping[str, TablePlan]) -> list[RowFault]:
    """What makes the planned catalog impossible as a whole; the rules of single rows are those of their tables."""
    return [*_faults_of_tiers(catalog, plans), *_faults_of_customers(catalog, plans), *_faults_of_cells(catalog, plans)]


def _planned(catalog: RowsByTable, plans: Mapping[str, TablePlan], table: str) -> dict[str, Row]:
    """The rows of a table by name, as they will be."""
    rows = {row["name"]: row for row in catalog[table]}
    rows |= {row["name"]: row for row in (*plans[table].created, *(new for _, new in plans[table].changed))}
    for row in plans[table].deleted:
        del rows[row["name"]]
    return rows


def _faults_of_tiers(catalog: RowsByTable, plans: Mapping[str, TablePlan]) -> list[RowFault]:
    faults = []
    tiers = _planned(catalog, plans, "tiers")
    holders: dict[int, str] = {}
    for tier in [tier for tier in tiers.values() if tier["priority"] is not None]:
        holder = holders.setdefault(tier["priority"], tier["name"])
        if holder != tier["name"]:
            sentence = f"priority {tier['priority']} is that of tier {holder}, too."
            faults.append(RowFault("tiers", tier["name"], "priority", sentence))
    if not tiers:
        faults.append(RowFault("tiers", "", "", "There must be a tier: every customer needs one."))
    return faults


def _faults_of_customers(catalog: RowsByTable, plans: Mapping[str, TablePlan]) -> list[RowFault]:
    faults = []
    tiers, cells, models = (_planned(catalog, plans, table) for table in ("tiers", "cells", "models"))
    written = {row["name"] for row in (*plans["customers"].created, *(new for _, new in plans["customers"].changed))}
    left: dict[str, int] = {}
    for customer in _planned(catalog, plans, "customers").values():
        name, tier, cell = customer["name"], customer["tier"], customer["cell"]
        if tier is None:
            continue  # A fault of the row.
        if tier not in tiers and name in written:
            faults.append(
                RowFault("customers", name, "tier", f"There is no tier named {tier}; there are {', '.join(tiers)}.")
            )
        elif tier not in tiers:
            left[tier] = left.get(tier, 0) + 1
        if cell is not None and cell not in cells:
            faults.append(RowFault("customers", name, "cell", f"There is no cell named {cell}."))
        if name in written and customer["time_zone"] is not None:
            try:
                zone_of(customer["time_zone"])
            except ValueError as error:
                faults.append(RowFault("customers", name, "time_zone", f"time_zone: {error}."))
        unknown = [each for each in customer["models"] or () if each not in models] if name in written else []
        for each in unknown:
            sentence = f"There is no model named {each}; there are {', '.join(models) or 'none'}."
            faults.append(RowFault("customers", name, "models", sentence))
    for tier, count in left.items():
        has = "1 customer" if count == 1 else f"{count:,} customers"
        faults.append(RowFault("tiers", tier, "", f"Tier {tier} cannot be deleted: it has {has}."))
    return faults


def _faults_of_cells(catalog: RowsByTable, plans: Mapping[str, TablePlan]) -> list[RowFault]:
    faults = []
    written: list[tuple[Row | None, Row]] = [*((None, row) for row in plans["cells"].created), *plans["cells"].changed]
    for old, new in written:
        name, state = new["name"], new["state"]
        if named := login_options(new["redis_url"] or ""):
            faults.append(RowFault("cells", name, "redis_url", f"redis_url must not have {' and '.join(named)}."))
        if old is None:
            continue
        if old["state"] != "closed" and new["redis_url"] != old["redis_url"]:
            sentence = f"Cell {name} is {old['state']} at another server: drain and close it first."
            faults.append(RowFault("cells", name, "redis_url", sentence))
        if state == "closed" != old["state"]:
            sentence = f"Cell {name} is {old['state']}: `tierlane cell close` checks what remains there."
            faults.append(RowFault("cells", name, "state", sentence))
        if state == "draining" and old["state"] == "closed":
            faults.append(RowFault("cells", name, "state", f"Cell {name} is closed: it can only be opened."))
    states = {DEFAULT_CELL: "open"} | {name: row["state"] for name, row in _planned(catalog, plans, "cells").items()}
    if "open" not in states.values():
        draining = next((name for name, state in states.items() if state == "draining"), DEFAULT_CELL)
        faults.append(RowFault("cells", draining, "state", "A cell must be open, for its customers."))
    return faults
