"""The handlers of `/v1/responses`: create, count, retrieve, list the items of the input, cancel, delete.

A response is created by the stages of every request (gateway/inference/handler.py), and one with `background: true` by
those of a job (gateway/jobs/submit.py): its row is open until the end of its job is written, by the same statement.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, Literal

import msgspec

from gateway.http.error_responses import ErrorResponses
from gateway.http.problem_details import wants_problem
from gateway.http.response import Headers, HttpResponse, encode_json
from gateway.http.router import RoutedRequest
from gateway.http.sse import EventStream
from gateway.http.validation import invalid
from gateway.inference.call import InferenceCall
from gateway.inference.entry import Entry
from gateway.inference.handler import infer
from gateway.inference.pending import PendingRequest
from gateway.inference.token_count import token_count
from gateway.jobs.results import JobResultHandler
from gateway.jobs.service import Jobs, JobServing
from gateway.jobs.submit import AcceptedJob, JobOptions, JobSubmitHandler, accepted_headers
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


def handler(
    operation: Callable[["ResponseHandlers", RoutedRequest, Identity], Awaitable[object]],
) -> Callable[["ResponseHandlers", RoutedRequest], Awaitable[HttpResponse]]:
    """The handler of an operation on a stored response. Raises RequestError if the caller is unknown."""

    @wraps(operation)
    async def handle(self: "ResponseHandlers", call: RoutedRequest) -> HttpResponse:
        identity = self._entry.authenticator.identify(call)
        limits = self._entry.limits_of(identity).headers(identity)
        try:
            document = await operation(self, call, identity)
        except RequestError as error:
            return self._faults.answer(error, call.request_id, limits, problem=wants_problem(call.headers))
        headers: Headers = [("x-request-id", call.request_id), *limits]
        if isinstance(document, EventStream):
            document.headers = headers
            return document
        return HttpResponse.of(200, document, [*headers, ("Cache-Control", "no-store")])

    return handle


class ResponseHandlers:
    """The handlers. `submit` and `results`: those of jobs; `own`: the jobs of the gateway's own pool."""

    def __init__(
        self,
        entry: Entry,
        *,
        own: Jobs,
        submit: JobSubmitHandler,
        results: JobResultHandler,
        faults: ErrorResponses,
        store: ResponseStore,
    ) -> None:
        self._entry = entry
        self._own = own
        self._submit = submit
        self._results = results
        self._faults = faults
        self.store = store
        self.streams = ResponseStreams(store)

    async def close(self) -> None:
        """End all streams, and close the connections to PostgreSQL."""
        self.streams.ends.close()
        await self.store.close()

    async def count(self, request: RoutedRequest) -> HttpResponse:
        """Count the tokens of an input, free of charge. Raises RequestError if the caller is unknown."""
        call = self._entry.call(INPUT_TOKENS, request)
        return await self._entry.answered(call, self._count(call, request))

    async def _count(self, call: InferenceCall, request: RoutedRequest) -> HttpResponse:
        raw = await self._entry.read(call, request)
        original = read_prompt(raw)
        call.body = request_of(original, await self._history(call, original), self._entry.largest().input_bytes)
        return token_count(self._entry, call, InputTokens)

    async def create(self, request: RoutedRequest) -> HttpResponse:
        """Create a response. Raises RequestError if the caller is unknown."""
        creation = ResponseCreation(self._entry.call(RESPONSES, request), self.store, self.streams)
        with self._own.submission():
            return await self._entry.answered(creation.call, self._create(creation, request))

    async def _create(self, creation: "ResponseCreation", request: RoutedRequest) -> HttpResponse:
        entry, call = self._entry, creation.call
        raw = await entry.read(call, request)
        original = creation.original = read_body(raw)
        history = await self._history(call, original)
        size = len(raw)
        del raw  # It may be large.
        if original.background:
            if self._own.serving is None:
                raise invalid("background", "This gateway has no background responses: leave `background` out.")
            if original.stream:
                self.streams.check_limit(call.identity.customer_id)
        entry.accept(call, request_of(original, history, entry.largest().input_bytes), size)
        del history
        if original.background:
            return await self._submit.submit(call, JobOptions(), creation)
        return await infer(entry, call, None if original.store is False else creation.keep)

    async def _history(self, call: InferenceCall, original: ResponseBody) -> list[Item]:
        """The items of the responses that this one continues. Raises RequestError that names the field."""
        previous = original.previous_response_id
        if original.store is not False or previous is not None:
            self.store.check()
        if previous is None:
            return []
        input_items(original)
        # Rejected here if admission would reject the request by a limit of its customer, as far as is known here. A replay
        # is not charged; reduced limits are counted.
        pipeline, identity = self._entry.own, call.identity
        limits = pipeline.customer_limits
        if call.key is None and limits.factor(identity) >= 1:
            verdict = pipeline.rejections.verdict_of(identity, limits.limits(identity), pipeline.clock())
            if verdict is not None:
                raise limits.rejection_error(identity, verdict, base_limit_allows=False)
        return await self.store.history(previous, identity.customer_id, self._entry.largest().input_bytes)

    @handler
    async def retrieve(self, call: RoutedRequest, identity: Identity) -> ResponseDocument | EventStream:
        """Return the response."""
        after = _first_number(call.request.query)
        if after is not None:
            self.streams.check_limit(identity.customer_id)
        row = await self.store.find(call.tail, identity.customer_id)
        if after is None or call.request.method == "HEAD":
            return document_of(row)
        if not first_document(row).background:
            raise invalid("stream", "Only a response with `background: true` has a stream here: leave `stream` out.")
        return self.streams.of_stored(row, after)

    @handler
    async def input_items(self, call: RoutedRequest, identity: Identity) -> ResponseItems:
        """Return the items of the input."""
        query = call.request.query
        limit, order = query.get("limit", str(PAGE)), query.get("order", "desc")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MOST):
            raise invalid("limit", f"`limit` must be 1 to {MOST}.")
        if order not in ("asc", "desc"):
            raise invalid("order", "`order` must be `asc` or `desc`.")
        items = items_of(await self.store.find(call.tail, identity.customer_id))
        return page_of(items, int(limit), query.get("after"), newest_first=order == "desc")

    @handler
    async def cancel(self, call: RoutedRequest, identity: Identity) -> ResponseDocument:
        """Cancel a background response if it is open, and return it."""
        row = await self.store.find(call.tail, identity.customer_id)
        document = document_of(row)
        if not document.background:
            raise invalid(None, "Only a response with `background: true` can be cancelled.")
        if not await self._end(row, identity):
            return document
        return document_of(await self.store.find(call.tail, identity.customer_id))

    @handler
    async def delete(self, call: RoutedRequest, identity: Identity) -> ResponseDocument:
        """Delete the response, and return it; cancel it if it is open."""
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
        await self._results.cancel_job(job_id, identity)
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


