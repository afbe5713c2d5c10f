"""The response of `POST /v1/responses`, whole and as a stream of typed events.

`OutputItems` makes both: a stream sends the events of its steps, and a whole response is the sum of the same steps. So the
events of a stream always add up to the response that is stored.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from gateway.api.format import InferenceRequest, InferenceResult, TokenUsage, usage
from gateway.api.inference import ApiFormat, completed
from gateway.api.stream_chunks import Chunks
from gateway.http.response import HttpResponse, encode_json
from gateway.translations.chat_changes import CallChange, ChangeReader
from gateway.translations.custom_tools import CUSTOM, custom_input, offered_tools
from gateway.translations.response_document import (
    CachedTokens,
    IncompleteDetails,
    ReasoningTokens,
    ResponseDocument,
    ResponseFault,
    ResponseTokens,
    started,
)
from gateway.translations.response_id import RESPONSE_PREFIX
from gateway.translations.responses import ResponsesRequest, read_responses, renamed
from scheduler.chat_document import DOCUMENT, lines_of
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.replies import Reply

Event = dict[str, Any]

_FAULTS = {
    ErrorCode.INVALID_REQUEST: "invalid_prompt",
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: "context_length_exceeded",
}


class Output(NamedTuple):
    """The output of a model. `finish_reason` is `document` if the text is lines of the model's server."""

    text: str
    finish_reason: str
    tokens: TokenUsage


def output_of(reply: Reply) -> Output:
    """The output of a completed request."""
    return Output(reply.output, reply.finish_reason, usage([reply]))


