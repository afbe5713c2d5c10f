"""The worker's process: the supervisor of one model process."""

import gc
import os
import socket
from dataclasses import replace

from gpu_pool.config import Access
from gpu_pool.worker.worker import WorkerConfig, run_worker
from tierlane.roles.process import check_redis, configure_logs, run_role, spans_of, with_cluster
from tierlane.settings.model import Settings
from tierlane.settings.pools import default_batch_size, default_torch_threads

RARELY = 20_000
"""New objects between two looks for cycles: a batch makes hundreds, and none that reference counts do not free."""


def run(settings: Settings) -> int:
    """Run until SIGTERM; returns the exit code."""
    config = worker_config(settings)
    configure_logs(settings.log_format, settings.log_level, "worker", config.worker_id)
    return run_role(lambda: _serve(config, settings))


def worker_config(settings: Settings) -> WorkerConfig:
    """Plain values for the worker."""
    return settings.config_of(
        WorkerConfig,
        worker_id=settings.worker_id or f"{socket.gethostname()}-{os.getpid()}",
        torch_threads=settings.torch_threads or default_torch_threads(settings.backend),
        max_batch_size=settings.max_batch_size or default_batch_size(settings.backend),
        measure_at_start=True,
        direct_host="" if settings.direct_host == "off" else settings.direct_host,
        endpoint=Access(**settings.endpoint_values, body_dir=str(settings.body_dir or "")),
    )


async def _serve(config: WorkerConfig, settings: Settings) -> int:
    config = replace(config, redis_url=(await with_cluster(settings, any_cell=True)).redis_url)
    await check_redis(config.redis_url)
    with spans_of(settings, "worker", config.worker_id) as spans:
        gc.collect()
        gc.freeze()
        gc.set_threshold(RARELY)
        return await run_worker(config, spans)
