"""A model of a server with the Open Inference Protocol: its probes, and the calls of its requests.

Availability, slots, and the meaning of errors are those of `openai:URL`. A call for several requests that fails because of
one of them is repeated in halves, so that this one fails alone.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import msgspec

from gpu_pool.backends.backend import InvalidOutput, Item, ItemResult
from gpu_pool.backends.generation import named_turns, prompt_of
from gpu_pool.backends.open_inference.joining import Joiner, TensorItem
from gpu_pool.backends.open_inference.model import UNREADABLE, ModelSpec, read_model
from gpu_pool.backends.open_inference.tensors import Mismatch, call_body, read_item, read_outputs
from gpu_pool.backends.openai_endpoint.availability import ABSENT, NAMED_MODELS, PROBE_TIMEOUT_S, SILENT, ProbeResult
from gpu_pool.backends.openai_endpoint.client import CallTimeout, EndpointResponse, NoResponse, ResponseAborted
from gpu_pool.backends.openai_endpoint.endpoint import Endpoint
from gpu_pool.backends.openai_endpoint.errors import (
    KEY_STATUSES,
    NO_KEY,
    Broken,
    CallResult,
    Lost,
    Unreached,
    read_refusal,
)
from gpu_pool.backends.openai_endpoint.messages import Body, traceparent_of
from gpu_pool.backends.openai_endpoint.requests import NO_ROUTE, TOO_SLOW, CallProgress
from gpu_pool.model_process import inputs
from scheduler.errors import ErrorCode
from scheduler.payload import Task

MOST_SENTENCE = 300
"""Characters of a server's sentence that a client gets."""


class _Indexed(msgspec.Struct):
    name: str
    state: str = "READY"


class _ServerError(msgspec.Struct):
    error: str


_index = msgspec.json.Decoder(list[_Indexed])
_error = msgspec.json.Decoder(_ServerError)


