"""A test server with the Open Inference Protocol, in its own thread, with injectable faults."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from endpoint_stand_in import _abort


def tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    """A tensor of a model's metadata."""
    return {"name": name, "datatype": datatype, "shape": list(shape)}


TEXTS = [tensor("text", "BYTES", -1)]
ROWS = [tensor("x", "FP32", -1, 3)]


@dataclass
class OpenInferenceStandIn:
    """Serves the model `name`. Its outputs are those of `compute`; by default each text reversed, each row of numbers doubled.

    `fault(body)` names the fault of a call: a status, "stall" or "reset"; "" for none. `state`: of the model in the index.
    """

    name: str = "model-1"
    inputs: list[dict[str, Any]] = field(default_factory=lambda: TEXTS)
    outputs: list[dict[str, Any]] = field(default_factory=lambda: TEXTS)
    config: dict[str, Any] | None = None
    others: list[str] = field(default_factory=list)
    state: str = "READY"
    lists: bool = True
    api_key: str = ""
    slow_s: float = 0.0
    compute: Callable[[dict[str, Any]], list[dict[str, Any]]] | None = None
    fault: Callable[[dict[str, Any]], str] = lambda body: ""
    sentence: str = "It went wrong."
    silent: bool = False
    instead: tuple[int, str] | None = None
    """Status and body of every response."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    aborted: int = 0
    port: int = 0
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def app(self) -> web.Application:
        app = web.Application(client_max_size=16 << 20, middlewares=[self._guarded])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v2/health/ready", self._health)
        app.router.add_get("/v2/models/{name}", self._metadata)
        app.router.add_get("/v2/models/{name}/ready", self._metadata)
        app.router.add_get("/v2/models/{name}/config", self._config)
        app.router.add_post("/v2/models/{name}/infer", self._infer)
        app.router.add_post("/v2/repository/index", self._index)
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.silent:
            await asyncio.sleep(60)
        if self.instead:
            return web.Response(status=self.instead[0], text=self.instead[1], content_type="text/html")
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "no"}, status=401)
        wanted = request.match_info.get("name")
        if wanted and (wanted != self.name or self.state != "READY"):
            return web.json_response({"error": "Model not found"}, status=404)
        response: web.StreamResponse = await handler(request)
        return response

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.state == "READY" else 503)

    async def _metadata(self, request: web.Request) -> web.Response:
        document = {
            "name": self.name,
            "versions": ["1"],
            "platform": "",
            "inputs": self.inputs,
            "outputs": self.outputs,
        }
        return web.json_response(document)

    async def _config(self, request: web.Request) -> web.Response:
        return web.json_response(self.config, status=200 if self.config else 404)

    async def _index(self, request: web.Request) -> web.Response:
        names = [(self.name, self.state), *((other, "READY") for other in self.others)]
        if not self.lists:
            raise web.HTTPNotFound
        return web.json_response([{"name": name, "state": state} for name, state in names])

    async def _infer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(body)
        fault = self.fault(body)
        try:
            await asyncio.sleep(60 if fault == "stall" else self.slow_s)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        if fault == "reset":
            return _abort(request)
        if fault:
            return web.json_response({"error": self.sentence}, status=int(fault))
        outputs = (self.compute or doubled)(body)
        return web.json_response({"model_name": self.name, "outputs": outputs})


def doubled(body: dict[str, Any]) -> list[dict[str, Any]]:
    """An output for each input, with reversed texts and doubled numbers."""
    return [
        {**each, "data": [value[::-1] if isinstance(value, str) else value * 2 for value in each["data"]]}
        for each in body["inputs"]
    ]
