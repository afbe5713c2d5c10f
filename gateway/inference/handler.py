"""The handler of an inference request.

`serve` runs the stages of gateway/inference/entry.py and gateway/inference/pipeline.py for all requests that are not on the
fast path. Other transports have procedures of their own over the same stages: jobs (gateway/jobs/submit.py), lines of batches
(gateway/batch_api/calls.py), `/v1/responses` (gateway/translations/response_handlers.py) and gRPC (gateway/grpc/call.py).

A list of inputs is one request per input. All of them are admitted or none. They have one response: if one fails, its
error is the response, and the others are cancelled.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from gateway.api.inference import ApiFormat
from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.http.sse import EventStream
from gateway.inference.call import InferenceCall
from gateway.inference.entry import Entry
from gateway.inference.idempotency import IDEMPOTENT_REPLAYED
from gateway.inference.pending import CustomerMoved, Outcome, ResponseSink
from gateway.inference.pipeline import InferencePipeline, drop_cycles
from gateway.inference.streaming import NewStream, StreamedResponse
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.replies import Reply

Keep = Callable[[Reply], Awaitable[None]]
"""Stores a reply for later reads, before the end of its response is sent. Raises RequestError if that fails."""


class InferenceHandler:
    """The handler of one endpoint. Each endpoint has one API format."""

    def __init__(self, entry: Entry, api_format: ApiFormat) -> None:
        self._entry = entry
        self._api_format = api_format

    async def __call__(self, request: RoutedRequest) -> HttpResponse:
        """Handle one request. Raises RequestError if the caller is unknown; other errors become responses."""
        entry = self._entry
        call = entry.call(self._api_format, request)
        return await entry.answered(call, serve(entry, call, request))


async def serve(entry: Entry, call: InferenceCall, request: RoutedRequest) -> HttpResponse:
    """The response of a call whose caller is known. Raises RequestError."""
    entry.decode(call, await entry.read(call, request))
    return await infer(entry, call)


async def infer(
    entry: Entry, call: InferenceCall, keep: Keep | None = None, new_stream: NewStream = EventStream
) -> HttpResponse:
    """Place the call, admit its requests, wait for their outcomes, and build the response. Raises RequestError.

    A request whose customer has moved is submitted in its new cell.
    """
    cell = ""
    while True:
        pipeline = entry.place(call, cell)
        try:
            if call.body.stream and not call.body.more:
                return await _stream(pipeline, call, keep, new_stream)
            return await _whole(pipeline, call, keep)
        except CustomerMoved as moved:
            cell = moved.cell


async def _whole(pipeline: InferencePipeline, call: InferenceCall, keep: Keep | None) -> HttpResponse:
    """The response with the outputs of all inputs."""
    futures: list[asyncio.Future[Outcome]] = []  # One per pending request.
    first = pipeline.build(call, partial(future_sink, futures))
    pipeline.admit(first, call.large)
    members = first.together or (first,)
    replies: list[Reply] = []
    try:
        for pending, future in zip(members, futures, strict=True):
            reply = await pipeline.reply(call, pending, await future)
            replies.append(reply)
            if keep is not None:
                await keep(reply)
    except Exception as error:
        pipeline.fail_list(members, error.code if isinstance(error, RequestError) else ErrorCode.INTERNAL_ERROR)
        drop_cycles(first)  # The call may continue with others, in another cell.
        raise
    pipeline.leave_all(first)
    response = pipeline.respond(call, members, replies)
    if call.replayed:
        response.headers.append(IDEMPOTENT_REPLAYED)
    return response


async def _stream(
    pipeline: InferencePipeline, call: InferenceCall, keep: Keep | None, new_stream: NewStream
) -> HttpResponse:
    """The stream, once its request is admitted."""
    futures: list[asyncio.Future[Outcome]] = []
    pending = pipeline.build(call, partial(future_sink, futures))
    stream = StreamedResponse(pipeline, call, pending, futures[0], keep=keep, new_stream=new_stream)
    try:
        pipeline.admit(pending, call.large)
        await stream.wait()
    except asyncio.CancelledError:
        stream.cancel()  # The caller leaves the request, for the reason that it knows.
        raise
    except Exception:
        stream.close()
        raise
    return stream.response()


def future_sink(futures: list["asyncio.Future[Outcome]"]) -> ResponseSink:
    """A sink that resolves a new future, which is added to `futures`."""
    future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    futures.append(future)
    return partial(_resolve, future)


def _resolve(future: "asyncio.Future[Outcome]", outcome: Outcome) -> None:
    if not future.done():  # It is cancelled when the connection is lost, before its task runs again.
        future.set_result(outcome)
