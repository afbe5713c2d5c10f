"""The times of the models of a stack, measured by the first batch of each worker, and the warning about those too slow;
the limits of a request to them in one line.

A worker whose model takes longer than TIERLANE_GPU_TIMEOUT_MS claims nothing (gpu_pool/worker/slow_model.py), so its
stack is started, but never serves. A time over TIERLANE_TOTAL_REQUEST_MS has the same effect: every response is late.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ratelimit.request_limits import ENDPOINT, LANGUAGE_MODEL, SERVERS, RequestLimits
from scheduler.errors import RedisUnavailable
from scheduler.protocol.pool_view import WorkerView
from scheduler.protocol.presence import Presence
from scheduler.redis_client.connections import command_client, server_url, tag_at
from scheduler.redis_client.keys import Keys

if TYPE_CHECKING:
    from tierlane.settings.model import Settings

ROOM = 2.0
"""The suggested cap, as a multiple of the measured time: larger batches and longer texts take longer."""

ROUND_MS = 1000
SLOW = "slow"


def shortfall(model: str, ms: float, timeout_ms: float, total_ms: float) -> str:
    """Why a model that takes `ms` for a batch of one cannot be served within cap and deadline; "" if it can."""
    over = [
        f"{name} = {limit:,.0f}"
        for name, limit in (("TIERLANE_GPU_TIMEOUT_MS", timeout_ms), ("TIERLANE_TOTAL_REQUEST_MS", total_ms))
        if ms > limit
    ]
    if not over:
        return ""
    return f"{model} takes {ms:,.0f} ms for a batch of one request, over {' and '.join(over)}"


def advice(ms: float, timeout_ms: float) -> str:
    """The settings with which a model that takes `ms` can be served, as a sentence. `timeout_ms`: the cap now."""
    cap = max(math.ceil(ROOM * round(ms) / ROUND_MS) * ROUND_MS, round(timeout_ms))
    return (
        f"Set TIERLANE_GPU_TIMEOUT_MS={cap} and TIERLANE_TOTAL_REQUEST_MS={cap + ROUND_MS}, or use a faster device or a "
        "smaller model."
    )


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


async def measured_workers(redis_urls: Iterable[str], pools: Sequence[str]) -> dict[str, list[WorkerView]]:
    """The workers of each pool as they last reported, in all cells; those at a Redis that does not respond are missing."""
    found: dict[str, list[WorkerView]] = {pool: [] for pool in pools}
    for url in redis_urls:
        client = command_client(await server_url(url))
        try:
            for pool in pools:
                found[pool] += (await Presence(client, Keys(pool, tag_at(client))).observe([])).workers
        except RedisUnavailable:
            continue
        finally:
            await client.aclose()
    return found


def limits_line(backend: str, of_backend: RequestLimits, settings: "Settings") -> str:
    """What holds for a request to this backend, as a list without an end. `of_backend`: the limits before the settings."""
    limits = settings.request_limits(of_backend)
    run = [f"run {_time(settings.gpu_timeout_ms)}"]
    if backend.startswith(ENDPOINT):
        first, silence = settings.endpoint_first_token_ms, settings.endpoint_silence_ms
        run = [f"first token {_time(first)}", f"silence {_time(silence)}"]
    elif backend.startswith(SERVERS):
        run = []
    elif of_backend == LANGUAGE_MODEL:
        run = [f"silence {_time(settings.gpu_timeout_ms)}"]
    sizes = [f"body {_size(limits.body_bytes)}"]
    if limits.input_bytes < limits.body_bytes:
        sizes.append(f"text {_size(limits.input_bytes)}")
    waits = [f"wait {_time(limits.queue_ms)} (max_queue_ms)"]
    return ", ".join([*waits, *run, f"total {_time(limits.total_ms)}", *sizes])


def _time(ms: float) -> str:
    return f"{ms / 1000:,g} s"


def _size(count: int) -> str:
    return f"{count / (1 << 20):g} MiB" if count >= 1 << 20 else f"{count / 1024:g} KiB"
