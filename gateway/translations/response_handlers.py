"""The handlers of `/v1/responses`: create, count, retrieve, list the items of the input, cancel, delete.

A response is created by the stages of every request (gateway/inference/handler.py), and one with `background: true` by
those of a job (gateway/jobs/submit.py): its row is open until the end of its job is written, by the same statement.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import msgspec

from gateway.api.inference import ApiFormat
from gateway.http.error_responses import ErrorResponses
from gateway.http.problem_details import wants_problem
from gateway.http.response import Headers, HttpResponse, encode_json
from gateway.http.router import RoutedRequest
from gateway.http.sse import EventStream
from gateway.http.validation import invalid
from gateway.inference.handler import AwaitedCall, CountCall, serve
from gateway.inference.idempotency import IDEMPOTENT_REPLAYED
from gateway.inference.pending import PendingRequest
from gateway.inference.pipeline import InferencePipeline
from gateway.jobs.service import Jobs
from gateway.jobs.submit import JobCall, JobSubmitHandler
from gateway.translations.response_body import Item, ResponseBody, read_body, read_prompt
from gateway.translations.response_document import ResponseDocument, started
from gateway.translations.response_id import request_id_of, response_id
from gateway.translations.response_output import RESPONSES, response_to
from gateway.translations.response_store import ResponseStore, document_of, first_document, items_of
from gateway.translations.response_streams import ResponseStreams
from gateway.translations.responses import ResponsesRequest, input_items, request_of
from ledger.catalog.snapshot import Identity
from ledger.responses import NewResponse, ResponseRow
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.admission import Verdict
from scheduler.protocol.replies import Reply
from scheduler.request_id import PREFIX

PAGE, MOST = 20, 100
"""Items of a page of `input_items`: by default, and at most."""

LONGEST_NUMBER = 9
"""Digits of `starting_after`."""

DELETED = "The response of this Idempotency-Key was deleted: send another key to create one."
OTHER_KIND = "This Idempotency-Key is of a response without `background: true`."
INPUT_TOKENS = replace(RESPONSES, chunks=None, endpoint="/v1/responses/input_tokens")

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


class ResponseItems(msgspec.Struct, gc=False):
    """A page of the items of an input."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class ResponseHandlers:
    """The handlers. `jobs` are those of the gateway's own pool, which know those of the others."""

    def __init__(self, inference: InferencePipeline, jobs: Jobs, faults: ErrorResponses, store: ResponseStore) -> None:
        self._inference = inference
        self.jobs = jobs
        self._faults = faults
        self.store = store
        self.streams = ResponseStreams(store)

    async def close(self) -> None:
        """End all streams, and close the connections to PostgreSQL."""
        self.streams.ends.close()
        await self.store.close()

    async def count(self, request: RoutedRequest) -> HttpResponse:
        """Count the tokens of an input, free of charge. Raises RequestError if the caller is unknown."""
        return await serve(InputTokensCall(self, self._inference, request, INPUT_TOKENS), request)

    async def create(self, request: RoutedRequest) -> HttpResponse:
        """Create a response. Raises RequestError if the caller is unknown."""
        serving = self.jobs.serving
        call = ResponsesCall(self, self._inference, request)
        if serving is None:
            return await serve(call, request)
        serving.submit.under_way += 1
        try:
            return await serve(call, request)
        finally:
            serving.submit.under_way -= 1

    async def retrieve(self, call: RoutedRequest) -> HttpResponse:
        """Return the response. Raises RequestError if the caller is unknown."""
        return await self._respond(call, self._retrieve)

    async def input_items(self, call: RoutedRequest) -> HttpResponse:
        """Return the items of the input. Raises RequestError if the caller is unknown."""
        return await self._respond(call, self._input_items)

    async def cancel(self, call: RoutedRequest) -> HttpResponse:
        """Cancel a background response if it is open, and return it. Raises RequestError if the caller is unknown."""
        return await self._respond(call, self._cancel)

    async def delete(self, call: RoutedRequest) -> HttpResponse:
        """Delete the response, and return it; cancel it if it is open. Raises RequestError if the caller is unknown."""
        return await self._respond(call, self._delete)

    async def _respond(
        self, call: RoutedRequest, operation: Callable[[RoutedRequest, Identity], Awaitable[object]]
    ) -> HttpResponse:
        identity = self._inference.identify(call)
        limits = self._inference.limits_of(identity).headers(identity)
        try:
            document = await operation(call, identity)
        except RequestError as error:
            return self._faults.answer(error, call.request_id, limits, problem=wants_problem(call.headers))
        headers: Headers = [("x-request-id", call.request_id), *limits]
        if isinstance(document, EventStream):
            document.headers = headers
            return document
        return HttpResponse.of(200, document, [*headers, ("Cache-Control", "no-store")])

    async def _retrieve(self, call: RoutedRequest, identity: Identity) -> ResponseDocument | EventStream:
        after = _first_number(call.request.query)
        if after is not None:
            self.streams.check_limit(identity.customer_id)
        row = await self.store.find(call.tail, identity.customer_id)
        if after is None or call.request.method == "HEAD":
            return document_of(row)
        if not first_document(row).background:
            raise invalid("stream", "Only a response with `background: true` has a stream here: leave `stream` out.")
        return self.streams.of_stored(row, after)

    async def _input_items(self, call: RoutedRequest, identity: Identity) -> ResponseItems:
        query = call.request.query
        limit, order = query.get("limit", str(PAGE)), query.get("order", "desc")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MOST):
            raise invalid("limit", f"`limit` must be 1 to {MOST}.")
        if order not in ("asc", "desc"):
            raise invalid("order", "`order` must be `asc` or `desc`.")
        items = items_of(await self.store.find(call.tail, identity.customer_id))
        return page_of(items, int(limit), query.get("after"), newest_first=order == "desc")

    async def _cancel(self, call: RoutedRequest, identity: Identity) -> ResponseDocument:
        row = await self.store.find(call.tail, identity.customer_id)
        document = document_of(row)
        if not document.background:
            raise invalid(None, "Only a response with `background: true` can be cancelled.")
        if not await self._end(row, identity):
            return document
        return document_of(await self.store.find(call.tail, identity.customer_id))

    async def _delete(self, call: RoutedRequest, identity: Identity) -> ResponseDocument:
        _first_number(call.request.query)  # Only checked: the description of both methods is one.
        row = await self.store.find(call.tail, identity.customer_id)
        await self._end(row, identity)
        await self.store.delete(row.id, identity.customer_id)
        return msgspec.structs.replace(document_of(row), deleted=True)

    async def _end(self, row: ResponseRow, identity: Identity) -> bool:
        """Cancel the job of a response. Returns whether it was open."""
        job_id = request_id_of(row.id)
        if not row.open or row.lost or job_id is None:
            return False
        await self.jobs.result.cancel_job(job_id, identity)
        return True


