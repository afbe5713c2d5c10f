"""Step 8: health.

Every 250 ms a gateway observes its pool in one call (gateway/heartbeat.py). The checks are pure functions of these
observations, so each has a table test without a server; docs/health.md has all of them.
"""

from typing import Any

from eventually import eventually
from integration.gateway_fixtures import Stack, stack

__all__ = ["stack"]


async def test_a_lost_gpu_is_named_with_an_action(stack: Stack) -> None:
    """One of two GPUs reports that it is down: requests are still served, so the status is `degraded` and not `down`."""

    async def has(status: str) -> dict[str, Any] | None:
        _, document = await stack.internal("/internal/health")
        return document if document["status"] == status else None

    healthy = await eventually(lambda: has("healthy"), "all checks pass")
    await stack.worker.heartbeat("worker-2", "down")
    degraded = await eventually(lambda: has("degraded"), "the fault is reported")

    assert (healthy["reasons"], healthy["healthy_gpus"]) == ([], 1)
    assert (degraded["healthy_gpus"], degraded["total_gpus"]) == (1, 2)
    assert degraded["reasons"][0].startswith("1 of 2 GPUs is not healthy: worker-2 is down")
    (check,) = degraded["checks"]["gpus:healthy"]
    assert (check["status"], check["code"]) == ("warn", "model_failed")
    assert check["action"]
    assert check["runbook"].endswith(".md")
    assert (await stack.infer())[0] == 200
