"""A catalog as a YAML file: its rows, and all its faults with line and column.

Sections are tables: mappings from names to rows, `prices` from models to lists. Fields are the columns that the verbs set, with
the same rules. A field that is left out has its default, except those of UNCHANGED. Nothing is constructed from tags.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from functools import cache
from math import isfinite
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from ledger.admin.catalog_plan import UNCHANGED, RowFault, RowsByTable, WantedCatalog
from ledger.admin.changes import Row
from ledger.admin.customers import check_alerts, parsed_quota
from ledger.admin.errors import BadValue
from ledger.admin.rows import price_name
from tierlane.admin.fields import (
    CELL,
    CELL_STATE,
    CUSTOMER,
    CUSTOMER_STATUS,
    MODEL,
    PRICE,
    QUOTA,
    REQUIRED,
    TIER,
    Field,
)
from tierlane.admin.values import time, value_of
from tierlane.connect import UsageError, VerbError
from tierlane.output import printable

SECTIONS: Mapping[str, Sequence[Field]] = {
    "cells": (*CELL, CELL_STATE),
    "models": MODEL,
    "prices": PRICE,
    "tiers": TIER,
    "customers": (*CUSTOMER, CUSTOMER_STATUS),
}
"""The fields of each section, in the order in which `export` writes them."""

WITH_QUOTAS = ("tiers", "customers")
QUOTA_FIELDS = ("quota", *(field.name for field in QUOTA))
MOST_FAULTS = 50
MOST_CHARS, MOST_LINE = 80, 500
"""Of a value in an error, and of the whole error."""

_NOT_STORABLE = re.compile("[\0\ud800-\udfff]")
_SIMPLE = re.compile(r"[\w.:/@-]+")
_SWITCH = {"true": "on", "yes": "on", "false": "off", "no": "off"}
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_NULL = "tag:yaml.org,2002:null"

Place = tuple[int, int]
"""Line and column, from 1."""


class CatalogFile(NamedTuple):
    """The wanted catalog, where each row (column "") and field is, and the faults; a field with a fault is None."""

    name: str
    wanted: WantedCatalog
    places: Mapping[tuple[str, str, str], Place]
    faults: Sequence[tuple[Place, str]]

    def check(self, faults: Iterable[RowFault]) -> None:
        """Raises VerbError for faults of the file, and for these: of rows that the catalog cannot have."""
        found = list(self.faults)
        for fault in faults:
            keys = ((fault.table, fault.name, fault.column), (fault.table, fault.name, ""), (fault.table, "", ""))
            place = next((self.places[key] for key in keys if key in self.places), (1, 1))
            row = f"price {fault.name}" if fault.table == "prices" else f"{fault.table}.{_called(fault.name)}"
            found.append((place, f"{row}: {fault.sentence}" if fault.name else fault.sentence))
        if found:
            raise _rejected(self.name, found)


def read_file(name: str, document: bytes) -> CatalogFile:
    """The catalog in a document; `name` is that of the file. Raises VerbError if it is not one YAML document."""
    try:
        root = yaml.compose(document, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise _rejected(name, [(place, f"is not YAML: {error.problem}.")]) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise _rejected(name, [((1, 1), f"is not YAML: {str(error).partition(chr(10))[0]}.")]) from error
    if root is None:
        raise _rejected(name, [((1, 1), f"is empty; a catalog has {_listed(SECTIONS)}.")])
    reader = _Reader()
    for section, _, node in reader.entries(root, "", SECTIONS):
        reader.section(section, node)
    return CatalogFile(name, WantedCatalog(reader.rows, reader.quotas), reader.places, reader.faults)


def _rejected(name: str, faults: Sequence[tuple[Place, str]]) -> VerbError:
    lines = [printable(f"{name}:{line}:{column}: {_shown(text, MOST_LINE)}") for (line, column), text in sorted(faults)]
    more = [f"{len(lines) - MOST_FAULTS:,} more faults."] if len(lines) > MOST_FAULTS else []
    return VerbError("\n".join(lines[:MOST_FAULTS] + more))


class _Reader:
    """Rows and faults, collected node by node."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[tuple[Any, ...], Row]] = {}
        self.quotas: dict[tuple[str, str], dict[str, Row]] = {}
        self.places: dict[tuple[str, str, str], Place] = {}
        self.faults: list[tuple[Place, str]] = []

    def fault(self, node: Any, sentence: str) -> None:
        self.faults.append((_place(node), sentence))

    def entries(self, node: Any, path: str, known: Collection[str] | None = None) -> Iterator[tuple[str, Any, Any]]:
        """Names and values of a mapping, with the node of the name. None of other names than `known`; null is empty."""
        whole = path or "The file"
        if node.tag == _NULL:
            return
        if not isinstance(node, yaml.MappingNode):
            self.fault(node, f"{whole} must be a mapping from names to values.")
            return
        seen: set[str] = set()
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name is None or _NOT_STORABLE.search(name):
                self.fault(key, f"{whole} has a name that is not text.")
            elif name in seen:
                self.fault(key, f"{whole} has {_shown(name)} twice.")
            elif known is not None and name not in known:
                self.fault(key, f"{path}{'.' if path else ''}{_shown(name)} is unknown; there are {_listed(known)}.")
            else:
                seen.add(name)
                yield name, key, value

    def items(self, node: Any, path: str) -> Sequence[Any]:
        """The nodes of a list; null is empty."""
        if isinstance(node, yaml.SequenceNode):
            items: Sequence[Any] = node.value
            return items
        if node.tag != _NULL:
            self.fault(node, f"{path} must be a list.")
        return []

    def section(self, table: str, node: Any) -> None:
        """Read the rows of a table."""
        self.places[table, "", ""] = _place(node)
        rows = self.rows.setdefault(table, {})
        for name, key, value in self.entries(node, table):
            self.places[table, name, ""] = _place(key)
            path = f"{table}.{_called(name)}"
            if table == "prices":
                for item in self.items(value, path):
                    self.price(name, path, item)
                continue
            fields = [field.name for field in SECTIONS[table]]
            given = {
                column: each
                for column, _, each in self.entries(
                    value, path, [*fields, "quotas"] if table in WITH_QUOTAS else fields
                )
            }
            if table in WITH_QUOTAS:
                self.quotas[table, name] = self.held(table, name, path, given.pop("quotas", None))
            rows[name,] = self.fields(table, name, path, given, key)

    def price(self, model: str, path: str, node: Any) -> None:
        """Read a price."""
        given = {column: each for column, _, each in self.entries(node, path, ("valid_from", *(f.name for f in PRICE)))}
        since = given.pop("valid_from", None)
        if since is None:
            self.fault(node, f"{path} must have valid_from.")
            return
        try:
            key = model, _moment(f"{path}.valid_from", self.text(since, f"{path}.valid_from") or "")
        except UsageError as error:
            self.fault(since, f"{error}.")
            return
        if key in self.rows["prices"]:
            self.fault(since, f"{path} has two prices from {_shown(since.value)} on.")
        name = price_name({"model": model, "valid_from": key[1]})
        self.places["prices", name, ""] = _place(node)
        self.rows["prices"][key] = self.fields("prices", name, path, given, node)

    def held(self, table: str, name: str, path: str, node: Any) -> dict[str, Row]:
        """The quotas of a row: texts or, with alert shares, mappings."""
        found: dict[str, Row] = {}
        if node is None:
            return found
        self.places[table, name, "quotas"] = _place(node)
        for item in self.items(node, f"{path}.quotas"):
            given = {"quota": item}
            if isinstance(item, yaml.MappingNode):
                given = {column: each for column, _, each in self.entries(item, f"{path}.quotas", QUOTA_FIELDS)}
                if "quota" not in given:
                    self.fault(item, f"{path}.quotas must have quota.")
                    continue
            text = self.text(given["quota"], f"{path}.quotas")
            if text in found:
                self.fault(item, f"{path}.quotas has {_shown(text)} twice.")
            elif text is not None:
                shares = given.get("alert_shares")
                values = {"alert_shares": shares and self.value(QUOTA[0], f"{path}.quotas.alert_shares", shares)}
                try:
                    parsed_quota(text)
                    check_alerts(text, values["alert_shares"])
                    found[text] = values
                except BadValue as error:
                    self.fault(item, f"{path}.quotas: {error}")
        return found

    def text(self, node: Any, path: str) -> str | None:
        """A scalar as it is written; None after a fault."""
        if not isinstance(node, yaml.ScalarNode):
            self.fault(node, f"{path} must be a single value.")
            return None
        if _NOT_STORABLE.search(node.value):
            self.fault(node, f"{path} has a character that PostgreSQL cannot store.")
            return None
        return str(node.value)

    def fields(self, table: str, name: str, path: str, given: Mapping[str, Any], row: Any) -> Row:
        """The values of all fields of a row."""
        values: Row = {}
        missing = []
        for field in SECTIONS[table]:
            node = given.get(field.name)
            if node is not None:
                self.places[table, name, field.name] = _place(node)
                values[field.name] = self.value(field, f"{path}.{field.name}", node)
            elif field.default == REQUIRED:
                missing.append(field.name)
                values[field.name] = None
            elif field.name != UNCHANGED.get(table, ("",))[0]:
                values[field.name] = _default(table, field)
        if missing:
            self.fault(row, f"{path} must have {_listed(missing)}.")
        return values

    def value(self, field: Field, path: str, node: Any) -> Any:
        """The value of a field; None after a fault."""
        if field.kind in ("names", "shares") and isinstance(node, yaml.SequenceNode):
            names = [self.text(each, path) for each in node.value]
            if None in names:
                return None
            if field.kind == "names":
                return list(dict.fromkeys(names))
            text: str | None = ",".join(map(str, names)) or "off"
        else:
            text = self.text(node, path)
        if text is None:
            return None
        if node.tag == _NULL:
            text = "none"
        elif field.kind in ("switch", "shares"):
            text = _SWITCH.get(text.lower(), text)
        fault = f"{path}: must be a number, got {_shown(text)}."
        try:
            value = value_of(field, text, path)
            if field in PRICE:
                value = Decimal(text.replace(",", ""))
            if value is None or not isinstance(value, float | Decimal) or isfinite(value):
                if node.tag != _NULL or value is None:
                    return value
                fault = f"{path}: must not be null."
        except UsageError as error:
            fault = f"{error}."
        except InvalidOperation:  # Such as 1__0, which float accepts.
            pass
        self.fault(node, fault)
        return None


