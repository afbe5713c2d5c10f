"""`python -m gateway.metrics`: generate the tables of docs/metrics.md from the definitions."""

from collections.abc import Iterable

from gateway.metrics.definitions import COUNTED, OBSERVED, Metric
from ratelimit.__main__ import Pages, table, update


def pages() -> Pages:
    """Counters and observations."""
    return {"metrics.md": {"counters": _table(COUNTED), "observations": _table(OBSERVED)}}


def _table(metrics: Iterable[Metric]) -> str:
    return table(
        ("Name", "Type", "Labels", "Unit", "Description"),
        (
            (f"`{each.name}`", each.kind, ", ".join(f"`{label}`" for label in each.labels), each.unit, each.description)
            for each in metrics
        ),
    )


if __name__ == "__main__":
    update(pages())
