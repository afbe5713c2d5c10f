"""The liveness probe of a worker in deploy/k8s/."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pool import Pool

PROBE = Path(__file__).resolve().parents[2] / "deploy" / "k8s" / "base" / "worker_beats.py"


def probe(redis_url: str, worker_id: str, pool: str = "default") -> int:
    """The exit code, with 30 s allowed."""
    environment = {"TIERLANE_REDIS_URL": redis_url, "TIERLANE_WORKER_ID": worker_id, "TIERLANE_POOL": pool}
    return subprocess.run([sys.executable, str(PROBE), "30"], env=os.environ | environment, check=False).returncode


async def test_age_of_the_heartbeat_decides(pool: Pool, redis_url: str) -> None:
    """A worker without heartbeat, in another pool, or silent for a minute is not alive."""
    await pool.worker_beats("w1")
    assert [probe(redis_url, "w1"), probe(redis_url, "w2"), probe(redis_url, "w1", "other")] == [0, 1, 1]

    await pool.client.zadd(pool.keys.gpus, {"w1": await pool.now_ms() - 60_000})
    assert probe(redis_url, "w1") == 1


@pytest.mark.parametrize("url", ["unix:///nowhere", "redis://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/main"])
def test_without_redis_the_worker_counts_as_alive(url: str) -> None:
    """Gateways call it directly then."""
    assert probe(url, "w1") == 0
