"""The times of the models of a stack, measured by the first batch of each worker, and the warning about those too slow.

A worker whose model takes longer than TIERLANE_GPU_TIMEOUT_MS claims nothing (gpu_pool/worker/slow_model.py), so its
stack is started, but never serves. A time over TIERLANE_TOTAL_REQUEST_MS has the same effect: every response is late.
"""

from collections.abc import Iterable, Sequence

from scheduler.errors import RedisUnavailable
from scheduler.protocol.pool_view import WorkerView
from scheduler.protocol.presence import Presence
from scheduler.redis_client.connections import command_client, server_url, tag_at
from scheduler.redis_client.keys import Keys
from tierlane.check.model_times import advice, shortfall

SLOW = "slow"


def warnings(workers: Sequence[WorkerView], total_ms: float) -> list[str]:
    """One sentence for each model that cannot meet its cap or the deadline `total_ms`, from the slowest worker of each."""
    slowest: dict[str, WorkerView] = {}
    for worker in workers:
        if worker.model_ms >= slowest.get(worker.backend, worker).model_ms:
            slowest[worker.backend] = worker
    return [
        f"WARNING: {why}; requests fail with {code_of(worker)}. {advice(worker.model_ms, worker.timeout_ms)}"
        for worker in slowest.values()
        if (why := shortfall(worker.backend, worker.model_ms, worker.timeout_ms, total_ms))
    ]


def is_measured(worker: WorkerView) -> bool:
    """Whether its time is known: a slow worker reports the cap until its first trial batch has ended."""
    return worker.status != SLOW or worker.model_ms > worker.timeout_ms


def code_of(worker: WorkerView) -> str:
    """The error code of the requests of such a worker."""
    return "model_too_slow" if worker.model_ms > worker.timeout_ms else "deadline_exceeded"


async def measured_workers(
    redis_urls: Iterable[str], pools: Sequence[str], gone_ms: int
) -> dict[str, list[WorkerView]]:
    """The workers of each pool as they last reported, in all cells; those at a Redis that does not respond are missing."""
    found: dict[str, list[WorkerView]] = {pool: [] for pool in pools}
    for url in redis_urls:
        client = command_client(await server_url(url))
        try:
            for pool in pools:
                found[pool] += (await Presence(client, Keys(pool, tag_at(client)), gone_ms=gone_ms).observe([])).workers
        except RedisUnavailable:
            continue
        finally:
            await client.aclose()
    return found