def _first_number(query: Mapping[str, str]) -> int | None:
    """The number after which a stream begins, -1 for all events; None for no stream. Raises RequestError."""
    stream, after = query.get("stream", "false"), query.get("starting_after")
    if stream not in ("true", "false"):
        raise invalid("stream", "`stream` must be `true` or `false`.")
    if after is not None and stream == "false":
        raise invalid("starting_after", "`starting_after` needs `stream=true`.")
    if after is not None and not (after.isascii() and after.isdigit() and len(after) <= LONGEST_NUMBER):
        raise invalid("starting_after", "`starting_after` must be the `sequence_number` of an event.")
    return None if stream == "false" else int(after or -1)


def page_of(items: list[Item], limit: int, after: str | None, *, newest_first: bool) -> ResponseItems:
    """The page after the item `after`. Raises RequestError if there is no such item."""
    ordered = items[::-1] if newest_first else items
    if after is not None:
        place = next((at for at, item in enumerate(ordered) if item.get("id") == after), None)
        if place is None:
            raise RequestError(ErrorCode.NOT_FOUND, "`after` must be the id of an item of this response.", "after")
        ordered = ordered[place + 1 :]
    page = ordered[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return ResponseItems(page, first, last, len(ordered) > limit)


def stored_items(body: ResponseBody, request_id: str) -> bytes:
    """The items of the input as they are stored, each with an id."""
    name = request_id.removeprefix(PREFIX)
    items = [
        {**item, "id": str(item.get("id") or f"{_PREFIXES[item['type']]}_{name}_in{at}")}
        for at, item in enumerate(input_items(body))
    ]
    return encode_json(items)


class ResponsesCall(AwaitedCall):
    """The creation of one response."""

    __slots__ = ("handlers", "history", "original", "request")

    original: ResponseBody  # Set by `read`.

    def __init__(
        self,
        handlers: ResponseHandlers,
        pipeline: InferencePipeline,
        request: RoutedRequest,
        api_format: ApiFormat = RESPONSES,
    ) -> None:
        super().__init__(pipeline, api_format, request)
        self.handlers = handlers
        self.request = request
        self.history: list[Item] = []  # The items of earlier responses.

    async def read(self, request: RoutedRequest) -> bytes:
        """The body. Finds the response that it continues. Raises RequestError that names the field."""
        raw = await super().read(request)
        original = self.original = self.original_of(raw)
        previous = original.previous_response_id
        if original.store is not False or previous is not None:
            self.handlers.store.check()
        if previous is not None:
            input_items(original)
            self._check_limits()
            store, bound = self.handlers.store, self.pipeline.largest().input_bytes
            self.history = await store.history(previous, self.identity.customer_id, bound)
        return raw

    def original_of(self, raw: bytes) -> ResponseBody:
        """The decoded body. Raises RequestError that names the field."""
        return read_body(raw)

    def _check_limits(self) -> None:
        """Raises RequestError if admission would reject the request by a limit of its customer, as far as is known here."""
        pipeline, identity = self.pipeline, self.identity
        limits = pipeline.customer_limits
        if self.key is not None or limits.factor(identity) < 1:  # A replay is not charged; reduced limits are counted.
            return
        verdict = pipeline.rejections.verdict_of(identity, limits.limits(identity), pipeline.clock())
        if verdict is not None:
            raise limits.rejection_error(identity, verdict, base_limit_allows=False)

    def successor(self) -> AwaitedCall:
        """A job, with `background: true`. Raises RequestError if this gateway serves no jobs."""
        if not self.original.background:
            return self
        serving = self.handlers.jobs.serving
        if serving is None:
            raise invalid("background", "This gateway has no background responses: leave `background` out.")
        if self.original.stream:
            self.handlers.streams.check_limit(self.identity.customer_id)
        return BackgroundCall(serving.submit, self)

    def decode(self, raw: bytes) -> ResponsesRequest:  # noqa: ARG002  # decoded before
        """The chat of the body that `read` has decoded. Raises RequestError that names the field."""
        history, self.history = self.history, []  # It may be large, and the chat has it now.
        return request_of(self.original, history, self.pipeline.largest().input_bytes)

    async def keep(self, reply: Reply) -> None:
        """Store the response. Raises RequestError if it cannot be stored; then the audit has that error."""
        pending = self.pending
        if self.original.store is False or pending is None:
            return
        document = encode_json(response_to(reply, pending.submission.model, self.body))
        try:
            await self.handlers.store.insert(self.stored(reply.id, document))
        except RequestError as error:
            self.pipeline.fail_list([pending], error.code)
            raise

    def stored(self, request_id: str, document: bytes, *, is_open: bool = False) -> NewResponse:
        """The row of the response."""
        return NewResponse(
            request_id,
            response_id(request_id),
            self.identity.customer_id,
            self.original.previous_response_id,
            document,
            stored_items(self.original, request_id),
            is_open,
        )


class InputTokens(msgspec.Struct, gc=False):
    """The response body of `/v1/responses/input_tokens`."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class InputTokensCall(CountCall, ResponsesCall):
    """The count of the tokens of one input, with the conversation that it continues."""

    __slots__ = ()

    def original_of(self, raw: bytes) -> ResponseBody:
        """The decoded body. Raises RequestError that names the field."""
        return read_prompt(raw)

    def counted(self, tokens: int) -> InputTokens:
        """The response body."""
        return InputTokens(tokens)


class BackgroundCall(JobCall):
    """The creation of a response by a job. `first` has read the body."""

    __slots__ = ("_first",)

    def __init__(self, handler: JobSubmitHandler, first: ResponsesCall) -> None:
        super().__init__(handler, first.request, RESPONSES)
        self._first = first
        self.identity, self.started, self.key = first.identity, first.started, first.key

    def decode(self, raw: bytes) -> ResponsesRequest:
        """The chat. Raises RequestError that names the field."""
        return self._first.decode(raw)

    async def store(self, pending: PendingRequest) -> None:
        """Store the open response, then the job, since a fast job may end at once. Raises RequestError."""
        stored = False
        row = self._first.stored(pending.id, encode_json(self._queued(pending.id)), is_open=True)
        try:
            await self._first.handlers.store.insert(row)
            stored = True
        finally:
            if not stored:
                self._handler.parts.cancellations.add(pending.id, ErrorCode.NO_CAPACITY)
        await super().store(pending)

    async def known_job(self, verdict: Verdict) -> HttpResponse:
        """The response as it is now, of an Idempotency-Key that was used before."""
        handlers = self._first.handlers
        row = await handlers.store.known(response_id(verdict.stored_id), self.identity.customer_id)
        if row is None or row.lost:  # Its job is being stored, or the gateway crashed before that.
            return await super().known_job(verdict)
        if not row.document:
            raise RequestError(ErrorCode.NOT_FOUND, DELETED)
        self.pipeline.customer_limits.judged(self.identity, self._pending_requests[0].submission, verdict)
        if self._first.original.stream:
            if not first_document(row).background:
                raise RequestError(ErrorCode.IDEMPOTENCY_KEY_REUSED, OTHER_KIND)
            response = self._with_headers(verdict, verdict.stored_id, handlers.streams.of_stored(row))
        else:
            response = self._with_headers(verdict, verdict.stored_id, HttpResponse.of(200, document_of(row)))
        response.headers.append(IDEMPOTENT_REPLAYED)
        return response

    def accepted(self, verdict: Verdict, task_id: str) -> HttpResponse:
        """Record the job as accepted and return its response, which is queued."""
        document, first = self._queued(task_id), self._first
        if first.original.stream:
            stream = first.handlers.streams.of_new(document, self.identity.customer_id)
            return self._with_headers(verdict, task_id, stream)
        return self._with_headers(verdict, task_id, HttpResponse.of(200, document))

    def _with_headers(self, verdict: Verdict, task_id: str, response: HttpResponse) -> HttpResponse:
        """Record the job as accepted, and add the headers of its response."""
        self.pipeline.events.accepted(RESPONSES.endpoint, task_id, self.identity, self._pending_requests[0])
        response.headers = [("x-request-id", task_id), *self.pipeline.customer_limits.headers(self.identity, verdict)]
        return response

    def _queued(self, request_id: str) -> ResponseDocument:
        body = self.body
        if not isinstance(body, ResponsesRequest):
            raise TypeError("This is a bug: the request was read by another format.")
        return started(request_id, self._pending_requests[0].submission.model, body, "queued")
