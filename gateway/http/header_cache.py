"""Heads that were parsed before: a client sends the same one again and again, but for its key and the length of its body.

Such a request is taken past the parser, whose work is the larger part of reading a request. It must be whole, and but for
these two values its head must be, byte for byte, one that the parser has read; both values are read anew each time.
What is the least out of the ordinary is left to the parser, which is the one judge of what HTTP is.
"""

from collections import OrderedDict
from typing import NamedTuple

from aiohttp import StreamReader
from aiohttp.http import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy

MOST_HEADS = 1024
MOST_HEAD_BYTES = 4096
"""So many of at most this size are kept: with the objects that the headers are, ten megabytes at most, mostly one."""

_END = b"\r\n\r\n"
_KEY = (b"\r\nAuthorization: ", b"\r\nauthorization: ")
_LENGTH = (b"\r\nContent-Length: ", b"\r\ncontent-length: ")
_MOST_DIGITS = 12


class CompleteRequest(NamedTuple):
    """One request and nothing else. `shape`: its head without the two values. `authorization`: as the parser gives it."""

    shape: bytes
    authorization: str
    body: bytes


def taken_apart(data: bytes) -> CompleteRequest | None:
    """What came, where it may be one whole request with a body and has the two headers in their usual form; else None.

    Without its two values a head says where they stood: neither of them can hold the end of a line.
    """
    end = data.find(_END, 0, MOST_HEAD_BYTES)
    if end < 0:
        return None
    key, length = _value_at(data, end, _KEY), _value_at(data, end, _LENGTH)
    if key < 0 or length < 0:
        return None
    key_end, length_end, body = data.find(b"\r", key), data.find(b"\r", length), data[end + len(_END) :]
    digits, authorization = data[length:length_end], data[key:key_end]
    if not body or not digits.isdigit() or len(digits) > _MOST_DIGITS or int(digits) != len(body):
        return None
    if not authorization.isascii() or not (text := authorization.decode()).isprintable():
        return None
    if key < length:
        shape = data[:key] + data[key_end:length] + data[length_end:end]
    else:
        shape = data[:length] + data[length_end:key] + data[key_end:end]
    return CompleteRequest(shape, text.strip(" "), body)


def _value_at(data: bytes, end: int, names: tuple[bytes, bytes]) -> int:
    """Where the value begins of the first header that is written like one of these; -1 without any."""
    for name in names:
        at = data.find(name, 0, end)
        if at >= 0:
            return at + len(name)
    return -1


def is_head(data: bytes) -> bool:
    """Whether this is one head without a body behind it."""
    return data.endswith(_END) and data.find(_END) == len(data) - len(_END)


def is_all(data: bytes, message: object, payload: StreamReader) -> bool:
    """Whether this message, which the parser made of `data` and of nothing before it, is all of it: no byte waits for more."""
    if not isinstance(message, RawRequestMessage) or not payload.is_eof():
        return False
    if message.upgrade or message.chunked or message.should_close:
        return False
    end = data.find(_END)
    return end >= 0 and end + len(_END) + payload.total_bytes == len(data)


class HeaderCache:
    """What the parser made of heads, without the two headers: whoever looked for one of them would find nobody's."""

    def __init__(self, most: int = MOST_HEADS) -> None:
        self._most = most
        # A plain dict looks for its first entry over all that were deleted before it.
        self._known: OrderedDict[bytes, CIMultiDictProxy[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def headers(self, whole: CompleteRequest) -> CIMultiDictProxy[str] | None:
        """All headers but these two, where the parser has read such a head."""
        return self._known.get(whole.shape)

    def learn(self, whole: CompleteRequest, headers: CIMultiDictProxy[str]) -> None:
        """The parser made `headers` of it. The one that has been kept for longest makes room.

        To be told of those only whose key is known: else anybody could fill the room, or empty it of what is useful.
        """
        if (
            headers.getall("Authorization", []) != [whole.authorization]
            or len(headers.getall("Content-Length", [])) != 1
        ):
            return
        if len(self._known) >= self._most:
            self._known.popitem(last=False)
        kept = CIMultiDict(headers)
        del kept["Authorization"], kept["Content-Length"]
        self._known[whole.shape] = CIMultiDictProxy(kept)
