"""Faults of the configuration, in one sentence each: what is wrong, and which part of TIERLANE_REDIS_URL to change.

A role with such a fault starts and retries, as while Redis is away, because the servers may be what has to change.
"""

import asyncio
import ssl
from contextlib import suppress
from typing import NamedTuple

from redis.exceptions import (
    AuthenticationError,
    ConnectionError,  # noqa: A004 - as everywhere in redis-py
    NoPermissionError,
)

PROBE_S = 1.0
"""How long a server may take to answer a plain PING, and to complete a handshake."""

_REPLIES = (b"+", b"-")  # The first byte of a reply in plain text. A server with TLS closes, or sends an alert.
_CERTIFICATE = "certificate verify failed"
_WRONG_LOGIN = "invalid username-password"  # A reply to HELLO, which redis-py may raise as a ConnectionError.
_IN_SCRIPT = ("ACL failure in script", "user executing the script ")  # The second one is that of Redis 7.0.
_RULES = "deploy/redis/users.acl"
_NO_LOGIN = ("required", "already authenticated")  # Parts of what servers say if a connection sends no login.


class SetupFault(ConnectionError):
    """A fault of the configuration; the message is one sentence."""


class Server(NamedTuple):
    """One server as the URL describes it. `kind`: Sentinel or Redis; `tls`: whether the URL says that it uses TLS."""

    kind: str
    host: str
    port: int
    tls: bool


def login_fault(error: BaseException, whom: str = "Redis", parts: str = "the user and password") -> str | None:
    """The sentence for an error about credentials or certificates; None for others. `parts`: of the URL."""
    if isinstance(error, SetupFault):
        return str(error)
    if isinstance(error, AuthenticationError) and any(text in str(error) for text in _NO_LOGIN):
        return f"{whom} requires a password: set {parts} in TIERLANE_REDIS_URL."
    if isinstance(error, AuthenticationError) or _WRONG_LOGIN in str(error):
        return f"{whom} rejected the login: correct {parts} in TIERLANE_REDIS_URL."
    if isinstance(error, NoPermissionError) or any(text in str(error) for text in _IN_SCRIPT):
        # What the server says of the command, without the name of the user.
        said = str(error).rpartition(" script: ")[0] or str(error)
        command = said.partition("permissions to ")[2] or said.partition(_IN_SCRIPT[1])[2]
        command = command.rstrip(".") or "it names no command"
        advice = "correct its ACL" if whom != "Redis" else f"roles need their rules of {_RULES}, people its user admin"
        return f"{whom} does not allow a command to the user of TIERLANE_REDIS_URL: {advice} ({command})."
    if _CERTIFICATE in str(error):
        why = str(error).partition(_CERTIFICATE)[2].partition("(")[0].strip(": ")
        return f"The certificate of {whom} is not accepted ({why}): correct ssl_ca_certs in TIERLANE_REDIS_URL."
    return None


def tls_fault(server: Server, *, speaks_tls: bool) -> str | None:
    """The sentence for a server that uses TLS although its URL says otherwise, or the reverse; None if they agree."""
    if speaks_tls == server.tls:
        return None
    where = f"{server.kind} at {server.host}:{server.port}"
    if server.kind == "Sentinel":
        if speaks_tls:
            return f"{where} uses TLS: use rediss+sentinel:// with sentinel_tls=on in TIERLANE_REDIS_URL."
        return f"{where} does not use TLS: remove sentinel_tls=on from TIERLANE_REDIS_URL."
    if speaks_tls:
        return f"{where} uses TLS: begin TIERLANE_REDIS_URL with rediss instead of redis."
    return f"{where} does not use TLS: begin TIERLANE_REDIS_URL with redis instead of rediss."


async def speaks_tls(server: Server) -> bool | None:
    """Whether a server uses TLS; None if that cannot be seen.

    A server that closes after plain text may use TLS, or be a proxy whose Redis is away. A handshake tells them apart.
    """
    try:
        async with asyncio.timeout(PROBE_S):
            if await _first_byte(server) in _REPLIES:
                return False
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # It accepts any certificate.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(server.host, server.port, ssl=context)
        writer.transport.abort()
    except ssl.SSLError as error:
        # A TLS alert proves it too, as from a server that demands a certificate of the client.
        return True if "ALERT" in str(error.reason) else None
    except (OSError, TimeoutError):
        return None
    return True


async def _first_byte(server: Server) -> bytes:
    """Of the reply to a plain PING; empty if the server closes the connection."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        writer.write(b"PING\r\n")
        return await reader.read(1)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def tls_faults(servers: list[Server]) -> str | None:
    """The first of `tls_fault` of these servers."""
    found = await asyncio.gather(*(speaks_tls(server) for server in servers))
    sentences = (
        tls_fault(server, speaks_tls=tls) for server, tls in zip(servers, found, strict=True) if tls is not None
    )
    return next(filter(None, sentences), None)
