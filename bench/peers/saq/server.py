"""The job on SAQ over Redis, front: aiohttp that enqueues a job for each request and waits for its result."""
# ruff: noqa: INP001 - a folder of scripts, not a package

import os

import uvloop
from aiohttp import web
from reversal import PORT
from saq.queue.redis import RedisQueue

BACKLOG = 4096
OPERATIONS = 512  # At a time; SAQ's own 20 would make requests wait for each other.
RESULT_TTL_S = 5
QUEUE = web.AppKey("queue", RedisQueue)


async def infer(request: web.Request) -> web.Response:
    """One request."""
    body = await request.json()
    output = await request.app[QUEUE].apply("reverse", text=body["input"], ttl=RESULT_TTL_S)
    return web.json_response({"output": output})


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
