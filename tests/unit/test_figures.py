"""Figures with a declared rule: merged over documents, and shown by each document that names them."""

from typing import Annotated, TypedDict

import msgspec

from gateway.operations.figures import First, Highest, Last, Lowest, Mean, Total, WeightedMean, merged, view


class Figures(TypedDict):
    """One figure for each rule."""

    name: str
    depth: Total[int]
    age_ms: Highest[float | None]
    ratio: Lowest[float]
    rate: Mean[float]
    start: First[str]
    end: Last[str]
    share: Annotated[float, WeightedMean("depth")]


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """A document with two of the figures, one of which differs."""

    name: str = ""
    depth: int
    age_ms: float


ONE: Figures = {
    "name": "one",
    "depth": 1,
    "age_ms": None,
    "ratio": 0.5,
    "rate": 1.0,
    "start": "a",
    "end": "b",
    "share": 0.2,
}
OTHER: Figures = ONE | {
    "name": "other",
    "depth": 3,
    "age_ms": 7.5,
    "ratio": 0.75,
    "rate": 2.0,
    "end": "c",
    "share": 0.6,
}
BOTH: Figures = ONE | {"name": "both", "depth": 4, "age_ms": 7.5, "ratio": 0.5, "rate": 1.5, "end": "c", "share": 0.5}


def test_each_figure_is_merged_by_its_rule() -> None:
    """Unknown values do not count, and a mean without any weight is 0; a field without a rule is given."""
    assert merged(Figures, [ONE, OTHER], name="both") == BOTH
    assert merged(Figures, [ONE, ONE], name="")["age_ms"] is None
    assert merged(Figures, [ONE | {"depth": 0}], name="")["share"] == 0.0


def test_a_view_takes_its_figures_by_name() -> None:
    """From a document, or from a struct."""
    shown = view(Shown, OTHER, age_ms=8)

    assert shown == view(Shown, shown) == Shown(name="other", depth=3, age_ms=8)
