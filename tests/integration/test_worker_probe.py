"""The liveness probe of a worker in deploy/k8s/: the age of its beat counts, and only while Redis can be asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pool import Pool

PROBE = Path(__file__).resolve().parents[2] / "deploy" / "k8s" / "base" / "worker_beats.py"


def looked(redis_url: str, worker_id: str, pool: str = "default") -> int:
    """The exit code, with 30 s allowed."""
    told = {"TIERLANE_REDIS_URL": redis_url, "TIERLANE_WORKER_ID": worker_id, "TIERLANE_POOL": pool}
    return subprocess.run([sys.executable, str(PROBE), "30"], env=os.environ | told, check=False).returncode


async def test_a_worker_that_beats_lives(pool: Pool, redis_url: str) -> None:
    """One that beat a minute ago, never, or in another pool, does not."""
    await pool.worker_beats("w1")
    assert looked(redis_url, "w1") == 0
    assert looked(redis_url, "w2") == 1
    assert looked(redis_url, "w1", "other") == 1

    await pool.client.zadd(pool.keys.gpus, {"w1": await pool.now_ms() - 60_000})
    assert looked(redis_url, "w1") == 1


@pytest.mark.parametrize("url", ["unix:///nowhere", "redis://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/main"])
def test_without_redis_nothing_is_said_against_it(url: str) -> None:
    """Gateways call it directly then."""
    assert looked(url, "w1") == 0