class OutputItems:
    """The output items, built from the steps of a chat; each step returns its events, which have no number yet.

    A message or reasoning ends when another item begins; calls, which may be continued in any order, at the end.
    """

    def __init__(self, document: ResponseDocument) -> None:
        self.reader = ChangeReader()
        self._hex = document.id.removeprefix(RESPONSE_PREFIX)
        offered = [(str(tool.get("name")), tool, space) for _, tool, space in offered_tools(document.tools)]
        self._custom = {name for name, tool, _ in offered if tool.get("type") == CUSTOM}
        self._namespaces = {name: space for name, _, space in offered if space}
        self._inputs: dict[int, str] = {}  # Item of a call of a custom tool -> its arguments.
        self.items: list[dict[str, Any]] = []
        self._open: int | None = None  # The message or reasoning that is continued.
        self._calls: dict[int, int] = {}  # Index of a call in the chat -> its item.
        self._finish_reason: str | None = None  # Known at the end.

    def text(self, text: str) -> Iterator[Event]:
        """More text of a model without a server behind it."""
        return self._content("output_text", text, [])

    def line(self, line: str) -> Iterator[Event]:
        """A line of a model's server. Raises ValueError for junk."""
        for change in self.reader.changes(line):
            if isinstance(change, CallChange):
                yield from self._call(change)
            elif change.kind == "text":
                sent = change.logprobs
                logprobs = [_logprob(each) for each in _dicts(sent.get("content"))] if isinstance(sent, dict) else []
                in_message = self._open is not None and self.items[self._open]["type"] == "message"
                if change.text or (logprobs and in_message):  # Those of calls have no place in a response.
                    yield from self._content("output_text", change.text, logprobs)
            elif change.kind == "reasoning":
                item = self.items[self._open] if self._open is not None else None
                if item is None or item["type"] != "reasoning":
                    yield from self._close("completed")
                    yield from self._begin("rs", {"type": "reasoning", "summary": [], "content": []})
                    self._open = len(self.items) - 1
                    item = self.items[self._open]
                    yield from self._add_part(item, {"type": "reasoning_text", "text": ""})
                item["content"][-1]["text"] += change.text
                yield {"type": "response.reasoning_text.delta", **self._place(), "delta": change.text}
            else:
                yield from self._content("refusal", change.text, [])

    def end(self, finish_reason: str) -> Iterator[Event]:
        """The end of all items. An output without any has an empty message."""
        self._finish_reason = self.reader.finish_reason if finish_reason == DOCUMENT else finish_reason
        if not self.items:
            yield from self._content("output_text", "", [])
        status = "completed" if self.incomplete is None else "incomplete"
        yield from self._close(status)
        for at in sorted(self._calls.values()):
            item = self.items[at]
            item["status"] = status
            fields = {"item_id": item["id"], "output_index": at}
            if at in self._inputs:
                text = item["input"] = custom_input(self._inputs[at])
                yield {"type": "response.custom_tool_call_input.delta", **fields, "delta": text}
                yield {"type": "response.custom_tool_call_input.done", **fields, "input": text}
            else:
                names = {"name": item["name"], "arguments": item["arguments"]}
                yield {"type": "response.function_call_arguments.done", **fields, **names}
            yield {"type": "response.output_item.done", "output_index": at, "item": _copied(item)}

    @property
    def incomplete(self) -> IncompleteDetails | None:
        """Why the output ends early; None if it does not."""
        if self._finish_reason == "length":
            return IncompleteDetails("max_output_tokens")
        return IncompleteDetails("content_filter") if self._finish_reason == "content_filter" else None

    def _begin(self, prefix: str, item: dict[str, Any]) -> Iterator[Event]:
        at = len(self.items)
        item = {"id": f"{prefix}_{self._hex}_{at}", "status": "in_progress", **item}
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": at, "item": _copied(item)}

    def _content(self, kind: str, text: str, logprobs: list[Any]) -> Iterator[Event]:
        """More text of a message, in its last part if that is of this kind."""
        item = self.items[self._open] if self._open is not None else None
        if item is None or item["type"] != "message":
            yield from self._close("completed")
            yield from self._begin("msg", {"type": "message", "role": "assistant", "content": []})
            self._open = len(self.items) - 1
            item = self.items[self._open]
        if not item["content"] or item["content"][-1]["type"] != kind:
            yield from self._part_done()
            empty = {"text": "", "annotations": [], "logprobs": []} if kind == "output_text" else {"refusal": ""}
            yield from self._add_part(item, {"type": kind, **empty})
        part = item["content"][-1]
        fields = self._place()
        if kind == "refusal":
            part["refusal"] += text
            yield {"type": "response.refusal.delta", **fields, "delta": text}
            return
        part["text"] += text
        part["logprobs"] += logprobs
        if text or logprobs:
            yield {"type": "response.output_text.delta", **fields, "delta": text, "logprobs": logprobs}

    def _add_part(self, item: dict[str, Any], part: dict[str, Any]) -> Iterator[Event]:
        item["content"].append(part)
        yield {"type": "response.content_part.added", **self._place(), "part": _copied(part)}

    def _place(self) -> dict[str, Any]:
        """The place of the last part of the open item."""
        at = self._open or 0
        item = self.items[at]
        return {"item_id": item["id"], "output_index": at, "content_index": max(0, len(item["content"]) - 1)}

    def _part_done(self) -> Iterator[Event]:
        """The end of the last part of the open item, if it has one."""
        item = self.items[self._open or 0]
        if not item["content"]:
            return
        part, fields = item["content"][-1], self._place()
        if part["type"] == "output_text":
            logprobs = part["logprobs"]
            yield {"type": "response.output_text.done", **fields, "text": part["text"], "logprobs": logprobs}
        elif part["type"] == "refusal":
            yield {"type": "response.refusal.done", **fields, "refusal": part["refusal"]}
        else:
            yield {"type": "response.reasoning_text.done", **fields, "text": part["text"]}
        yield {"type": "response.content_part.done", **fields, "part": _copied(part)}

    def _close(self, status: str) -> Iterator[Event]:
        """The end of the open message or reasoning."""
        if self._open is None:
            return
        yield from self._part_done()
        at, self._open = self._open, None
        self.items[at]["status"] = status
        yield {"type": "response.output_item.done", "output_index": at, "item": _copied(self.items[at])}

    def _call(self, call: CallChange) -> Iterator[Event]:
        if call.number not in self._calls:
            yield from self._close("completed")
            at = self._calls[call.number] = len(self.items)
            fields = {"call_id": call.id or f"call_{self._hex}_{at}", "name": call.name}
            if namespace := self._namespaces.get(call.name):
                fields["namespace"] = namespace
            if call.name in self._custom:
                self._inputs[at] = ""
                yield from self._begin("ctc", {"type": "custom_tool_call", **fields, "input": ""})
            else:
                yield from self._begin("fc", {"type": "function_call", **fields, "arguments": ""})
        at = self._calls[call.number]
        item = self.items[at]
        item["name"] = item["name"] or call.name
        if more := call.arguments:
            if at in self._inputs:  # The text in them is known at the end.
                self._inputs[at] += more
                return
            item["arguments"] += more
            place = {"item_id": item["id"], "output_index": at}
            yield {"type": "response.function_call_arguments.delta", **place, "delta": more}


def _dicts(value: Any) -> list[dict[str, Any]]:
    """The objects of a list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _copied(item: dict[str, Any]) -> dict[str, Any]:
    """A copy as it is now, with the lists of its parts: events may be kept while the item grows."""
    content = item.get("content")
    return {**item, "content": [dict(part) for part in content]} if isinstance(content, list) else dict(item)


def _logprob(token: Mapping[str, Any]) -> dict[str, Any]:
    """A token's log probability: `bytes` is null in a chat, but never here."""
    top = [{**each, "bytes": each.get("bytes") or []} for each in _dicts(token.get("top_logprobs"))]
    return {**token, "bytes": token.get("bytes") or [], "top_logprobs": top}


