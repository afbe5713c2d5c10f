"""What the workers of a pool have in common: the model version, and whether their backends sample or pass chats on."""

from collections.abc import Sequence

from ratelimit.request_limits import ENDPOINT
from scheduler.protocol.pool_view import WorkerView

SAMPLING_BACKENDS = (ENDPOINT,)
"""Backends that sample if a request has no temperature: the default of an endpoint is often 0.7 or 1."""


def one_version(workers: Sequence[WorkerView]) -> str:
    """The model version that all healthy workers run; "" if they run several versions or none is known."""
    versions = {worker.model_version for worker in workers if worker.healthy}
    return versions.pop() if len(versions) == 1 else ""


def passes_chats_on(workers: Sequence[WorkerView]) -> bool:
    """Whether every one of these workers passes chats on to a server."""
    return all(worker.backend.startswith(SAMPLING_BACKENDS) for worker in workers)


def greedy_by_default(workers: Sequence[WorkerView]) -> bool:
    """Whether no worker of the pool samples without a temperature; False if no worker is known."""
    return bool(workers) and not any(worker.backend.startswith(SAMPLING_BACKENDS) for worker in workers)
