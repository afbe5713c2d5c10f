"""A stand-in for the gateway, for tests of the bench: it answers as a test tells it to, and counts."""

import uuid
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

KEYS = {"enterprise": "tl_e_x", "paid": "tl_p_x", "free": "tl_f_x"}
Behaviour = Callable[[int, str, web.Request], Awaitable[web.Response]]


def reversed_answer(text: str) -> web.Response:
    body = {"request_id": f"req_{uuid.uuid4().hex}", "output": text[::-1], "metadata": {}}
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def error_answer(status: int, code: str) -> web.Response:
    return web.json_response({"error": {"message": "No.", "code": code}}, status=status)


class StandIn:
    """Answers each request by `behaviour(number, input, request)`, number from 1 in order of arrival."""

    def __init__(self) -> None:
        self.behaviour: Behaviour = self.obey
        self.number = 0
        self.keys: list[str] = []
        self.connections: set[object] = set()
        self.url = ""

    async def obey(self, number: int, text: str, request: web.Request) -> web.Response:
        return reversed_answer(text)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = (await request.json())["input"]
        self.number += 1
        self.keys.append(request.headers["Authorization"].removeprefix("Bearer "))
        self.connections.add(request.transport)
        return await self.behaviour(self.number, text, request)
