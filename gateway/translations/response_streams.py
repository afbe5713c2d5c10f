"""Streams of background responses, from what is stored: `create` with `stream: true`, and GET with `stream=true`.

The events of a response are always the same and have the same numbers, so that a client that lost its connection continues
after the last number that it has read, at any gateway. The text is sent as a whole at the end of the job. While streams
wait, one task of the gateway asks for all of them which jobs still run.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial

import msgspec

from gateway.http.error_responses import fault_of
from gateway.http.errors import RejectionError
from gateway.http.sse import EventStream
from gateway.translations.response_document import ResponseDocument
from gateway.translations.response_id import request_id_of
from gateway.translations.response_output import Event, event_bytes, last_event, output_events
from gateway.translations.response_store import ResponseStore, document_of, first_document, output_of_job
from ledger.responses import ResponseRow
from scheduler.errors import ErrorCode, RequestError
from scheduler.fault_log import log_fault

MOST_STREAMS = 64
"""Open streams of one customer at a gateway."""

TOO_MANY = f"This account has {MOST_STREAMS} open streams of stored responses: close some of them first."
RETRY_MS = 1000
LEAVING = "This gateway is shutting down: continue with `starting_after`."
POLL_S = 0.25
PAGE = 512
MOST_FAILURES = 40
"""Failed polls in a row, 10 s, after which all streams end with the error."""


class JobEnds:
    """Waits for the ends of jobs. `running` returns those of its responses whose jobs have not ended."""

    def __init__(self, running: Callable[[Sequence[str]], Awaitable[set[str]]], every_s: float = POLL_S) -> None:
        self._running = running
        self._every_s = every_s
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._polling: asyncio.Task[None] | None = None
        self._closed = False

    async def wait(self, response_id: str) -> None:
        """Return when the job of a response has ended. Raises RequestError if that cannot be known."""
        if self._closed:
            raise RequestError(ErrorCode.DRAINING, LEAVING)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        same = self._waiting.setdefault(response_id, [])
        same.append(future)
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll(), name="ends of background responses")
        try:
            await future
        finally:
            same.remove(future)
            if not same and self._waiting.get(response_id) is same:
                del self._waiting[response_id]

    def close(self) -> None:
        """End all waits, because the gateway shuts down."""
        self._closed = True
        if self._polling is not None:
            self._polling.cancel()
        self._end(list(self._waiting), RequestError(ErrorCode.DRAINING, LEAVING))

    async def _poll(self) -> None:
        """Ask while anything waits."""
        failures = 0
        try:
            while self._waiting:
                await asyncio.sleep(self._every_s)
                try:
                    ids = list(self._waiting)
                    for at in range(0, len(ids), PAGE):
                        page = ids[at : at + PAGE]
                        running = await self._running(page)
                        self._end([each for each in page if each not in running], None)
                    failures = 0
                except RequestError as error:
                    failures += 1
                    if failures >= MOST_FAILURES:
                        self._end(list(self._waiting), error)
        except Exception as error:  # noqa: BLE001  # the streams must not wait forever
            log_fault("ends of background responses are not known", error)
            self._end(list(self._waiting), RequestError(ErrorCode.INTERNAL_ERROR))
        finally:
            self._polling = None

    def _end(self, ids: Iterable[str], error: RequestError | None) -> None:
        for future in [each for response_id in ids for each in self._waiting.pop(response_id, ())]:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


def opening_events(document: ResponseDocument) -> Iterator[Event]:
    """The events before there is an output, of a response that is queued."""
    for name, status in (("created", "queued"), ("queued", "queued"), ("in_progress", "in_progress")):
        yield {"type": f"response.{name}", "response": msgspec.structs.replace(document, status=status)}


def closing_events(row: ResponseRow) -> Iterator[Event]:
    """The events of a job that has ended. Raises ValueError for junk."""
    output = output_of_job(row)
    if output is None:
        yield last_event(document_of(row))
    else:
        yield from output_events(first_document(row), output)


class ResponseStreams:
    """The streams of all customers. `count` is that of the open ones of each."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self.ends = JobEnds(store.running)
        self.count: Counter[str] = Counter()

    def check_limit(self, customer_id: str) -> None:
        """Raises RequestError `rate_limit_exceeded` if the customer has too many open streams."""
        if self.count[customer_id] >= MOST_STREAMS:
            raise RejectionError(ErrorCode.RATE_LIMIT_EXCEEDED, TOO_MANY, RETRY_MS)

    def of_new(self, document: ResponseDocument, customer_id: str) -> EventStream:
        """The stream of a response that was just queued."""
        return EventStream(partial(self._play, document, customer_id, -1, None))

    def of_stored(self, row: ResponseRow, after: int = -1) -> EventStream:
        """The stream of a background response, without the events up to number `after`."""
        ended = None if row.open and not row.lost else row
        return EventStream(partial(self._play, first_document(row), row.customer_id, after, ended))

    async def _play(
        self, document: ResponseDocument, customer_id: str, after: int, ended: ResponseRow | None, stream: EventStream
    ) -> None:
        """Write the stream. Raises ConnectionError if the client left."""
        stream.start()
        self.count[customer_id] += 1
        number, request_id = 0, request_id_of(document.id) or ""
        try:
            for event in opening_events(document):
                number = _send(stream, event, number, after)
            if ended is None:
                await self.ends.wait(document.id)
                ended = await self._store.find(document.id, customer_id)
            for event in closing_events(ended):
                number = _send(stream, event, number, after)
                await stream.drain()  # Several events have the whole text.
        except RequestError as error:
            _fail(stream, error, request_id, max(after, number - 1))
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001  # every error ends the stream with an event
            log_fault("stream of a stored response failed", error, request_id=request_id)
            _fail(stream, RequestError(ErrorCode.INTERNAL_ERROR), request_id, max(after, number - 1))
        else:
            stream.end()
        finally:
            self.count[customer_id] -= 1
            if not self.count[customer_id]:
                del self.count[customer_id]


def _send(stream: EventStream, event: Event, number: int, after: int) -> int:
    """Send an event, unless the client has it. Returns the number of the next one."""
    if number > after:
        stream.send(event_bytes(event, number))
    return number + 1


def _fail(stream: EventStream, error: RequestError, request_id: str, number: int) -> None:
    """Send the error, for which OpenAI's clients raise an exception. It has the number after which the client continues."""
    fault = fault_of(error, request_id)
    details = {"code": fault.code, "message": fault.message, "param": fault.param}
    stream.send(event_bytes({"type": "error", **details, "error": fault}, number))
    stream.abort = True
