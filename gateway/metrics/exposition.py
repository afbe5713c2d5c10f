"""The page of all metrics in the text format of Prometheus."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from gateway.metrics.counters import BATCHES, BOUNDS_US, Series
from gateway.metrics.definitions import COUNTED, OBSERVED
from gateway.metrics.gauges import Gauge

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FILL_RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
BOUNDS_S = tuple(bound / 1e6 for bound in BOUNDS_US)

Histogram = tuple[tuple[str, ...], list[tuple[str, float]], float]
"""Values of the labels, cumulative counts by upper bound, sum."""


def exposition(series: Series, observed: Iterable[Gauge]) -> bytes:
    """The page. It names metrics without samples too."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsPage(series, list(observed)))
    return generate_latest(registry)


class MetricsPage(Collector):
    """The metrics of one scrape."""

    def __init__(self, series: Series, observed: Sequence[Gauge]) -> None:
        self._series = series
        self._observed = observed

    def collect(self) -> Iterator[MetricFamily]:
        """One family per definition."""
        for metric in COUNTED:
            if metric.kind == "counter":
                counter = CounterMetricFamily(metric.name, metric.description, labels=metric.labels)
                for labels, numbers in self._of(metric.name):
                    counter.add_metric(labels, numbers[0])
                yield counter
                continue
            histogram = HistogramMetricFamily(metric.name, metric.description, labels=metric.labels)
            if metric.name == "tierlane_batch_size":
                found = self._batches(BATCH_SIZES)
            elif metric.name == "tierlane_batch_fill_ratio":
                found = self._batches(FILL_RATIOS)
            else:
                found = self._times(metric.name)
            for labels, buckets, total in found:
                histogram.add_metric(labels, buckets, total)
            yield histogram
        for metric in OBSERVED:
            family = GaugeMetricFamily(metric.name, metric.description, labels=metric.labels)
            for name, labels, value in self._observed:
                if name == metric.name:
                    family.add_metric(labels, value)
            yield family

    def _of(self, name: str) -> Iterator[tuple[tuple[str, ...], list[int]]]:
        return ((key[1:], numbers) for key, numbers in sorted(self._series.items()) if key[0] == name)

    def _times(self, name: str) -> Iterator[Histogram]:
        bounds = [*(repr(bound) for bound in BOUNDS_S), "+Inf"]
        for labels, numbers in self._of(name):
            if len(numbers) == len(bounds) + 1:
                yield labels, list(zip(bounds, accumulate(numbers[:-1]), strict=True)), numbers[-1] / 1e6

    def _batches(self, bounds: Sequence[float]) -> Iterator[Histogram]:
        """Batches of each model, by size or by fill. Rows are sorted, since a sum of fractions in another order could decrease."""
        models: dict[tuple[str, ...], list[tuple[int, int, int]]] = {}
        for (*labels, full, size), (count, *_) in self._of(BATCHES):
            models.setdefault(tuple(labels), []).append((int(full), int(size), count))
        for labels_of, rows in models.items():
            if bounds == BATCH_SIZES:
                weighted = [(float(size), count / size) for _, size, count in sorted(rows) if size > 0]
            else:
                weighted = [(min(1.0, n / full), count / n) for full, n, count in sorted(rows) if full > 0 and n > 0]
            buckets = [(repr(float(bound)), sum(n for value, n in weighted if value <= bound)) for bound in bounds]
            buckets.append(("+Inf", sum(n for _, n in weighted)))
            yield labels_of, buckets, float(sum(value * n for value, n in weighted))
