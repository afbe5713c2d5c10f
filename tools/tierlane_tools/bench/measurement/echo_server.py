"""The floor of this stack: an aiohttp application that answers with the body it got, and does nothing else.

Started by `tierlane bench`; ends with its standard input, so that it cannot outlive who started it.
"""

import asyncio
import sys

import uvloop
from aiohttp import web

BACKLOG = 4096


async def _answer(request: web.Request) -> web.Response:
    return web.Response(body=await request.read(), content_type="application/json")


async def _serve(port: int) -> None:
    app = web.Application()
    app.router.add_post("/v1/inference", _answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_port=True, backlog=BACKLOG).start()
    print("ready", flush=True)  # noqa: T201  # whoever started it waits for this line
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
