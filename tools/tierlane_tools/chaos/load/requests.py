"""Open-loop load of many customers: requests are a Poisson process that does not wait for responses. One customer floods.

Each request has a secret that its output must contain. A fifth have an `Idempotency-Key`: without a response, or while the
first try is in progress, they are retried with the same key and body at another gateway until their deadline. All others
are sent once. Customers use the same keys by chance, because a key belongs to one customer. Every event is recorded in the
history, also stalls of this tool, during which responses are read late.
"""

import asyncio
import secrets
import time
from collections.abc import Iterator
from itertools import accumulate
from random import Random
from typing import cast
from urllib.parse import urlsplit

from scheduler.errors import ErrorCode
from tierlane_tools.bench.http_client import BenchResponse, ConnectionPool, Pending
from tierlane_tools.bench.measurement.statistics import TierStatistics, UnansweredCause
from tierlane_tools.chaos.history import (
    Answered,
    History,
    Invoked,
    LoadCustomer,
    Stalled,
    Stray,
    Target,
    Unanswered,
    request_input,
)
from tierlane_tools.chaos.load.messages import NONCE_CHARACTERS, OK_STATUS, AnswerReading, read_answer, request_bytes
from tierlane_tools.chaos.load.stalls import watch_stalls

TIMEOUT_S = 6.0
KEYED_SHARE = 0.2
SAME_KEY_SHARE = 0.5  # Of those: another customer has used the key for another request.
RETRY_AFTER_S = 0.2
PATIENCE_S = 10.0  # The deadline of a client with an Idempotency-Key, from its first try.
MAX_PADDING = 400
CONNECTIONS = 4000  # To one gateway.
TICK_S = 0.002
SWEEP_S = 0.05

_KINDS = {
    UnansweredCause.TIMEOUT: "timeout",
    UnansweredCause.CLOSED: "reset",
    UnansweredCause.CONNECT: "refused",
    UnansweredCause.NOT_SENT: "refused",
    UnansweredCause.MALFORMED: "reset",
    UnansweredCause.STOPPED: "stopped",
}


