"""Helpers for tests of metrics: a reply, and the samples of a page for Prometheus."""

from prometheus_client.parser import text_string_to_metric_families

from scheduler.protocol.replies import Reply

Labels = frozenset[tuple[str, str]]


def reply(**changes: object) -> Reply:
    """A completed reply: 0.02 s in the queue, 0.05 s on the GPU, in a batch of four."""
    fields: dict[str, object] = {
        "id": "r",
        "customer_id": "c",
        "nonce": "n",
        "state": "completed",
        "error_code": "",
        "attempts": 1,
        "queue_ms": 20.0,
        "batch_id": "b",
        "batch_size": 4,
        "worker_id": "w",
        "gpu_ms": 50.0,
        "tokens_used": 1,
        "model_version": "v",
        "output": "o",
    }
    return Reply(**fields | changes)  # type: ignore[arg-type]


def read(page: bytes) -> dict[tuple[str, Labels], float]:
    """Every sample; fails if one is repeated."""
    found: dict[tuple[str, Labels], float] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(page: bytes, name: str, **labels: str) -> float | None:
    """One sample, by all of its labels."""
    return read(page).get((name, frozenset(labels.items())))


def total(page: bytes, name: str, **labels: str) -> float:
    """The sum of all samples that have these labels."""
    wanted = set(labels.items())
    return sum(number for (sample, its), number in read(page).items() if sample == name and wanted <= its)
