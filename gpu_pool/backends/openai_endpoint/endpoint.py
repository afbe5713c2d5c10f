"""One external endpoint: loading, the answer to one request, and what each answer says about the endpoint.

A request that the endpoint refused, lost or did not receive is handed back, and runs again, here or elsewhere. The worker
pauses only if the endpoint refuses a request while none of the worker runs there. The endpoint counts as away only if
several requests in a row were lost.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gpu_pool.backends.backend import InvalidOutput, Item, ItemResult
from gpu_pool.backends.openai_endpoint.availability import BUSY, SILENT, EndpointAvailability, Pauses
from gpu_pool.backends.openai_endpoint.call_times import Call
from gpu_pool.backends.openai_endpoint.capabilities import PRIORITY_OWNER, EndpointCapabilities, takes_priority
from gpu_pool.backends.openai_endpoint.client import (
    CALL_FAILURES,
    CallTimeout,
    NoResponse,
    ResponseAborted,
    Transport,
    fault_of,
)
from gpu_pool.backends.openai_endpoint.engine_load import EngineLoad, LoadReader
from gpu_pool.backends.openai_endpoint.errors import Broken, Busy, CallResult, Lost, Unreached
from gpu_pool.backends.openai_endpoint.faults import EndpointFault, FaultCause
from gpu_pool.backends.openai_endpoint.messages import MISSING_BODY, rejected_early
from gpu_pool.backends.openai_endpoint.probe import NO_MODEL, PROBE_TIMEOUT_S, ProbeResult, probe
from gpu_pool.backends.openai_endpoint.requests import (
    ABORTED,
    NO_ROUTE,
    TOO_SLOW,
    CallProgress,
    EndpointCall,
    EndpointContext,
    counted_so_far,
)
from gpu_pool.backends.openai_endpoint.settings import EndpointUrl
from gpu_pool.backends.openai_endpoint.slots import SlotPolicy
from gpu_pool.backends.openai_endpoint.stream_sweep import StreamSweep
from gpu_pool.config import Access
from scheduler.bounded_dict import BoundedDict
from scheduler.errors import ErrorCode, StartError, TierlaneError

MARGIN_S = 0.1
"""Part of a request's time that is kept for returning its result."""
LONGEST_S = 600.0
"""The limit of a call without any other."""
LOAD_S = 60.0
AGAIN_S = 0.05
SILENT_S = 1.0
WORKED_S = 10.0
"""An endpoint that has answered within this time works: it fails on an input, not on all."""

MOST_REFUSALS, MOST_LOSSES = 8, 2
"""Refusals and lost connections of one request after which it ends, if the server has answered others meanwhile."""
MOST_REMEMBERED, REMEMBERED_S = 1024, 60.0
"""Requests whose refusals or losses are remembered, and the time after the first one."""

OVERLOADED = ItemResult("The model's server refuses this request, although it serves others.", 0, ErrorCode.NO_CAPACITY)
FORBIDDEN = ItemResult("The model does not accept this request.", 0, ErrorCode.INVALID_REQUEST)
POISON = ItemResult("The model cannot process this input.", 0, ErrorCode.POISON_REQUEST)
_FAILED_CALLS = (TOO_SLOW.error_code, ABORTED.error_code)


class EndpointAway(TierlaneError):
    """The endpoint did not answer while the model was loading; a retry may succeed."""


@dataclass(frozen=True, slots=True)
class HandBack:
    """Nothing of the request was answered or streamed: it may run again, on any worker.

    `counted`: as an attempt, since the endpoint may have run it.
    """

    reason: str
    counted: bool