class LoadRequest:
    """One request of a customer: its secret, and the number of its tries."""

    __slots__ = ("customer", "gateway", "give_up_at", "has_left", "key", "nonce", "padding", "text", "turn")

    def __init__(self, customer: LoadCustomer, gateway: int, key: str, padding: str) -> None:
        self.customer = customer
        self.gateway = gateway
        self.key = key
        self.padding = padding
        self.nonce = secrets.token_hex(NONCE_CHARACTERS // 2)
        self.turn = 0
        self.text = ""  # Set at the first sending, the same in every try.
        self.give_up_at = 0.0
        self.has_left = False  # Its client closes the connection.


class LoadTry(Pending):
    """One open try; `due_s` becomes the time of sending."""

    __slots__ = ("request",)

    def __init__(self, request: LoadRequest, now: float, counters: TierStatistics) -> None:
        super().__init__(now, 0, b"", counters)
        self.request = request


class ChaosLoad:
    """The load of one run."""

    def __init__(self, target: Target, rate: float, duration_s: float, seed: int, history: History) -> None:
        """`rate`: requests per second over all customers. The same seed gives the same customers at the same times."""
        self._random = Random(f"{seed}/load")
        self._turns = Random(f"{seed}/retries")  # Separate, or a retry would change every later request.
        self._target = target
        self._parts = list(accumulate(customer.part for customer in target.customers))
        self._history = history
        self._due = self._arrivals(rate, duration_s)
        self._next: float | None = None
        self._began = 0.0
        self._open = 0
        self._key, self._key_users = "", set[str]()
        self._retries: dict[LoadRequest, asyncio.TimerHandle] = {}
        self._done = asyncio.Event()
        self._counters = TierStatistics("all")
        self._names = [f"gateway-{number}" for number in range(1, len(target.http_urls) + 1)]
        urls = [urlsplit(url) for url in target.http_urls]
        self._hosts = [url.netloc for url in urls]
        self._pools = [
            ConnectionPool(
                url.hostname or "",
                url.port or 80,
                cap=CONNECTIONS,
                timeout_s=TIMEOUT_S,
                encode=self._encode,
                on_answer=self._answered,
                on_silence=self._unanswered,
            )
            for url in urls
        ]

    def _arrivals(self, rate: float, duration_s: float) -> Iterator[float]:
        at = self._random.expovariate(rate)
        while at < duration_s:
            yield at
            at += self._random.expovariate(rate)

    async def run(self) -> None:
        """Send all requests; returns when each has its outcome."""
        loop = asyncio.get_running_loop()
        self._began = time.monotonic()
        stalls = loop.create_task(watch_stalls(self._stalled), name="stalls")
        self._advance()
        self._tick()
        self._sweep()
        try:
            await self._done.wait()
        finally:
            self.stop()
            stalls.cancel()
            await asyncio.gather(*(pool.close() for pool in self._pools), stalls, return_exceptions=True)
            for gateway, pool in zip(self._names, self._pools, strict=True):
                for _ in range(pool.strays):
                    self._history.add(Stray(at=time.monotonic(), gateway=gateway, detail="Bytes without a request."))

    def stop(self) -> None:
        """Stop sending; open requests are recorded as stopped."""
        self._next = None
        self._due = iter(())
        retries, self._retries = self._retries, {}
        for handle in retries.values():
            handle.cancel()
        self._done.set()

    def _stalled(self, since: float, until: float) -> None:
        self._history.add(Stalled(at=until, since=since))

    def _advance(self) -> None:
        due = next(self._due, None)
        self._next = None if due is None else self._began + due
        self._finish_when_done()

    def _finish_when_done(self) -> None:
        if self._next is None and not self._open:
            self._done.set()

    def _tick(self) -> None:
        now = time.monotonic()
        while self._next is not None and self._next <= now:
            self._begin(self._drawn())
            self._advance()
        if self._next is not None:
            asyncio.get_running_loop().call_later(max(TICK_S, self._next - now), self._tick)

    def _sweep(self) -> None:
        if not self._done.is_set():
            for pool in self._pools:
                pool.expire(time.monotonic())
            asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _drawn(self) -> LoadRequest:
        random = self._random
        customer = random.choices(self._target.customers, cum_weights=self._parts)[0]
        gateway = random.randrange(len(self._pools))
        keyed, padding = random.random() < KEYED_SHARE, "x" * random.randrange(MAX_PADDING)
        key = ""
        if keyed:
            # Never a key that this customer has used; often one that another customer has just used.
            same = random.random() < SAME_KEY_SHARE and self._key_users and customer.id not in self._key_users
            if not same:
                self._key, self._key_users = secrets.token_hex(12), set()
            self._key_users.add(customer.id)
            key = self._key
        return LoadRequest(customer, gateway, key, padding)

    def _begin(self, request: LoadRequest) -> None:
        self._open += 1
        request.give_up_at = time.monotonic() + PATIENCE_S
        self._try(request)

    def _try(self, request: LoadRequest) -> None:
        self._retries.pop(request, None)
        self._pools[request.gateway].submit(LoadTry(request, time.monotonic(), self._counters))

    def _encode(self, pending: Pending) -> bytes:
        """Encode a try when it is sent."""
        request = cast("LoadTry", pending).request
        pending.due_s = now = time.monotonic()
        request.text = request.text or request_input(request.nonce, now, request.padding)
        trace = secrets.token_hex(16)
        self._history.add(
            Invoked(
                at=now,
                nonce=request.nonce,
                turn=request.turn,
                trace=trace,
                gateway=self._names[request.gateway],
                tier=request.customer.tier,
                customer=request.customer.id,
                key=request.key,
            )
        )
        return self._bytes(request, self._hosts[request.gateway], trace)

    def _bytes(self, request: LoadRequest, host: str, trace: str) -> bytes:
        return request_bytes(host, request.customer, request.text, trace, request.key)

    def _reading(self, request: LoadRequest, response: BenchResponse) -> AnswerReading:
        return read_answer(response, request.text)

    def _answered(self, pending: Pending, response: BenchResponse) -> None:
        request, now = cast("LoadTry", pending).request, time.monotonic()
        reading = self._reading(request, response)
        seconds = round(now - pending.due_s, 6)
        self._history.add(
            Answered(at=now, nonce=request.nonce, turn=request.turn, seconds=seconds, **reading._asdict())
        )
        in_progress = reading.code == ErrorCode.IDEMPOTENCY_IN_PROGRESS
        if not (in_progress and self._retry(request, now)):
            self._end(request, served=reading.status == OK_STATUS)

    def _unanswered(self, pending: Pending, cause: UnansweredCause, detail: str) -> None:
        request, now = cast("LoadTry", pending).request, time.monotonic()
        kind, gateway = "left" if request.has_left else _KINDS[cause], self._names[request.gateway]
        if cause is UnansweredCause.MALFORMED:
            self._history.add(Stray(at=now, gateway=gateway, nonce=request.nonce, detail=detail))
        self._history.add(
            Unanswered(at=now, nonce=request.nonce, turn=request.turn, kind=kind, gateway=gateway, detail=detail)
        )
        if request.has_left or cause is UnansweredCause.STOPPED or not self._retry(request, now):
            self._end(request, served=False)

    def _retry(self, request: LoadRequest, now: float) -> bool:
        """Retry at another gateway; False where the client does not retry or its deadline has passed."""
        if not request.key or self._done.is_set() or now + RETRY_AFTER_S >= request.give_up_at:
            return False
        others = [gateway for gateway in range(len(self._pools)) if gateway != request.gateway]
        request.gateway = self._turns.choice(others or [request.gateway])
        request.turn += 1
        self._retries[request] = asyncio.get_running_loop().call_later(RETRY_AFTER_S, self._try, request)
        return True

    def _end(self, request: LoadRequest, *, served: bool) -> None:  # noqa: ARG002 - for loads that react to it
        self._open -= 1
        self._finish_when_done()