@cache
def _default(table: str, field: Field) -> Any:
    value = value_of(field, field.default, field.name)
    return Decimal(field.default) if table == "prices" else value


def _moment(called: str, text: str) -> datetime:
    """A time in ISO 8601, with microseconds, which rows that SQL made have. Raises UsageError."""
    whole = time(called, text)
    try:
        whole = whole.astimezone(UTC)
    except OverflowError:
        raise UsageError(f"{called}: must be a time in the years 1 to 9999, got {text!r}") from None
    return whole.replace(microsecond=datetime.fromisoformat(text.removesuffix(" UTC")).microsecond)


def _place(node: Any) -> Place:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _shown(text: object, most: int = MOST_CHARS) -> str:
    shown = str(text)
    return shown if len(shown) <= most else f"{shown[:most]}..."


def _called(name: str) -> str:
    """The name of a row in a path; quoted if it has other characters than those of most names."""
    return _shown(name if _SIMPLE.fullmatch(name) else repr(name))


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def write_file(catalog: RowsByTable, version: str) -> str:
    """The catalog as a document: tiers by priority, other rows by name, with the values that are not defaults."""
    document: dict[str, Any] = {}
    quotas: dict[object, dict[str, Any]] = {}
    for row in catalog["quotas"]:
        shares = row["alert_shares"]
        shown = row["quota"] if shares is None else {"quota": row["quota"], "alert_shares": [*map(_plain, shares)]}
        quotas.setdefault(row["customer_id"] or row["tier"], {})[row["quota"]] = shown
    for table, fields in SECTIONS.items():
        section: dict[str, Any] = document.setdefault(table, {})
        for row in catalog[table]:
            values = {
                field.name: _plain(row[field.name])
                for field in fields
                if field.default == REQUIRED or row[field.name] != _default(table, field)
            }
            if table == "prices":
                section.setdefault(row["model"], []).append({"valid_from": _time(row["valid_from"]), **values})
                continue
            if held := quotas.get(row["id"] if table == "customers" else row["name"]) if table in WITH_QUOTAS else None:
                values["quotas"] = [held[text] for text in sorted(held)]
            section[row["name"]] = values
    head = (
        f"# The catalog of Tierlane, written by `tierlane export` {version}. `tierlane apply -f FILE` makes these changes.\n"
        "# Fields that are left out have their defaults, except status, paused and state, which then stay as they are.\n"
        "# API keys and cordons are not in this file: use `tierlane key` and `tierlane gpu`.\n"
    )
    body: str = yaml.dump(document, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, width=1000)
    return head + body


def _time(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def _plain(value: Any) -> Any:
    """A value that YAML writes exactly."""
    if isinstance(value, Decimal):
        return (
            int(value)
            if value == int(value)
            else float(value)
            if Decimal(repr(float(value))) == value
            else f"{value:f}"
        )
    return int(value) if isinstance(value, float) and value.is_integer() else value