def finished(document: ResponseDocument, items: OutputItems, output: Output) -> ResponseDocument:
    """The response with its output, and the details of tokens that the model's server sent. `items` has ended."""
    counted, tokens = items.reader.usage or {}, output.tokens
    details = [counted.get(f"{part}_tokens_details") for part in ("prompt", "completion")]
    read, written = (each if isinstance(each, dict) else {} for each in details)
    cached = CachedTokens(_count(read.get("cached_tokens")), _count(read.get("cache_write_tokens")))
    reasoned = ReasoningTokens(_count(written.get("reasoning_tokens")))
    return msgspec.structs.replace(
        document,
        status="completed" if items.incomplete is None else "incomplete",
        incomplete_details=items.incomplete,
        output=items.items,
        usage=ResponseTokens(tokens.prompt_tokens, cached, tokens.completion_tokens, reasoned, tokens.total_tokens),
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def output_events(document: ResponseDocument, output: Output) -> Iterator[Event]:
    """The events of an output; the last one has the whole response. Raises ValueError for junk."""
    items = OutputItems(document)
    steps = map(items.line, lines_of(output.text)) if output.finish_reason == DOCUMENT else (items.text(output.text),)
    for step in steps:
        yield from step
    yield from items.end(output.finish_reason)
    yield last_event(finished(document, items, output))


def last_event(document: ResponseDocument) -> Event:
    """The event of a response that has ended. There is none for `cancelled`."""
    return {"type": f"response.{'failed' if document.status == 'cancelled' else document.status}", "response": document}


def whole(document: ResponseDocument, output: Output) -> ResponseDocument:
    """The response with its output. Raises ValueError for junk."""
    (last,) = deque(output_events(document, output), maxlen=1)
    response: ResponseDocument = last["response"]
    return response


def failed(document: ResponseDocument, error: RequestError) -> ResponseDocument:
    """The response with its error; one that was cancelled has none."""
    if error.code is ErrorCode.CANCELLED:
        return msgspec.structs.replace(document, status="cancelled")
    code = _FAULTS.get(error.code, "server_error")
    fault = ResponseFault(code, error.message, error.code.value)
    return msgspec.structs.replace(document, status="failed", error=fault)


def response_to(reply: Reply, model: str, request: InferenceRequest) -> ResponseDocument:
    """The whole response to a completed request, which was read by this format. Raises ValueError for junk."""
    return whole(started(reply.id, model, _own(request)), output_of(reply))


def _own(request: InferenceRequest) -> ResponsesRequest:
    if not isinstance(request, ResponsesRequest):
        raise TypeError("This is a bug: the request was read by another format.")
    return request


def write_responses(result: InferenceResult) -> HttpResponse:
    """Write the response to a completed request."""
    reply = result.replies[0]
    document = response_to(reply, result.model, result.request)
    return completed(reply, encode_json(document), result.latency_ms, result.lines)


def event_bytes(event: Event, number: int) -> bytes:
    """An event as it is sent."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json({**event, "sequence_number": number}))


class ResponseChunks(Chunks):
    """The stream of `/v1/responses`. Increments of a model's server may end within a line."""

    END = b""  # The last event is `response.completed`, or another one with the whole response.

    def __init__(self, request_id: str, model: str, request: InferenceRequest, passed_on: bool) -> None:  # noqa: FBT001
        super().__init__(request_id, model, request)
        self._document = started(request_id, model, _own(request))
        self._items = OutputItems(self._document)
        self._passed_on = passed_on
        self._rest = ""
        self._number = 0

    def opening(self) -> bytes:
        """The response without output."""
        names = ("response.created", "response.in_progress")
        return self._write({"type": name, "response": self._document} for name in names)

    def delta(self, text: str) -> bytes:
        """The events of more text, or of the lines that are complete now."""
        if not self._passed_on:
            return self._write(self._items.text(text))
        *lines, self._rest = (self._rest + text).split("\n")
        return b"".join(self._write(self._items.line(line)) for line in lines if line)

    def closing(self, reply: Reply) -> bytes:
        """The end of all items, and the whole response."""
        ends = self._write(self._items.end(reply.finish_reason))
        document = finished(self._document, self._items, output_of(reply))
        return ends + self._write([last_event(document)])

    def failure(self, response: HttpResponse) -> bytes:
        """The failed response, then the error, for which OpenAI's clients raise an exception."""
        fault = msgspec.json.decode(response.body)["error"]
        document = failed(self._document, RequestError(ErrorCode(fault["code"]), fault["message"]))
        document = msgspec.structs.replace(document, output=self._items.items)
        details = {name: fault[name] for name in ("code", "message", "param")}
        return self._write(
            [{"type": "response.failed", "response": document}, {"type": "error", **details, "error": fault}]
        )

    def _write(self, events: Iterable[Event]) -> bytes:
        written = b""
        for each in events:
            written += event_bytes(each, self._number)
            self._number += 1
        return written


class ResponsesFormat(ApiFormat):
    """The format of `/v1/responses`."""

    def bad_parameters(self, sentence: str) -> RequestError:
        """As ApiFormat, with the names of this format."""
        return renamed(ApiFormat.bad_parameters(self, sentence))


RESPONSES = ResponsesFormat(read_responses, write_responses, flat=True, chunks=ResponseChunks, endpoint="/v1/responses")
