"""Figures that are declared once: the annotation of a field has the rule by which its values are merged.

The values of a figure are those of several pools, cells, or times, in this order. A document that shows a part of the
figures is a view, by name.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Annotated, Any, NamedTuple, TypeVar, get_origin, get_type_hints

Document = TypeVar("Document")
Value = TypeVar("Value")
Lowest = Annotated[Value, min]
First = Annotated[Value, itemgetter(0)]
Last = Annotated[Value, itemgetter(-1)]


class WeightedMean(NamedTuple):
    """The rule of a share: the mean, weighted by another field of the same document."""

    by: str

    def __call__(self, values: Sequence[float], weights: Sequence[int]) -> float:
        total_weight = sum(weights)
        weighted = sum(value * weight for value, weight in zip(values, weights, strict=True))
        return round(weighted / total_weight, 4) if total_weight else 0.0


class Worst(NamedTuple):
    """The rule of a level: the last of them in `order`. Unknown values, of gateways of other versions, count as the first."""

    order: Sequence[Any]

    def __call__(self, values: Sequence[Any]) -> Any:
        return max(values, key=lambda value: self.order.index(value) if value in self.order else 0)


def total(values: Sequence[float]) -> float:
    """The sum, rounded to 3 digits."""
    return round(sum(values), 3)


def sum_counts(several: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The sums by name, sorted by name."""
    names = sorted({name for each in several for name in each})
    return {name: sum(each.get(name, 0) for each in several) for name in names}


def highest(values: Sequence[Any]) -> Any:
    """The highest of the known values; None without any."""
    return max((value for value in values if value is not None), default=None)


def mean(values: Sequence[float]) -> float:
    """The mean, rounded to 3 digits."""
    return round(sum(values) / len(values), 3)


Total = Annotated[Value, total]
Highest = Annotated[Value, highest]
Mean = Annotated[Value, mean]


@cache
def _rules(kind: Callable[..., Any]) -> Mapping[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(getattr(kind, "__struct_fields__", None) or kind.__annotations__)


def _get(document: Any, name: str) -> Any:
    return document[name] if isinstance(document, dict) else getattr(document, name)


def merged(kind: Callable[..., Document], documents: Sequence[Document], **others: Any) -> Document:
    """One document of all. `others`: the fields without a rule, with their values."""
    for name, rule in _rules(kind).items():
        values = [_get(each, name) for each in documents]
        if isinstance(rule, WeightedMean):
            others[name] = rule(values, [_get(each, rule.by) for each in documents])
        else:
            others[name] = rule(values)
    return kind(**others)


def view(kind: Callable[..., Document], figures: Any, **others: Any) -> Document:
    """The figures that a document shows, by name. `others`: its other fields, or those that differ."""
    names = _names(kind)
    return kind(**{name: others[name] if name in others else _get(figures, name) for name in names})
