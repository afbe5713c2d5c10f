"""The job on SAQ over Redis, front: aiohttp that enqueues a job for each request and hears when it is done.

`Queue.apply` would do both, but it polls for the result each half second; `Queue.listen` is told.
"""
# ruff: noqa: INP001 - a folder of scripts, not a package

import asyncio
import os
import uuid

import uvloop
from aiohttp import web
from reversal import PORT
from saq.job import TERMINAL_STATUSES, Status
from saq.queue.redis import RedisQueue

BACKLOG = 4096
OPERATIONS = 512  # At a time; SAQ's own 20 would make requests wait for each other.
RESULT_TTL_S = 5
ANSWER_S = 10.0
QUEUE = web.AppKey("queue", RedisQueue)


async def infer(request: web.Request) -> web.Response:
    """One request."""
    queue, key, body = request.app[QUEUE], uuid.uuid4().hex, await request.json()
    # Listening begins first, so that no end is missed.
    done = asyncio.ensure_future(queue.listen([key], _is_over, timeout=ANSWER_S))
    await queue.enqueue("reverse", key=key, text=body["input"], ttl=RESULT_TTL_S)
    await done
    job = await queue.job(key)
    if job is None or job.status != Status.COMPLETE:
        raise web.HTTPInternalServerError(text=str(job))
    return web.json_response({"output": job.result})


def _is_over(_: str, status: Status) -> bool:
    return status in TERMINAL_STATUSES


async def make() -> web.Application:
    """The application, connected."""
    app = web.Application()
    app[QUEUE] = RedisQueue.from_url(os.environ["PEER_REDIS_URL"], max_concurrent_ops=OPERATIONS)
    await app[QUEUE].connect()
    app.router.add_post("/inference", infer)
    return app


if __name__ == "__main__":
    uvloop.install()
    web.run_app(make(), host="127.0.0.1", port=PORT, reuse_port=True, backlog=BACKLOG, access_log=None, print=None)
