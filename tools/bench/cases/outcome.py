"""The outcome of a case: figures with their targets."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Check(NamedTuple):
    """One figure. `holds` is None without a target or where it could not be measured."""

    figure: str
    target: str
    measured: str
    holds: bool | None = None


class Outcome(NamedTuple):
    """The result of a case. `data` holds plain values that can be written as JSON."""

    checks: list[Check]
    data: Mapping[str, Any]
    notes: list[str]


def at_least(figure: str, value: float | None, least: float, unit: str = "", digits: int = 0) -> Check:
    """A figure with a lower bound."""
    if value is None:
        return Check(figure, f">= {least:,.{digits}f}{unit}", "not measured")
    return Check(figure, f">= {least:,.{digits}f}{unit}", f"{value:,.{digits}f}{unit}", value >= least)


def at_most(figure: str, value: float | None, most: float, unit: str = "", digits: int = 0) -> Check:
    """A figure with an upper bound."""
    if value is None:
        return Check(figure, f"<= {most:,.{digits}f}{unit}", "not measured")
    return Check(figure, f"<= {most:,.{digits}f}{unit}", f"{value:,.{digits}f}{unit}", value <= most)


def none_of(figure: str, count: int) -> Check:
    """A count that must be 0."""
    return Check(figure, "0", f"{count:,}", count == 0)


def figure(figure: str, measured: str) -> Check:
    """A figure without a target."""
    return Check(figure, "", measured)


def over(value: float | None, base: float | None) -> float | None:
    """A ratio; None where either is missing or the base is 0."""
    return value / base if value is not None and base else None


def more(value: float | None, base: float | None) -> float | None:
    """The increase of a figure over its base in per cent."""
    ratio = over(value, base)
    return None if ratio is None else (ratio - 1) * 100