class InputTokens(msgspec.Struct, gc=False):
    """The response body of `/v1/responses/input_tokens`."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ResponseCreation(AcceptedJob):
    """The creation of one response: what is stored of it, and the responses of a background one."""

    original: ResponseBody  # Set once the body was decoded.

    def __init__(self, call: InferenceCall, store: ResponseStore, streams: ResponseStreams) -> None:
        self.call = call
        self._store = store
        self._streams = streams

    async def keep(self, reply: Reply) -> None:
        """Store the response. Raises RequestError if it cannot be stored; then the audit has that error."""
        call = self.call
        if call.pending is None or call.pipeline is None:
            return
        document = encode_json(response_to(reply, call.pending.submission.model, call.body))
        try:
            await self._store.insert(self._row(reply.id, document))
        except RequestError as error:
            call.pipeline.fail_list([call.pending], error.code)
            raise

    def _row(self, request_id: str, document: bytes, *, is_open: bool = False) -> NewResponse:
        return NewResponse(
            request_id,
            response_id(request_id),
            self.call.identity.customer_id,
            self.original.previous_response_id,
            document,
            stored_items(self.original, request_id),
            is_open,
        )

    async def before_job(self, jobs: JobServing, call: InferenceCall, pending: PendingRequest) -> None:
        """Store the open response, since a fast job may end at once. Raises RequestError if that fails."""
        stored = False
        try:
            await self._store.insert(
                self._row(pending.id, encode_json(_queued(call, pending, pending.id)), is_open=True)
            )
            stored = True
        finally:
            if not stored:
                jobs.cancellations.add(pending.id, ErrorCode.NO_CAPACITY)

    async def known(
        self, jobs: JobServing, call: InferenceCall, pending: PendingRequest, verdict: Verdict
    ) -> HttpResponse:
        """The response as it is now, of an Idempotency-Key that was used before."""
        row = await self._store.known(response_id(verdict.stored_id), call.identity.customer_id)
        if row is None or row.lost:  # Its job is being stored, or the gateway crashed before that.
            return await super().known(jobs, call, pending, verdict)
        if not row.document:
            raise RequestError(ErrorCode.NOT_FOUND, DELETED)
        jobs.pipeline.customer_limits.judged(call.identity, pending.submission, verdict)
        if not self.original.stream:
            response = HttpResponse.of(200, document_of(row))
        elif first_document(row).background:
            response = self._streams.of_stored(row)
        else:
            raise RequestError(ErrorCode.IDEMPOTENCY_KEY_REUSED, OTHER_KIND)
        response.headers += _headers(jobs, call, pending, verdict, verdict.stored_id)
        return response

    def accepted(
        self, jobs: JobServing, call: InferenceCall, pending: PendingRequest, verdict: Verdict, task_id: str
    ) -> HttpResponse:
        """Record the job as accepted and return its response, which is queued."""
        document = _queued(call, pending, task_id)
        if self.original.stream:
            response: HttpResponse = self._streams.of_new(document, call.identity.customer_id)
        else:
            response = HttpResponse.of(200, document)
        response.headers += _headers(jobs, call, pending, verdict, task_id)
        return response


def _headers(jobs: JobServing, call: InferenceCall, pending: PendingRequest, verdict: Verdict, task_id: str) -> Headers:
    return [("x-request-id", task_id), *accepted_headers(jobs.pipeline, call, pending, verdict, task_id)]


def _queued(call: InferenceCall, pending: PendingRequest, request_id: str) -> ResponseDocument:
    if not isinstance(call.body, ResponsesRequest):
        raise TypeError("This is a bug: the request was read by another format.")
    return started(request_id, pending.submission.model, call.body, "queued")