class Endpoint:
    """Used in one event loop. `swept`: see `StreamSweep`; `policy` decides how many requests may run at a time."""

    def __init__(
        self,
        address: EndpointUrl,
        access: Access,
        swept: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises StartError for certificates that cannot be used."""
        self._address = address
        self._clock = clock
        self._transport = Transport(address, access)
        self._probed = ProbeResult()
        self._answered_at = -LONGEST_S
        self._refusals, self._losses = Repeats(), Repeats()
        self._context = EndpointContext(
            self._transport,
            StreamSweep(swept, access.silence_ms / 1000, clock),
            EndpointCapabilities(),
            lambda: self._probed.model,
            access.body_dir,
            access.first_token_ms / 1000,
            clock,
        )
        self.load_reader = LoadReader(self._transport, address.root, clock)
        self.policy = SlotPolicy()
        self.availability = EndpointAvailability(self.probe)
        self.skipped = 0
        """Events of streams that were no JSON object."""
        self.replaced: Callable[[], Any] = lambda: None
        """Called when a probe finds another model than was loaded."""
        self.waiting: Callable[[str], Any] = lambda _: None
        """Called while it is loaded with the reason for which that waits, and with "" at the end."""
        self._heard_at = clock()
        self._watch: asyncio.Task[None] | None = None

    @property
    def model(self) -> str:
        """The endpoint's name for its model; "" before `load`."""
        return self._probed.model

    @property
    def context_tokens(self) -> int:
        """The most tokens of prompt and output together; 0: not known."""
        return self._probed.context_tokens

    async def load(self, within_s: float = LOAD_S) -> None:
        """Wait for the endpoint. Raises StartError if only other settings can help, EndpointAway after `within_s`."""
        await self._transport.open()
        pauses, until = Pauses(), self._clock() + within_s
        while (seen := await self._seen("")).fault:
            self.waiting(seen.fault)
            if seen.ours:
                raise StartError(f"{seen.fault} ({self._address.base})")
            if self._clock() >= until:
                raise EndpointAway(seen.fault)
            await asyncio.sleep(pauses.probe_s())
        self.waiting("")
        self._probed = seen
        await self._learn()

    async def answer(self, item: Item, progress: CallProgress) -> ItemResult | HandBack:
        """Run one request, at most until its deadline."""
        if self.availability.closed:
            return HandBack(self.availability.closed, counted=False)
        rejected = self._rejection(item)
        if rejected is not None:
            return rejected
        now = self._clock()
        if item.listener is None:  # A stream ends at its own deadline.
            left_s = min(item.until - now, LONGEST_S)
            item = replace(item, until=now + left_s - min(MARGIN_S, 0.1 * left_s))
        call = self.policy.start(now, streamed=item.listener is not None)
        progress.on_output = lambda: self._heard(call)
        try:
            result = await self._call(item, progress, again=False)
            if isinstance(result, Lost) and result.by_input:
                # The server's failure may have another cause than this input: it is tried once more, on another connection:
                # uvicorn closes that of a failure without a notice.
                await asyncio.sleep(AGAIN_S)
                result = await self._call(item, progress, again=True)
        except BaseException:
            self.policy.leave(call)
            raise
        now = self._heard_at = self._clock()
        if isinstance(result, Busy):
            self.policy.refuse(call, now)
        elif isinstance(result, ItemResult) and not result.error_code:
            self.policy.end(call, now, result.output_tokens)
        else:
            self.policy.leave(call)
        skipped = progress.completion.skipped if progress.completion is not None else 0
        if skipped and not self.skipped:  # A proxy may add such events.
            sys.stderr.write("The endpoint's streams have events that are no JSON objects; they are skipped.\n")
        self.skipped += skipped
        found = self._meaning(await self._verified(result, item), item, progress)
        if isinstance(result, Busy) and not self.policy.in_flight:
            await self._pause(self.availability.busy(result.wait_s, item.customer), item.until)
        if isinstance(result, Lost) and isinstance(found, HandBack):
            # Without this pause it runs again within 2 ms, before a healthy endpoint has usually sent other output.
            await self._pause(AGAIN_S, item.until)
        return found

    def left(self, item: Item | None, progress: CallProgress) -> ItemResult:
        """The result of a request whose client has left: the tokens used until then, 0 if nothing was streamed."""
        if item is None or progress.completion is None:
            return ItemResult("", 0, ErrorCode.CANCELLED)
        used = counted_so_far(progress.completion, item, self._context.body_dir)
        return ItemResult("", used.tokens_used, ErrorCode.CANCELLED, used.output_tokens)

    async def _seen(self, before: str) -> ProbeResult:
        """The result of a probe, also of one that failed; `before`: the model chosen last."""
        try:
            return await self._look(before)
        except CallTimeout:
            return ProbeResult(SILENT)
        except CALL_FAILURES as error:
            return ProbeResult(fault_of(error))

    async def _look(self, before: str) -> ProbeResult:
        """Probe the server. Raises CALL_FAILURES."""
        return await probe(self._transport, self._address, before)

    async def _learn(self) -> None:
        """Find out once what the server can do."""
        seen = self._probed
        if seen.owner == PRIORITY_OWNER:
            self._context.capabilities.takes_priority = await takes_priority(self._transport, seen.model, seen.tasks)
        await self.load_reader.detect()

    async def read_load(self) -> EngineLoad | None:
        """What the server reports of its queue now; None if it reports nothing."""
        return await self.load_reader.read()

    def _rejection(self, item: Item) -> ItemResult | None:
        """The error of an item that must not be sent; else None."""
        if item.task not in self._probed.tasks:
            return ItemResult(NO_ROUTE[item.task], 0, ErrorCode.INVALID_REQUEST)
        return rejected_early(item)

    async def _call(self, item: Item, progress: CallProgress, *, again: bool) -> CallResult:  # noqa: ARG002 - for other servers
        """The call of one item, `again` after it failed."""
        return await EndpointCall(self._context, item, progress).run()

    def watch(self) -> None:
        """Called regularly: checks an endpoint that has requests and from which nothing was received for SILENT_S."""
        now = self._clock()
        if not self.policy.in_flight:
            self._heard_at = now
            self.availability.note_silence(silent=False)
        elif now - self._heard_at >= SILENT_S and (self._watch is None or self._watch.done()):
            self._watch = asyncio.create_task(self._check_silence(), name="silence")

    async def _check_silence(self) -> None:
        """Any response to a small request ends the silence."""
        before, silent = self._heard_at, False
        try:
            await self._transport.get(self._address.root + "/health", PROBE_TIMEOUT_S)
        except CallTimeout:
            silent = self._heard_at == before
        except (NoResponse, ResponseAborted, InvalidOutput):
            pass  # The requests show it.
        if not silent:
            self._heard_at = self._clock()
        self.availability.note_silence(silent=silent)

    async def close(self) -> None:
        """Close all connections."""
        if self._watch is not None:
            self._watch.cancel()
        await self.availability.close()
        await self._transport.close()

    async def probe(self) -> str:
        """Why the endpoint cannot be used; "" if it can."""
        seen = await self._seen(self._probed.model)
        if seen.fault:
            return seen.fault
        if not self._probed.tasks <= seen.tasks:
            # A proxy in front of restarting servers; this is not the client's error.
            return EndpointFault("The endpoint lacks a route that it had before.", FaultCause.WRONG_SERVER)
        if self._probed.listed and seen.listed is False:
            return NO_MODEL
        before = self._probed
        # A server that is busy may not tell its context length; it still has it.
        self._probed = seen = seen._replace(context_tokens=seen.context_tokens or before.context_tokens)
        if (seen.model, seen.context_tokens) != (before.model, before.context_tokens):
            self.replaced()
        return ""

    def _heard(self, call: Call) -> None:
        """A stream sent a part of its output."""
        self._heard_at = self._answered_at = self._clock()
        self.policy.output(call, self._heard_at)

    async def _verified(self, result: CallResult, item: Item) -> CallResult:
        """A proxy may reject one text with the status of a wrong key: if a probe succeeds, it was the text.

        A probe may not need the key: if it was rejected for several customers, it is wrong.
        """
        if not isinstance(result, Broken) or result.certain:
            return result
        if result.key and self.availability.unusable(item.customer):
            return result
        try:
            async with asyncio.timeout(item.until - self._clock()):
                fault = await self.probe()
        except TimeoutError:
            return result
        return Broken(fault) if fault else FORBIDDEN

    async def _pause(self, wait_s: float, until: float) -> None:
        """Keep the slot of a refused or lost request, so that it is not sent again at once."""
        if wait_s:
            await asyncio.sleep(max(0.0, min(wait_s, until - self._clock())))

    def _meaning(self, result: CallResult, item: Item, progress: CallProgress) -> ItemResult | HandBack:
        """The result of a request, or its return; also updates the availability."""
        now = self._clock()
        works = now - self._answered_at < WORKED_S
        if isinstance(result, ItemResult):
            if result.error_code in _FAILED_CALLS:
                cause = FaultCause.TIMEOUT if result.error_code == TOO_SLOW.error_code else FaultCause.CLOSED
                self.availability.failed(EndpointFault(result.output, cause), item.customer, reached=True)
            elif result.error_code == ErrorCode.INVALID_OUTPUT:
                several = self.availability.unusable(item.customer)
                return msgspec.structs.replace(result, by_input=result.by_input or not several)
            elif result is not MISSING_BODY and result is not FORBIDDEN:
                self._answered_at = now
                self.availability.worked()
                self._refusals.forget(item)
                self._losses.forget(item)
            return result
        if isinstance(result, Busy):
            # One that is refused again and again, while others are answered, may cost more than the server takes.
            often = self._refusals.add(item, now, MOST_REFUSALS, self._answered_at)
            return OVERLOADED if often else HandBack(BUSY, counted=False)
        if isinstance(result, Broken):
            self.availability.broken(result.reason)
            return HandBack(result.reason, counted=False)
        # A lost connection may have another cause than this input, which has run alone: so it is run once more.
        if (
            isinstance(result, Lost)
            and works
            and not progress.has_sent
            and (result.by_input or self._losses.add(item, now, MOST_LOSSES, self._answered_at))
        ):
            return POISON
        self.availability.failed(result.reason, item.customer, reached=isinstance(result, Lost))
        return ABORTED if progress.has_sent else HandBack(result.reason, counted=not isinstance(result, Unreached))


class Repeats:
    """How often each of the last requests failed in the same way, and since when."""

    def __init__(self) -> None:
        self._seen: BoundedDict[int, tuple[int, float]] = BoundedDict(MOST_REMEMBERED)

    def add(self, item: Item, now: float, most: int, answered_at: float) -> bool:
        """Count a failure; whether it is the last one of `most` and other requests had an output since the first one.

        `answered_at`: when the server sent the last part of an output.
        """
        key = _key(item)
        count, first_at = self._seen.pop(key, (0, now))
        if now - first_at > REMEMBERED_S:
            count, first_at = 0, now
        if count + 1 >= most and answered_at > first_at:
            return True
        self._seen[key] = count + 1, first_at
        return False

    def forget(self, item: Item) -> None:
        """The request was answered: its input was not the cause."""
        if self._seen:
            self._seen.pop(_key(item), None)


def _key(item: Item) -> int:
    return hash((item.customer, item.task, item.input))
