"""Figures that are declared once: the annotation of a field has the rule by which its values are merged.

A document that shows a part of the figures is a view, by name.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

from gateway.operations.merge_rules import WeightedMean, highest, mean, total

Document = TypeVar("Document")
Value = TypeVar("Value")

Total = Annotated[Value, total]
Highest = Annotated[Value, highest]
Lowest = Annotated[Value, min]
Mean = Annotated[Value, mean]
First = Annotated[Value, itemgetter(0)]
Last = Annotated[Value, itemgetter(-1)]


@cache
def _rules(kind: Callable[..., Any]) -> Mapping[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}


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


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(getattr(kind, "__struct_fields__", None) or kind.__annotations__)
