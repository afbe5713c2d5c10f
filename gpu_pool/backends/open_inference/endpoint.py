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

from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.backends.generation import named_turns, prompt_of
from gpu_pool.backends.open_inference.joining import Joiner, TensorItem
from gpu_pool.backends.open_inference.model import UNREADABLE, ModelSpec, read_model
from gpu_pool.backends.open_inference.tensors import Mismatch, call_body, read_item, read_outputs
from gpu_pool.backends.openai_endpoint.client import CALL_FAILURES, EndpointResponse
from gpu_pool.backends.openai_endpoint.endpoint import Endpoint
from gpu_pool.backends.openai_endpoint.engine_load import EngineLoad
from gpu_pool.backends.openai_endpoint.errors import KEY_STATUSES, NO_KEY, CallResult, Lost, read_refusal
from gpu_pool.backends.openai_endpoint.faults import EndpointFault, FaultCause
from gpu_pool.backends.openai_endpoint.messages import Body, traceparent_of
from gpu_pool.backends.openai_endpoint.probe import (
    ABSENT,
    NAMED_MODELS,
    PROBE_TIMEOUT_S,
    ProbeResult,
    is_redirect,
    unexpected,
)
from gpu_pool.backends.openai_endpoint.requests import NO_ROUTE, TOO_SLOW, CallProgress, failure_of
from gpu_pool.model_process import inputs
from scheduler.errors import ErrorCode
from scheduler.payload import Task

MOST_STATE = 40
"""Characters of a model's state."""


class _Indexed(msgspec.Struct):
    name: str
    state: str = "READY"


_index = msgspec.json.Decoder(list[_Indexed])


class OpenInferenceEndpoint(Endpoint):
    """See `Endpoint`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._model_path = f"/models/{quote(self._address.model, safe='')}"
        self._spec = ModelSpec()
        self._joiner = Joiner(self._send)

    async def _look(self, before: str) -> ProbeResult:  # noqa: ARG002 - the model has a name
        described = await self._get(self._model_path)
        if described.status in KEY_STATUSES:
            return ProbeResult(NO_KEY, ours=True)
        if is_redirect(described.status):
            return unexpected(described.status, "GET /models")
        if described.status != 200:
            return await self._missing()
        status = (await self._get(f"{self._model_path}/ready")).status
        if status != 200:
            unloaded = f"The model {self._address.model!r} is not loaded: its server answers {status} to GET ready."
            return ProbeResult(EndpointFault(unloaded, FaultCause.LOADING))
        config = await self._get(f"{self._model_path}/config")
        self._spec = spec = read_model(described.body, config.body if config.status == 200 else b"")
        self._joiner.calls, self._joiner.most_rows = spec.calls, spec.most_rows
        return ProbeResult(model=self._address.model, tasks=spec.tasks)

    async def _learn(self) -> None:
        """The protocol has no metrics."""

    async def read_load(self) -> EngineLoad | None:
        """As many slots as fill the joined calls and one that waits here; None without joined calls: the throughput decides."""
        slots = (self._spec.calls + 1) * self._spec.most_rows
        return EngineLoad(self.policy.in_flight, 0, slots, None, "joined calls") if slots else None

    async def _get(self, path: str) -> EndpointResponse:
        return await self._transport.get(self._address.base + path, PROBE_TIMEOUT_S)

    async def _missing(self) -> ProbeResult:
        """Why the server does not describe the model: it is absent, or not loaded yet."""
        ready = (await self._get("/health/ready")).status
        if ready in ABSENT:
            wrong = f"{self._address.base} is no Open Inference server: it has no /health/ready."
            return ProbeResult(EndpointFault(wrong, FaultCause.WRONG_SERVER), ours=True)
        reply = await self._transport.post("/repository/index", Body(b"{}"), PROBE_TIMEOUT_S)
        states: dict[str, str] = {}
        with suppress(*UNREADABLE):  # Not all servers list their models.
            states = {each.name: each.state for each in _index.decode(reply.body)}
        name = self._address.model
        if name in states:
            unloaded = f"The server has not loaded the model {name!r}: {states[name][:MOST_STATE]}."
            return ProbeResult(EndpointFault(unloaded, FaultCause.LOADING))
        if ready != 200:
            loading = f"The server is loading its models: it answers {ready} to GET /health/ready."
            return ProbeResult(EndpointFault(loading, FaultCause.LOADING))
        others = f"; it has {', '.join(list(states)[:NAMED_MODELS])}" if states else ""
        return ProbeResult(
            EndpointFault(f"The server has no model {name!r}{others}.", FaultCause.MODEL_MISSING), ours=True
        )

    def _rejection(self, item: Item) -> ItemResult | None:
        unsupported = ItemResult(NO_ROUTE[item.task], 0, ErrorCode.INVALID_REQUEST)
        return inputs.rejection(item) or (None if item.task in self._probed.tasks else unsupported)

    async def _call(self, item: Item, progress: CallProgress, *, again: bool) -> CallResult:  # noqa: ARG002 - for streams
        """A request that has failed is sent again alone."""
        try:
            tensors = read_item(self._spec, prompt_of(item, named_turns), item.parameters)
        except Mismatch as error:
            return ItemResult(str(error), 0, ErrorCode.INVALID_REQUEST)
        request = TensorItem(item, tensors)
        joined = self._spec.most_rows and tensors.rows and not again
        return await self._joiner.run(request) if joined else (await self._send([request]))[0]

    async def _send(self, group: Sequence[TensorItem]) -> Sequence[CallResult]:
        """A result for each request, which are of one kind."""
        items, tensors = [each.item for each in group], [each.tensors for each in group]
        left_s = max(item.until for item in items) - self._clock()
        try:
            body, trace = Body(call_body(tensors)), traceparent_of(items)
            reply = await self._transport.post(f"{self._model_path}/infer", body, max(0.0, left_s), trace)
            if reply.status == 200:
                return read_outputs(reply.body, tensors, [item.task is Task.EMBED for item in items])
            failure = read_failure(reply, items[0], self._spec)
        except CALL_FAILURES as error:
            failure = failure_of(error)
        of_one = isinstance(failure, ItemResult) and failure is not TOO_SLOW
        if len(group) == 1 or not (of_one or (isinstance(failure, Lost) and failure.by_input)):
            return [failure] * len(group)
        middle = len(group) // 2
        return [*await self._send(group[:middle]), *await self._send(group[middle:])]


def read_failure(reply: EndpointResponse, item: Item, spec: ModelSpec) -> CallResult:
    """The meaning of a response other than 200. The client of a rejected input gets the model's inputs."""
    found = read_refusal(reply.status, reply.headers, reply.body, lambda: item.parameters, time.time())
    if isinstance(found, ItemResult) and found.error_code == ErrorCode.INVALID_REQUEST and spec.inputs:
        known = ", ".join(map(str, spec.inputs))
        return ItemResult(f"The model does not accept this input. Its inputs are: {known}.", 0, found.error_code)
    return found
