"""Request lines that aiohttp's parser accepts and this server rejects: other protocols, other versions, broken hosts. Pure."""

import re

from aiohttp import HttpVersion10, HttpVersion11
from aiohttp.http import RawRequestMessage

VERSION = "Only HTTP/1.0 and HTTP/1.1 are supported: end the request line with HTTP/1.1."
TARGET = "The host in the request target is not valid: send the path alone, or a host that can be decoded."

LONGEST_LINE = 16_384
"""Bytes of a request line that are kept until it is complete; the parser accepts 8190 bytes of target."""


def refused(message: RawRequestMessage, line: re.Match[bytes] | None = None) -> str | None:
    """Why this request is rejected, as a sentence for the client; None where it is not. `line`: as `rtsp_line` gives it."""
    if message.version not in (HttpVersion10, HttpVersion11):
        return VERSION
    if line is not None and line[1] == b"RTSP":
        return VERSION
    if not message.path.startswith("/") and not _has_readable_host(message):
        return TARGET
    return None


def rtsp_line(message: RawRequestMessage, recent: bytes) -> re.Match[bytes] | None:
    """The request line in the received bytes, with its protocol as the first group; None where RTSP is not among them.

    The parser (llhttp) reads RTSP too, and does not say so. Only a body that is no JSON could hold such a line.
    """
    if b" RTSP/" not in recent:
        return None
    method, path = re.escape(message.method.encode()), re.escape(message.path.encode("utf-8", "surrogateescape"))
    return re.search(rb"(?:^|\n)" + method + rb" +" + path + rb" +([A-Z]+)/", recent)


def _has_readable_host(message: RawRequestMessage) -> bool:
    """Aiohttp decodes the host when it builds its request object, where an error would end the connection's task."""
    url = message.url
    try:
        if url.absolute:
            _ = (url.with_scheme("http") if url.scheme else url).host
            url.relative()
    except ValueError:
        return False
    return True
