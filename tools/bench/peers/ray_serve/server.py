"""The job on Ray Serve: HAProxy in front of two replicas, each of which runs half of the GPUs' batches at a time."""
# ruff: noqa: INP001 - a folder of scripts, not a package

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

import ray
from ray import serve
from reversal import BATCH, GPUS, PORT, SERVICE_S, WINDOW_S, reversed_all
from starlette.requests import Request

REPLICAS = 2
ONGOING = 4096  # More than there are connections, so that nothing waits outside of the batcher.


@serve.deployment(
    num_replicas=REPLICAS,
    max_ongoing_requests=ONGOING,
    ray_actor_options={"num_cpus": 0},
    logging_config={"enable_access_log": False},
)
class Reverse:
    """Half of the GPUs."""

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=WINDOW_S, max_concurrent_batches=GPUS // REPLICAS)
    async def run(self, inputs: Sequence[str]) -> list[str]:
        """One batch."""
        await asyncio.sleep(SERVICE_S)
        return reversed_all(inputs)

    async def __call__(self, request: Request) -> dict[str, str]:
        """One request."""
        body = await request.json()
        return {"output": await self.run(body["input"])}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=2,
        object_store_memory=100 << 20,
        _node_ip_address="127.0.0.1",
        _temp_dir=os.environ["PEER_HOME"] + "/ray",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": PORT}, logging_config={"enable_access_log": False})
    serve.run(Reverse.bind(), route_prefix="/inference")
    signal.pause()
