"""The job on SAQ over Redis, worker: takes jobs one by one, as SAQ does, and batches them for its half of the GPUs."""
# ruff: noqa: INP001 - a folder of scripts, not a package

import asyncio
import os
from typing import Any

import uvloop
from micro_batch import MicroBatcher
from reversal import GPUS
from saq import Worker
from saq.queue.redis import RedisQueue

PROCESSES = 2
CONCURRENCY = 256  # Jobs taken at a time; each costs a waiting task and a connection.
BATCHER = MicroBatcher(GPUS // PROCESSES)


async def reverse(_: dict[str, Any], *, text: str) -> str:
    """One job."""
    return await BATCHER.submit(text)


async def main() -> None:
    """Work until a signal comes."""
    queue = RedisQueue.from_url(os.environ["PEER_REDIS_URL"], max_concurrent_ops=CONCURRENCY)
    await queue.connect()
    await Worker(queue, functions=[reverse], concurrency=CONCURRENCY).start()


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(main())
