"""Bodies with a content coding (RFC 9110, section 8.4.1): gzip, deflate and zstd, each at most once.

A body is decoded in pieces and up to the limit of its decoded size, so that a small body cannot become a large one, and other
requests are served between two pieces.
"""

import asyncio
import sys
import zlib
from collections.abc import Callable
from typing import Any

from multidict import CIMultiDictProxy

from scheduler.errors import ErrorCode, RequestError

if sys.version_info >= (3, 14):
    from compression.zstd import DecompressionParameter, ZstdDecompressor, ZstdError
else:
    from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError

CODINGS = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate", "zstd": "zstd"}
ACCEPTED = "gzip, deflate, zstd, identity"
PIECE_BYTES = 1 << 18
WINDOW_LOG = 23
"""8 MiB: the largest window of zstd that RFC 9659 allows for HTTP."""
GZIP, ZLIB, RAW_DEFLATE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
_ZLIB_METHOD = 8
"""The lower half of the first byte of zlib's format (RFC 1950). Some clients send deflate without that format."""


class EncodingError(RequestError):
    """A body cannot be decoded. `accepted`: the value of Accept-Encoding in the response (RFC 9110, section 12.5.3)."""

    def __init__(
        self,
        message: str | None = None,
        accepted: str = ACCEPTED,
        code: ErrorCode = ErrorCode.UNSUPPORTED_ENCODING,
    ) -> None:
        super().__init__(code, message, "Content-Encoding")
        self.accepted = accepted


def coding_of(headers: CIMultiDictProxy[str]) -> str:
    """The content coding of a body: a value of CODINGS, or "" for none. Raises EncodingError."""
    if "Content-Encoding" not in headers:
        return ""
    named = [name.strip().lower() for line in headers.getall("Content-Encoding") for name in line.split(",")]
    codings = [name for name in named if name not in ("identity", "")]
    if len(codings) > 1 or not all(name in CODINGS for name in codings):
        raise EncodingError
    return CODINGS[codings[0]] if codings else ""


async def decoded(raw: bytes, coding: str, max_bytes: int, take: Callable[[int], None]) -> bytes | None:
    """The decoded body; None if it is larger than `max_bytes`. Raises EncodingError if `raw` is not valid in this coding.

    `take` is called with the size of each piece: several bodies are decoded at a time. What it raises ends the decoding.
    """
    decoder: Any
    if coding == "zstd":
        decoder = ZstdDecompressor(options={DecompressionParameter.window_log_max: WINDOW_LOG})
    elif coding == "gzip":
        decoder = zlib.decompressobj(GZIP)
    else:
        decoder = zlib.decompressobj(ZLIB if raw[:1] and raw[0] & 0x0F == _ZLIB_METHOD else RAW_DEFLATE)
    pieces: list[bytes] = []
    size = 0
    try:
        while not decoder.eof:
            piece = decoder.decompress(raw, PIECE_BYTES)
            raw = b"" if coding == "zstd" else decoder.unconsumed_tail
            size += len(piece)
            if size > max_bytes:
                return None
            take(len(piece))
            if not piece and (decoder.needs_input if coding == "zstd" else not raw):
                raise _invalid(coding, "ends before its last block")
            pieces.append(piece)
            await asyncio.sleep(0)
    except (zlib.error, ZstdError):
        raise _invalid(coding, "cannot be decoded") from None
    if decoder.unused_data:
        raise _invalid(coding, "has bytes after its end")
    return b"".join(pieces)


def _invalid(coding: str, fault: str) -> EncodingError:
    message = (
        f"The body is not valid {coding}, it {fault}: send it in the coding that Content-Encoding names, or without it."
    )
    return EncodingError(message, code=ErrorCode.INVALID_REQUEST)
