"""`python -m gateway.metrics`: generate the lists of docs/metrics.md from the definitions."""

from collections.abc import Iterable

from gateway.metrics.definitions import COUNTED, OBSERVED, UNITS, Metric
from ratelimit.__main__ import Pages, update


def pages() -> Pages:
    """Counters and observations."""
    return {"metrics.md": {"counters": _list(COUNTED), "observations": _list(OBSERVED)}}


def _list(metrics: Iterable[Metric]) -> str:
    lines = []
    for metric in metrics:
        labels = f" by {', '.join(f'`{label}`' for label in metric.labels)}" if metric.labels else ""
        unit = "" if metric.unit == "requests" or metric.unit in UNITS.values() else f"; {metric.unit}"
        lines.append(f"* `{metric.name}` ({metric.kind}{labels}{unit}): {metric.description}\n")
    return "".join(lines)


if __name__ == "__main__":
    update(pages())
