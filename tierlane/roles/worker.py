"""The worker's process: the supervisor of one model process."""

import os
import socket
from typing import TYPE_CHECKING

from gpu_pool.worker import WorkerConfig, run_worker
from tierlane.roles.log_output import configure_logs
from tierlane.roles.process import run_role

if TYPE_CHECKING:
    from tierlane.settings import Settings

DEFAULT_BATCH_SIZE = 32


def run(settings: "Settings") -> int:
    """Run until SIGTERM; returns the exit code."""
    worker_id = settings.worker_id or f"{socket.gethostname()}-{os.getpid()}"
    configure_logs(settings.log_format, settings.log_level, "worker", worker_id)
    config = WorkerConfig(
        redis_url=settings.redis_url,
        worker_id=worker_id,
        backend=settings.backend,
        pool=settings.pool,
        device=settings.device,
        torch_threads=settings.torch_threads or max(1, os.cpu_count() or 1),
        max_batch_size=settings.max_batch_size or DEFAULT_BATCH_SIZE,
        heartbeat_ms=settings.heartbeat_ms,
        renew_ms=settings.renew_ms,
        gpu_timeout_ms=settings.gpu_timeout_ms,
    )
    return run_role(lambda: run_worker(config))
