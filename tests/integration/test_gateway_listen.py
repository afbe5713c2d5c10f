"""How a gateway accepts connections."""

import asyncio
import socket

import pytest
import uvloop
from aiohttp import web

from gateway.http.server import ACCEPTS, listen

CLIENTS = 200


async def turns_until_accepted() -> tuple[int, int]:
    """Of connections that came in one moment: how many were accepted, and within how many turns of the loop."""
    server = web.Server(lambda _: web.Response())  # type: ignore[arg-type]  # nothing is asked
    runner = web.ServerRunner(server)
    await runner.setup()
    port = await listen(runner, "127.0.0.1", 0, 1024)
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(CLIENTS)]
    turns = 0
    while len(server.connections) < CLIENTS and turns < 10 * CLIENTS:
        await asyncio.sleep(0)
        turns += 1
    accepted = len(server.connections)
    for client in clients:
        client.close()
    await runner.cleanup()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    return accepted, turns


def test_many_connections_are_accepted_in_few_turns_of_the_loop() -> None:
    """A loop that is busy keeps nobody waiting for his connection; once it ended, the port is closed."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        accepted, turns = runner.run(turns_until_accepted())

    assert accepted == CLIENTS
    assert turns <= 2 * CLIENTS / ACCEPTS
