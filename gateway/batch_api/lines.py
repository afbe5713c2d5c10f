"""Lines of batch files: splitting an input file, checking it, and writing lines of the output and error file.

Faults of the file itself fail the batch before a line runs: invalid JSON, a missing or duplicate `custom_id`, another method or
URL. A body that its endpoint rejects fails its line only.
"""

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from gateway.http.body.strict_json import check_duplicates
from gateway.http.response import encode_json
from gateway.http.validation import validation_error
from scheduler.errors import HTTP, ErrorCode, RequestError
from scheduler.request_id import PREFIX

MAX_CUSTOM_ID = 512
MAX_FAULTS = 100
SLICE_BYTES = 16_384  # Of a file that are split at a time: they may be as many lines.
ENVELOPE_BYTES = 4096
"""Bytes that a line may have more than its body may have."""

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_BLANK = b" \t\r\n\xef\xbb\xbf\x1a"  # A byte order mark may precede the first line, and Ctrl-Z follow the last one.
_UTF_16 = "The file is in UTF-16: save it as UTF-8."
_COMPRESSED = "The file is compressed: upload it uncompressed."
_ARRAY = (
    "The file is a JSON array: write each request on a line of its own, without brackets and commas around it (JSONL)."
)
_BEGINNINGS = (
    ((b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{"), "invalid_encoding", _UTF_16),
    ((b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd"), "invalid_encoding", _COMPRESSED),  # gzip, zip, zstd
    ((b"[",), "invalid_json_line", _ARRAY),
)
"""How files begin whose lines all have the same fault, which is reported once."""

_SLASHES = re.compile("/{2,}")
_URL = re.compile(r"(?:https?:/[^/?#\s]+)?(?:/openai)?(?:/v1)?(/[a-z/]*[a-z])/?(?:\?[^#\s]*)?")  # With single slashes.
DEPLOYMENTS = "/deployments/"

NOT_RUN: Mapping[str, str] = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed because the batch was cancelled.",
}
"""Codes of lines that were not run, with their messages."""

MAX_RUNS = 5
"""Failed runs after which a line fails with an error of MAYBE_ITS_OWN."""

MAYBE_ITS_OWN = frozenset({ErrorCode.GPU_TIMEOUT, ErrorCode.INVALID_OUTPUT, ErrorCode.INTERNAL_ERROR})
"""Errors that an input may cause each time."""


def endpoint_of(url: str) -> str:
    """The endpoint that a client means; "" if there is none.

    Clients write its path without the version (Azure's), with a slash or a query at its end, or behind a scheme and a host,
    which do not matter: the line runs here.
    """
    found = _URL.fullmatch(_SLASHES.sub("/", url))
    endpoint = f"/v1{found[1]}" if found else ""
    return endpoint if endpoint in ENDPOINTS else ""


class InputLine(msgspec.Struct, frozen=True):
    """A line of an input file. Other members are ignored, as by OpenAI's service."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str | None = None  # POST.


class LineFault(msgspec.Struct, gc=False):
    """A fault of an input file, in OpenAI's form."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class LineResponse(msgspec.Struct, gc=False):
    """The response of a line: its status and body."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, gc=False):
    """Why a line was not run."""

    code: str
    message: str


class OutputLine(msgspec.Struct, gc=False):
    """A line of an output or error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None


_decoder = msgspec.json.Decoder(InputLine)


class FileLine(NamedTuple):
    """A line with its number, from 1. `raw` is empty if it is longer than allowed."""

    number: int
    raw: bytes


class LineSplitter:
    """Splits chunks of a file into lines, without blank ones. A line that is too long is not kept."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max = max_line_bytes
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._number = 0

    def feed(self, chunk: bytes) -> Iterator[FileLine]:
        """The lines that end in this chunk."""
        *whole, rest = chunk.split(b"\n")
        for piece in whole:
            yield from self._line(piece)
        self._keep(rest)

    def end(self) -> Iterator[FileLine]:
        """The last line, if it has no line break."""
        if self._rest_bytes:
            yield from self._line(b"")

    def _keep(self, piece: bytes) -> None:
        self._rest_bytes += len(piece)
        if self._rest_bytes <= self._max:
            self._rest.append(piece)
        else:
            self._rest.clear()

    def _line(self, piece: bytes) -> Iterator[FileLine]:
        self._keep(piece)
        self._number += 1
        raw, too_long = b"".join(self._rest), self._rest_bytes > self._max
        self._rest, self._rest_bytes = [], 0
        raw = raw.strip(_BLANK)
        if raw or too_long:
            yield FileLine(self._number, raw)


class LineSource:
    """The lines of an input file, in slices. `read` returns a chunk by its number, None after the last one."""

    def __init__(self, read: Callable[[int], Awaitable[bytes | None]], max_line_bytes: int) -> None:
        self._read = read
        self._splitter = LineSplitter(max_line_bytes)
        self._next = 0
        self._chunk = b""
        self._at = 0
        self._done = False

    async def lines(self) -> list[FileLine] | None:
        """The lines that end in the next slice; None at the end of the file."""
        if self._done:
            return None
        if self._at >= len(self._chunk):
            chunk = await self._read(self._next)
            self._next, self._chunk, self._at = self._next + 1, chunk or b"", 0
            if chunk is None:
                self._done = True
                return list(self._splitter.end())
        piece = self._chunk[self._at : self._at + SLICE_BYTES]
        self._at += SLICE_BYTES
        return list(self._splitter.feed(piece))


def read_line(raw: bytes) -> InputLine:
    """Decode a line of a valid file. Raises msgspec.MsgspecError."""
    return _decoder.decode(raw)


class FileCheck:
    """Checks the lines of an input file one by one. `faults` has the first ones, `total` the number of lines."""

    def __init__(self, endpoint: str, max_lines: int, max_line_bytes: int) -> None:
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._max_line_bytes = max_line_bytes
        self._seen: dict[str, int] = {}
        self._is_unreadable = False
        self.faults: list[LineFault] = []
        self.total = 0

    @property
    def full(self) -> bool:
        """Whether more lines make no difference."""
        return self._is_unreadable or len(self.faults) >= MAX_FAULTS or self.total > self._max_lines

    def add(self, line: FileLine) -> None:
        """Check a line."""
        self.total += 1
        if self.full:
            return
        fault = self._fault(line)
        if fault is not None:
            fault.line = line.number
            self.faults.append(fault)

    def end(self) -> list[LineFault]:
        """The faults of the whole file."""
        if self.total > self._max_lines:
            message = f"The file has more than {self._max_lines} lines: split it into several batches."
            return [LineFault("too_many_lines", message)]
        if not self.total:
            return [LineFault("empty_file", "The file has no lines: each line is one request as a JSON object.")]
        return self.faults

    def _fault(self, line: FileLine) -> LineFault | None:
        if not line.raw:
            return LineFault("line_too_long", f"A line must not be longer than {self._max_line_bytes} bytes.")
        if self.total == 1:
            for beginnings, code, message in _BEGINNINGS:
                if line.raw.startswith(beginnings):
                    self._is_unreadable = True
                    return LineFault(code, message)
        try:
            found = _decoder.decode(line.raw)
            check_duplicates(line.raw)
        except msgspec.ValidationError as error:
            problem = validation_error(str(error), InputLine.__struct_fields__)
            return LineFault("invalid_line", problem.message.replace("The body", "The line"), problem.param)
        except RequestError as error:
            return LineFault("invalid_line", error.message.replace("The body", "The line"), error.param)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return LineFault("invalid_json_line", "This line is not a JSON object.")
        return self._wrong(found, line.number)

    def _wrong(self, found: InputLine, number: int) -> LineFault | None:
        if not 1 <= len(found.custom_id) <= MAX_CUSTOM_ID:
            return LineFault(
                "invalid_custom_id", f"`custom_id` must have 1 to {MAX_CUSTOM_ID} characters.", "custom_id"
            )
        if found.method is not None and found.method.upper() != "POST":
            return LineFault("invalid_method", "`method` must be POST.", "method")
        if endpoint_of(found.url) != self._endpoint:
            model = " Name the model in `body`, not as a deployment." if DEPLOYMENTS in found.url else ""
            return LineFault("mismatched_url", f"`url` must be the batch's endpoint, {self._endpoint}.{model}", "url")
        if bytes(memoryview(found.body)[:1]) != b"{":
            return LineFault("invalid_body", "`body` must be an object: the body of a request to `url`.", "body")
        first = self._seen.setdefault(found.custom_id, number)
        if first != number:
            message = f"The `custom_id` of this line is that of line {first}: each must be unique in the file."
            return LineFault("duplicate_custom_id", message, "custom_id")
        return None


def completed_line(request_id: str, custom_id: str, body: bytes) -> bytes:
    """The line of a completed request, with the body of its response."""
    return _written(request_id, custom_id, LineResponse(200, request_id, msgspec.Raw(body)), None)


def failed_line(request_id: str, custom_id: str, status: int, body: bytes) -> bytes:
    """The line of a request that was rejected for its input or failed, with the body of the error response."""
    return _written(request_id, custom_id, LineResponse(status, request_id, msgspec.Raw(body)), None)


def line_not_run(request_id: str, custom_id: str, code: str) -> bytes:
    """The line of a request that was not run; `code` is one of NOT_RUN."""
    return _written(request_id, custom_id, None, LineError(code, NOT_RUN[code]))


def _written(request_id: str, custom_id: str, response: LineResponse | None, error: LineError | None) -> bytes:
    return encode_json(OutputLine(f"batch_{PREFIX}{request_id.removeprefix(PREFIX)}", custom_id, response, error))


def is_final(error: RequestError, runs: int) -> bool:
    """Whether a line fails with this error, after `runs` failed runs: it is its input's.

    After limits, and after lack or loss of capacity (429, 503), it is tried again until the batch expires.
    """
    if error.code in MAYBE_ITS_OWN:
        return runs >= MAX_RUNS
    status = HTTP[error.code].status
    return status < 500 and status != 429 and error.code is not ErrorCode.CANCELLED
