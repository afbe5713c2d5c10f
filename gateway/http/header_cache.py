"""The cache of parsed headers: most clients repeat their headers, except for the API key and the Content-Length.

A request with cached headers is not parsed again; parsing is the larger part of reading it. It must be complete, and its
headers must equal the cached ones byte for byte, except for those two values, which are read anew. A connection keeps
its last headers with the key (`RepeatedHead`), of which only the length is read anew. Everything else is
left to the parser, so that there is one definition of valid HTTP.
"""

from typing import Any, NamedTuple

from aiohttp import StreamReader
from aiohttp.http import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy

from scheduler.bounded_dict import BoundedDict

ApiFormat = Any
"""The format of a path (gateway/api/), which this package only passes on."""

MAX_ENTRIES = 1024
MAX_HEADER_BYTES = 4096
"""With the parsed objects, the cache uses 10 MB at most, usually one."""

_END = b"\r\n\r\n"
_AUTHORIZATION = (b"\r\nAuthorization: ", b"\r\nauthorization: ")
_LENGTH = (b"\r\nContent-Length: ", b"\r\ncontent-length: ")
_MAX_DIGITS = 12


class CompleteRequest(NamedTuple):
    """One request. `template`: its headers without the two values. `authorization`: as the parser returns it.

    `head`: all that is in front of the body, with the digits of the Content-Length from `length_at` to `length_end`.
    """

    template: bytes
    authorization: str
    body: bytes
    head: bytes
    length_at: int
    length_end: int

    @property
    def path(self) -> str:
        """The target of the request line."""
        return self.template.split(b" ", 2)[1].decode("latin-1")


class RepeatedHead:
    """The headers of the last request of a connection, for requests with the same ones except for the Content-Length.

    `headers`: without Authorization and Content-Length. `authorization`: the values of that header. `api_format`: of its path.
    """

    __slots__ = (
        "_body_bytes",
        "_head",
        "_head_bytes",
        "_length_at",
        "_length_end",
        "api_format",
        "authorization",
        "headers",
    )

    def __init__(self, whole: CompleteRequest, headers: CIMultiDictProxy[str], api_format: ApiFormat) -> None:
        self.headers = headers
        self.api_format = api_format
        self.authorization = (whole.authorization,)
        self._head = whole.head
        self._head_bytes = len(whole.head)
        self._length_at = whole.length_at
        self._length_end = whole.length_end
        self._body_bytes = len(whole.body)

    def body_of(self, data: bytes) -> bytes | None:
        """The body, if the data is one complete request with these headers."""
        if data.startswith(self._head):
            body = data[self._head_bytes :]
            return body if len(body) == self._body_bytes else None
        if not data.startswith(self._head[: self._length_at]):
            return None
        length_end = data.find(b"\r", self._length_at)
        digits, rest = data[self._length_at : length_end], self._head[self._length_end :]
        if not digits.isdigit() or len(digits) > _MAX_DIGITS or not data.startswith(rest, length_end):
            return None
        body = data[length_end + len(rest) :]
        return body if body and len(body) == int(digits) else None


def split_request(data: bytes) -> CompleteRequest | None:
    """The parts of data that may be one complete request with a body and both headers in their usual form; else None.

    The template shows the places of the two values, since neither can contain the end of a line.
    """
    end = data.find(_END, 0, MAX_HEADER_BYTES)
    if end < 0:
        return None
    key, length = _value_at(data, end, _AUTHORIZATION), _value_at(data, end, _LENGTH)
    if key < 0 or length < 0:
        return None
    key_end, length_end, body = data.find(b"\r", key), data.find(b"\r", length), data[end + len(_END) :]
    digits, authorization = data[length:length_end], data[key:key_end]
    if not body or not digits.isdigit() or len(digits) > _MAX_DIGITS or int(digits) != len(body):
        return None
    if not authorization.isascii() or not (text := authorization.decode()).isprintable():
        return None
    if key < length:
        template = data[:key] + data[key_end:length] + data[length_end:end]
    else:
        template = data[:length] + data[length_end:key] + data[key_end:end]
    return CompleteRequest(template, text.strip(" "), body, data[: end + len(_END)], length, length_end)


def _value_at(data: bytes, end: int, names: tuple[bytes, bytes]) -> int:
    """The index of the value of the first header with one of these spellings; -1 if there is none."""
    for name in names:
        at = data.find(name, 0, end)
        if at >= 0:
            return at + len(name)
    return -1


def is_header_block(data: bytes) -> bool:
    """Whether the data is one block of headers without a body behind it."""
    return data.endswith(_END) and data.find(_END) == len(data) - len(_END)


def is_complete(data: bytes, message: object, payload: StreamReader) -> bool:
    """Whether a message that was parsed from `data`, at a boundary, is complete and uses all of the data."""
    if not isinstance(message, RawRequestMessage) or not payload.is_eof():
        return False
    if message.upgrade or message.chunked or message.should_close:
        return False
    end = data.find(_END)
    return end >= 0 and end + len(_END) + payload.total_bytes == len(data)


class HeaderCache:
    """Parsed headers by template, without the two values, so that no customer's key is shared."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._headers: BoundedDict[bytes, CIMultiDictProxy[str]] = BoundedDict(max_entries)

    def __len__(self) -> int:
        return len(self._headers)

    def get(self, whole: CompleteRequest) -> CIMultiDictProxy[str] | None:
        """The headers except Authorization and Content-Length; None if they are not cached."""
        return self._headers.get(whole.template)

    def add(self, whole: CompleteRequest, headers: CIMultiDictProxy[str]) -> CIMultiDictProxy[str] | None:
        """Cache parsed headers; the oldest entry is removed if the cache is full. Returns the cached ones, if any.

        Only for authenticated requests: otherwise any client could fill the cache.
        """
        if (
            headers.getall("Authorization", []) != [whole.authorization]
            or len(headers.getall("Content-Length", [])) != 1
        ):
            return None
        cached = CIMultiDict(headers)
        del cached["Authorization"], cached["Content-Length"]
        self._headers[whole.template] = kept = CIMultiDictProxy(cached)
        return kept
