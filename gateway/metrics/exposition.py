"""From sums and gauges to the text that Prometheus reads. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.metrics.counters import BATCHES, BOUNDS_US, Series
from gateway.metrics.definitions import COUNTED, SEEN
from gateway.metrics.definitions import Metric as Definition
from gateway.metrics.fleet import Gauge

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FILLS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SECONDS = tuple(bound / 1e6 for bound in BOUNDS_US)
MADE_OF_BATCHES = ("tierlane_batch_size", "tierlane_batch_fill_ratio")

Buckets = list[tuple[str, float]]
Histogram = tuple[tuple[str, ...], Buckets, float]
"""Values of the labels, cumulative counts by upper end, the sum."""


def exposition(series: Series, gauges: Iterable[Gauge]) -> bytes:
    """The whole page. Metrics of which there is nothing yet are named all the same."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Page(series, list(gauges)))
    return generate_latest(registry)


class Page(Collector):
    """One scrape's figures as prometheus_client wants them."""

    def __init__(self, series: Series, gauges: Sequence[Gauge]) -> None:
        self._series = series
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        """One family for each definition."""
        for definition in COUNTED:
            yield self._histogram(definition) if definition.kind == "histogram" else self._counter(definition)
        for definition in SEEN:
            family = GaugeMetricFamily(definition.name, definition.meaning, labels=definition.labels)
            for name, labels, value in self._gauges:
                if name == definition.name:
                    family.add_metric(labels, value)
            yield family

    def _counter(self, definition: Definition) -> Metric:
        family = CounterMetricFamily(definition.name, definition.meaning, labels=definition.labels)
        for labels, numbers in self._of(definition.name):
            family.add_metric(labels, numbers[0])
        return family

    def _histogram(self, definition: Definition) -> Metric:
        family = HistogramMetricFamily(definition.name, definition.meaning, labels=definition.labels)
        made = definition.name in MADE_OF_BATCHES
        found = self._batches(fill=definition.name.endswith("_ratio")) if made else self._times(definition.name)
        for labels, buckets, total in found:
            family.add_metric(labels, buckets, total)
        return family

    def _of(self, name: str) -> Iterator[tuple[tuple[str, ...], list[int]]]:
        return ((key[1:], numbers) for key, numbers in sorted(self._series.items()) if key[0] == name)

    def _times(self, name: str) -> Iterator[Histogram]:
        for labels, numbers in self._of(name):
            if len(numbers) == len(SECONDS) + 2:
                yield labels, cumulative(SECONDS, numbers[:-1]), numbers[-1] / 1e6

    def _batches(self, *, fill: bool) -> Iterator[Histogram]:
        """Batches by size, or by how full they were; in an order that stays, so that sums of fractions never fall."""
        models: dict[tuple[str, ...], list[tuple[int, int, int]]] = {}
        for (*labels, full, size), (count, *_) in self._of(BATCHES):
            models.setdefault(tuple(labels), []).append((int(full), int(size), count))
        for labels_of, rows in models.items():
            yield (labels_of, *(_fills(sorted(rows)) if fill else _sizes(sorted(rows))))


def cumulative(bounds: Sequence[float], counts: Sequence[float]) -> Buckets:
    """Counts of single buckets, the last without an end, as Prometheus counts them."""
    ends = [*(repr(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(ends, accumulate(counts), strict=True))


def _sizes(rows: Sequence[tuple[int, int, int]]) -> tuple[Buckets, float]:
    """Of (full, size, requests): a batch of n has n requests."""
    return _weighed(SIZES, [(size, requests / size, requests) for _, size, requests in rows if size > 0])


def _fills(rows: Sequence[tuple[int, int, int]]) -> tuple[Buckets, float]:
    """Where a full batch is not known, nothing."""
    known = [(min(1.0, size / full), requests / size) for full, size, requests in rows if full > 0 and size > 0]
    return _weighed(FILLS, [(part, batches, part * batches) for part, batches in known])


def _weighed(bounds: Sequence[float], rows: Sequence[tuple[float, float, float]]) -> tuple[Buckets, float]:
    """Of (value, how often, what it adds to the sum)."""
    buckets = [(repr(float(bound)), sum(count for value, count, _ in rows if value <= bound)) for bound in bounds]
    return [*buckets, ("+Inf", sum(count for _, count, _ in rows))], float(sum(add for *_, add in rows))
