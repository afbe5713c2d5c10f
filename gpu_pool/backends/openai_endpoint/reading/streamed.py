"""The output of a streamed response, from its events. No I/O.

Only an event with an error fails it. An event that carries no choice, usage or error has no effect, whatever it is.
"""

from typing import Any

import msgspec

from gpu_pool.backends.backend import ItemResult
from gpu_pool.backends.openai_endpoint.reading.answers import EndpointMessage, ReportedError, counted, finish
from gpu_pool.backends.openai_endpoint.reading.event_stream import END, StreamEvent
from gpu_pool.backends.openai_endpoint.reading.tolerant import TolerantReader, has_escaped_halves
from scheduler.chat_document import DOCUMENT, LineHead, ServerUsage, line_of, output_line, read_head, text_of

ERROR = b"error"
"""The name of an event with an error; its data may be of any form."""


class StreamedPiece(msgspec.Struct, gc=False):
    """Text added to a completion or message."""

    index: int = 0
    text: str | None = None
    delta: EndpointMessage | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, gc=False):
    """One event's data. The one with the tokens has no choices."""

    choices: list[StreamedPiece] = []
    usage: ServerUsage | None = None
    error: Any = None
    object: Any = None


_chunk = msgspec.json.Decoder(Chunk)


class StreamedCompletion:
    """The streamed output so far. `over`: the server has sent a finish reason or the end mark."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reason: str | None = None
        self._usage: ServerUsage | None = None
        self._usage_length = 0  # The length of the output when the tokens were counted.
        self._reader = TolerantReader()
        self.length = 0
        """Characters so far."""
        self.ended = False
        """Nothing more will come, not even tokens."""
        self.skipped = 0
        """Events that were no JSON object."""

    @property
    def over(self) -> bool:
        return self.ended or self._reason is not None

    def add(self, event: StreamEvent) -> str:
        """The text that the event adds, possibly "". Raises ReportedError for an error of the server before the end."""
        data = event.data.strip()
        if data == END or not data:
            self.ended = self.ended or data == END
            return ""
        usage, text = self._usage, None
        if event.name != ERROR and not self._reader.is_waiting:
            text = self._exact(data)
        if text is None:
            # An error, or an event that differs from OpenAI's format.
            document = self._reader.read(data)
            if event.name == ERROR or (document and (document.get("error") or document.get("object") == "error")):
                if self.over:
                    return ""
                raise ReportedError({"message": data.decode("utf-8", "replace")} if document is None else document)
            text = None if document is None else self._converted(document)
        if text is None:
            self.skipped += 1
            return ""
        if text:
            self._texts.append(text)
            self.length += len(text)
        if usage is not self._usage:
            self._usage_length = self.length
        return text

    def _exact(self, data: bytes) -> str | None:
        """The text of an event in OpenAI's format; None for any other."""
        try:
            chunk = _chunk.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return None if chunk.error or chunk.object == "error" else self._piece(chunk)

    def _converted(self, document: dict[str, Any]) -> str | None:
        for choice in document["choices"]:
            if isinstance(choice.get("delta"), dict):
                choice["delta"]["content"] = text_of(choice["delta"].get("content"))
        try:
            return self._piece(msgspec.convert(document, Chunk))
        except (msgspec.MsgspecError, RecursionError):
            return None

    def _piece(self, chunk: Chunk) -> str:
        self._note(chunk.usage)
        if not chunk.choices:
            return ""
        piece = chunk.choices[0]
        self._reason = piece.finish_reason or self._reason
        return (piece.delta.content if piece.delta is not None else piece.text) or ""

    def _note(self, usage: ServerUsage | None) -> None:
        """The last usage counts. Zeros are none: some servers send them until the end."""
        if any(counted(usage)):
            self._usage = usage

    def uncounted(self, output: str) -> str:
        """The part of the output so far whose tokens the server has not counted."""
        return output[self._usage_length :] if counted(self._usage)[1] else output

    def result(self) -> ItemResult:
        """The output so far, with the tokens that the server counted last."""
        read, written = counted(self._usage)
        return ItemResult("".join(self._texts), read + written, "", written, finish(self._reason))


class StreamedDocument(StreamedCompletion):
    """The lines of a request that is passed on whole: one for each event that has choices or tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._open: set[int] = set()  # Choices without a finish reason.
        self._finished: set[int] = set()

    @property
    def over(self) -> bool:
        return self.ended or (self._reason is not None and not self._open)

    def _exact(self, data: bytes) -> str | None:
        """The line; None for an event that is an error, or differs from OpenAI's format."""
        if has_escaped_halves(data):
            return None
        try:
            head, line = read_head(data), output_line(data)
        except ValueError:
            return None
        return None if head.is_error else self._line(head, line)

    def _converted(self, document: dict[str, Any]) -> str | None:
        try:
            return self._line(msgspec.convert(document, LineHead), line_of(document))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None

    def _line(self, head: LineHead, line: str) -> str:
        self._note(head.usage)
        for choice in head.choices:
            if not choice.finish_reason:  # Some servers send "" until the end.
                self._open |= {choice.index} - self._finished
            else:
                self._open.discard(choice.index)
                self._finished.add(choice.index)
                self._reason = choice.finish_reason
        return line if head.choices or head.usage is not None else ""

    def result(self) -> ItemResult:
        """The lines so far, with the tokens that the server counted last."""
        return msgspec.structs.replace(super().result(), finish_reason=DOCUMENT)
