"""Request lines that the parser accepts and this server rejects: other protocols, and invalid hosts."""

import re

from aiohttp import HttpVersion10, HttpVersion11
from aiohttp.http import RawRequestMessage

BAD_VERSION = "Only HTTP/1.0 and HTTP/1.1 are supported: end the request line with HTTP/1.1."
BAD_TARGET = "The host in the request target is not valid: send the path alone, or a valid host."


def request_line_error(message: RawRequestMessage, line: re.Match[bytes] | None = None) -> str | None:
    """Why a request is rejected by its request line; None if it is not. `line` is the result of `rtsp_line`."""
    if message.version not in (HttpVersion10, HttpVersion11):
        return BAD_VERSION
    if line is not None and line[1] == b"RTSP":
        return BAD_VERSION
    if message.path.startswith("/"):
        return None
    url = message.url
    try:  # aiohttp decodes the host when it builds its request, where an error would end the connection's task.
        if url.absolute:
            _ = (url.with_scheme("http") if url.scheme else url).host
            url.relative()
    except ValueError:
        return BAD_TARGET
    return None


def rtsp_line(message: RawRequestMessage, recent: bytes) -> re.Match[bytes] | None:
    """The request line in the received bytes, with its protocol as the first group; None if they contain no RTSP.

    The parser (llhttp) accepts RTSP too, without reporting it. Only a body that is not JSON can contain such a line.
    """
    if b" RTSP/" not in recent:
        return None
    method, path = re.escape(message.method.encode()), re.escape(message.path.encode("utf-8", "surrogateescape"))
    return re.search(rb"(?:^|\n)" + method + rb" +" + path + rb" +([A-Z]+)/", recent)