class OpenInferenceEndpoint(Endpoint):
    """See `Endpoint`; the address has the server, and the name of the model unless the server has only one."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._spec = ModelSpec()
        self._joiner = Joiner(self._send)

    async def _look(self, before: str) -> ProbeResult:
        try:
            return await self._model(before)
        except CallTimeout:
            return ProbeResult(SILENT)
        except (NoResponse, ResponseAborted, InvalidOutput) as error:
            return ProbeResult(str(error))

    async def _learn(self) -> None:
        """The protocol has no metrics; the number of slots follows from the throughput."""

    async def _model(self, before: str) -> ProbeResult:
        name = self._address.model or before
        if not name:
            ready = [each.name for each in await self._indexed() if each.state == "READY"]
            if len(ready) != 1:
                return await self._unnamed(ready)
            name = ready[0]
        path = f"/models/{quote(name, safe='')}"
        described = await self._get(path)
        if described.status in KEY_STATUSES:
            return ProbeResult(NO_KEY, ours=True)
        if described.status != 200:
            return await self._missing(name)
        ready_status = (await self._get(f"{path}/ready")).status
        if ready_status != 200:
            return ProbeResult(f"The model {name!r} is not loaded: its server answers {ready_status} to GET ready.")
        config = await self._get(f"{path}/config")
        self._spec = spec = read_model(described.body, config.body if config.status == 200 else b"")
        self._joiner.calls, self._joiner.most_rows = spec.calls, spec.most_rows
        return ProbeResult(model=name, tasks=spec.tasks)

    async def _get(self, path: str) -> EndpointResponse:
        return await self._transport.get(self._address.base + path, PROBE_TIMEOUT_S)

    async def _indexed(self) -> list[_Indexed]:
        """The models of the server; none if it does not list them."""
        reply = await self._transport.post("/repository/index", Body(b"{}"), PROBE_TIMEOUT_S)
        with suppress(*UNREADABLE):
            return _index.decode(reply.body) if reply.status == 200 else []
        return []

    async def _unnamed(self, ready: Sequence[str]) -> ProbeResult:
        if ready:
            return ProbeResult(f"The server has several models: select one of {_listed(ready)} by #NAME.", ours=True)
        return await self._loading() or ProbeResult(
            "The server does not list its models: select one by #NAME.", ours=True
        )

    async def _missing(self, name: str) -> ProbeResult:
        """Why there is no such model: absent, or not loaded yet."""
        indexed = await self._indexed()
        state = next((each.state for each in indexed if each.name == name), "")
        if state:
            return ProbeResult(f"The server has not loaded the model {name!r}: {state[:NAMED_MODELS * 8]}.")
        there = f"; it has {_listed([each.name for each in indexed])}" if indexed else ""
        return await self._loading() or ProbeResult(f"The server has no model {name!r}{there}.", ours=True)

    async def _loading(self) -> ProbeResult | None:
        """Why the server has no models yet; None if it is ready."""
        ready = await self._get("/health/ready")
        if ready.status in KEY_STATUSES:
            return ProbeResult(NO_KEY, ours=True)
        if ready.status in ABSENT:
            fault = f"There is no Open Inference server at {self._address.base}: it has no /health/ready."
            return ProbeResult(fault, ours=True)
        fault = f"The server is loading its models: it answers {ready.status} to GET /health/ready."
        return None if ready.status == 200 else ProbeResult(fault)

    def _rejection(self, item: Item) -> ItemResult | None:
        if rejected := inputs.rejection(item):
            return rejected
        if item.task not in self._probed.tasks:
            return ItemResult(NO_ROUTE[item.task], 0, ErrorCode.INVALID_REQUEST)
        return None

    async def _call(self, item: Item, progress: CallProgress, *, again: bool) -> CallResult:
        """A request that has failed is sent again alone."""
        try:
            tensors = read_item(self._spec, prompt_of(item, named_turns), item.parameters)
        except Mismatch as error:
            return ItemResult(str(error), 0, ErrorCode.INVALID_REQUEST)
        request = TensorItem(item, tensors)
        if again or not self._spec.most_rows or not tensors.rows:
            return (await self._send([request]))[0]
        return await self._joiner.run(request)

    async def _send(self, group: Sequence[TensorItem]) -> Sequence[CallResult]:
        """A result for each request, which are of one kind."""
        found = await self._once(group)
        if isinstance(found, list):
            return found
        one = isinstance(found, ItemResult) and found is not TOO_SLOW
        if len(group) == 1 or not (one or (isinstance(found, Lost) and found.by_input)):
            return [found] * len(group)
        middle = len(group) // 2
        return [*await self._send(group[:middle]), *await self._send(group[middle:])]

    async def _once(self, group: Sequence[TensorItem]) -> list[ItemResult] | CallResult:
        items, tensors = [each.item for each in group], [each.tensors for each in group]
        left_s = max(item.until for item in items) - self._clock()
        route = f"/models/{quote(self._probed.model, safe='')}/infer"
        try:
            if left_s <= 0:
                return TOO_SLOW
            reply = await self._transport.post(route, Body(call_body(tensors)), left_s, traceparent_of(items))
            if reply.status == 200:
                return read_outputs(reply.body, tensors, [item.task is Task.EMBED for item in items])
        except CallTimeout:
            return TOO_SLOW
        except NoResponse as error:
            return Lost(str(error)) if error.sent else Unreached(str(error))
        except ResponseAborted as error:
            return Lost(str(error))
        except InvalidOutput as error:
            return ItemResult(str(error), 0, ErrorCode.INVALID_OUTPUT)
        return read_failure(reply, items[0])


def read_failure(reply: EndpointResponse, item: Item) -> CallResult:
    """The meaning of a response other than 200. A client gets the server's sentence about its tensors."""
    found = read_refusal(reply.status, reply.headers, reply.body, item.parameters, time.time())
    sentence = ""
    with suppress(*UNREADABLE):
        sentence = " ".join(_error.decode(reply.body).error[:MOST_SENTENCE].split())
    if "unknown model" in sentence:  # Triton answers 400 for a model that it does not have.
        return Broken("The server does not have the model.")
    if isinstance(found, ItemResult) and found.error_code == ErrorCode.INVALID_REQUEST and sentence:
        return ItemResult(f"The model does not accept this input: {sentence}", 0, ErrorCode.INVALID_REQUEST)
    return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED_MODELS])
