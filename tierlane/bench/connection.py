"""One keep-alive connection: carries one request at a time and tells its owner how it ended."""

import asyncio
from typing import Protocol, cast

from tierlane.bench.http_client import Response, ResponseParser, WireError
from tierlane.bench.tally import Silence, TierTally


class Pending:
    """A request that is due. `due_s` on the load's clock; `tier` is its place in the mix."""

    __slots__ = ("due_s", "nonce", "tally", "tier")

    def __init__(self, due_s: float, tier: int, nonce: bytes, tally: TierTally) -> None:
        self.due_s = due_s
        self.tier = tier
        self.nonce = nonce
        self.tally = tally


class Owner(Protocol):
    """Who is told."""

    def answered(self, connection: "Connection", pending: Pending, response: Response) -> None:
        """The answer is whole; the connection carries nothing any more."""

    def broken(self, connection: "Connection", pending: Pending | None, why: Silence, detail: str) -> None:
        """The connection is gone or of no use; `pending` is what it carried."""

    def stray(self, connection: "Connection") -> None:
        """Bytes came on a connection that had asked for nothing."""


class Connection(asyncio.Protocol):
    """The protocol of one connection; `pending` is what it carries now."""

    __slots__ = ("_owner", "_parser", "_transport", "pending")

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._parser = ResponseParser()
        self._transport: asyncio.Transport | None = None
        self.pending: Pending | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    @property
    def is_open(self) -> bool:
        """Whether it can still carry a request."""
        return self._transport is not None

    def send(self, pending: Pending, request: bytes) -> None:
        """Send a request. The connection must be open and free."""
        self.pending = pending
        cast("asyncio.Transport", self._transport).write(request)

    def data_received(self, data: bytes) -> None:
        pending = self.pending
        if self._transport is None:
            return  # Given up; what still comes is of no interest.
        if pending is None:
            self._owner.stray(self)
            self.abort()
            return
        try:
            response = self._parser.feed(data)
        except WireError as error:
            self._end(Silence.MALFORMED, str(error))
            return
        if response is not None:
            self.pending = None
            self._owner.answered(self, pending, response)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(Silence.CLOSED, f"The server closed the connection ({exc or 'end of stream'}).")

    def expire(self) -> None:
        """Give up what it carries: the answer took too long."""
        self._end(Silence.TIMEOUT, "")

    def stop(self) -> None:
        """Give up what it carries: the run is over."""
        self._end(Silence.STOPPED, "")

    def abort(self) -> None:
        """Close at once; the owner hears `broken` without a request."""
        self._end(Silence.CLOSED, "")

    def _end(self, why: Silence, detail: str) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return  # The owner was told before.
        pending, self.pending = self.pending, None
        transport.abort()
        self._owner.broken(self, pending, why, detail)
