"""What a case of the suite found: figures beside their targets. Pure, so that the judging can be tested without a stack."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Check(NamedTuple):
    """One figure. `holds` is None where there is no target, or where it could not be measured."""

    figure: str
    target: str
    measured: str
    holds: bool | None = None


class Outcome(NamedTuple):
    """Everything that a case found. `data` is for machines: plain values only."""

    checks: list[Check]
    data: Mapping[str, Any]
    notes: list[str]


def at_least(figure: str, value: float | None, least: float, unit: str = "", digits: int = 0) -> Check:
    """A figure that must not be smaller."""
    if value is None:
        return Check(figure, f">= {least:,.{digits}f}{unit}", "not measured")
    return Check(figure, f">= {least:,.{digits}f}{unit}", f"{value:,.{digits}f}{unit}", value >= least)


def at_most(figure: str, value: float | None, most: float, unit: str = "", digits: int = 0) -> Check:
    """A figure that must not be larger."""
    if value is None:
        return Check(figure, f"<= {most:,.{digits}f}{unit}", "not measured")
    return Check(figure, f"<= {most:,.{digits}f}{unit}", f"{value:,.{digits}f}{unit}", value <= most)


def none_of(figure: str, count: int) -> Check:
    """A count that must be 0."""
    return Check(figure, "0", f"{count:,}", count == 0)


def told(figure: str, measured: str) -> Check:
    """A figure without a target."""
    return Check(figure, "", measured)


def over(value: float | None, base: float | None) -> float | None:
    """A ratio; None where either is missing or the base is nothing."""
    return value / base if value is not None and base else None


def more(value: float | None, base: float | None) -> float | None:
    """By how many per cent a figure is larger than its base."""
    ratio = over(value, base)
    return None if ratio is None else (ratio - 1) * 100
