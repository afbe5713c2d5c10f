"""Whether an endpoint accepts requests now: pauses, probes, and the capabilities learnt about it.

Closed while the server asks for a pause, and while it is unavailable or rejects the key. After a pause it opens by
itself, otherwise when a probe succeeds. Each change is reported. A probe checks address, key, model and routes,
and generates no text.

Capabilities are token counts of streams, and priorities. Whether a server accepts the tier's
`priority`, by which vLLM orders its queue (lower is sooner), is tested once with one token: a vLLM without
`--scheduling-policy priority` rejects every request that has one. Other servers are not tested: some interpret the
field the other way round, and some bill for the test.
"""

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

import msgspec

from gpu_pool.backends.backend import InvalidOutput
from gpu_pool.backends.openai_endpoint.client import (
    CallTimeout,
    EndpointResponse,
    NoResponse,
    ResponseAborted,
    Transport,
)
from gpu_pool.backends.openai_endpoint.context import listed_context, read_context
from gpu_pool.backends.openai_endpoint.errors import KEY_STATUSES, LOADING, NO_KEY, is_loading, names_field
from gpu_pool.backends.openai_endpoint.messages import ROUTES, Body
from gpu_pool.backends.openai_endpoint.settings import EndpointUrl
from scheduler.payload import Task

STRIKES = 3
"""After this many lost requests in a row, of more than one customer, no more are sent until a probe succeeds."""
FIRST_S, LONGEST_BUSY_S, LONGEST_PROBE_S = 0.25, 1.0, 5.0
BRIEF_S = 1.5
"""An endpoint whose pauses since its last answer sum up to at most this is busy; beyond that it counts as away. Gateways
wait two seconds (gateway/limits/capacity.py) before they reject for lack of GPUs; it is reported earlier.
"""


class Pauses:
    """Growing waiting times, reset by a request that succeeds."""

    def __init__(self) -> None:
        self.worked()

    def worked(self) -> None:
        """A request was answered."""
        self._busy_s = self._probe_s = FIRST_S
        self._left_alone_s = 0.0

    def busy_s(self, asked_s: float | None) -> float:
        """The pause before a busy server gets more: as it asks, else longer each time."""
        if asked_s is not None:
            return asked_s
        wait_s, self._busy_s = self._busy_s, min(LONGEST_BUSY_S, 2 * self._busy_s)
        return wait_s

    def brief(self, wait_s: float) -> bool:
        """The pause is extended by `wait_s`; whether all pauses since the last answer together are short."""
        self._left_alone_s += wait_s
        return self._left_alone_s <= BRIEF_S

    def probe_s(self) -> float:
        """Time to the next probe of an endpoint that is away."""
        wait_s, self._probe_s = self._probe_s, min(LONGEST_PROBE_S, 2 * self._probe_s)
        return wait_s


class Failures:
    """The requests that were lost, refused or not usably answered since the last answer, and their customers.

    Requests of one customer say nothing about the endpoint: their inputs may be the cause. Those of unknown customers (0) count
    as of several.
    """

    def __init__(self) -> None:
        self.worked()

    def worked(self) -> None:
        """A request was answered."""
        self._lost = 0
        self._losers: set[int] = set()
        self._refused: set[int] = set()
        self._unusable: set[int] = set()

    def lost(self, customer: int) -> bool:
        """A request was lost; whether so many were that the endpoint may be the cause."""
        self._lost += 1
        self._losers.add(customer)
        return self._lost >= STRIKES

    @property
    def of_several(self) -> bool:
        """Whether requests of several customers were lost."""
        return _are_several(self._losers)

    def refused(self, customer: int) -> bool:
        """The server asked for a pause; whether it did so for several customers."""
        self._refused.add(customer)
        return _are_several(self._refused)

    def unusable(self, customer: int) -> bool:
        """The output was invalid, or the key rejected; whether it was so for several customers."""
        self._unusable.add(customer)
        return _are_several(self._unusable)


def _are_several(customers: set[int]) -> bool:
    return len(customers) > 1 or 0 in customers


AvailabilityCallback = Callable[[bool, str, bool], None]
"""Called with whether requests are accepted, the reason if not, and whether for a short time only.

A reason although requests are accepted: what is wrong with the endpoint meanwhile.
"""

BUSY = "The endpoint accepts no more requests for now."
SILENT = "The endpoint does not respond."


def _ignore(wanted: bool, why: str, brief: bool) -> None:  # noqa: FBT001 - a callback's signature
    """The default: changes are not reported."""


class EndpointAvailability:
    """`probe` returns why the endpoint cannot be used, or ""."""

    def __init__(self, probe: Callable[[], Awaitable[str]]) -> None:
        self._probe = probe
        self._pauses = Pauses()
        self._failures = Failures()
        self._work: asyncio.Task[None] | None = None
        self.report: AvailabilityCallback = _ignore
        self.closed = ""
        """Why no request is accepted; "" if requests are."""
        self._silent = False

    def worked(self) -> None:
        """A request was answered."""
        self._pauses.worked()
        self._failures.worked()

    def busy(self, asked_s: float | None, customer: int) -> float:
        """The server refused a request while no other ran, and asked for a pause, of `asked_s` seconds if it gave a time.

        Returns the seconds after which this request may be tried again. Others are not held up, unless the server has refused
        requests of several customers.
        """
        if self.closed:
            return 0.0
        if not self._failures.refused(customer):
            return self._pauses.busy_s(None)
        wait_s = self._pauses.busy_s(asked_s)
        self._close(BUSY, self._wait(wait_s), brief=self._pauses.brief(wait_s))
        return 0.0

    def failed(self, reason: str, customer: int, *, reached: bool) -> None:
        """A request was lost. `reached`: the server received it, so its input may be the cause.

        After several of one customer, a probe decides.
        """
        if not self._failures.lost(customer if reached else 0) or self.closed:
            return
        if self._failures.of_several:
            self.broken(reason)
        elif self._work is None or self._work.done():
            self._work = asyncio.create_task(self._verify(reason), name="availability")

    def unusable(self, customer: int) -> bool:
        """The output of a request was invalid, or the key rejected; whether that says something about the endpoint."""
        return self._failures.unusable(customer)

    def broken(self, reason: str) -> None:
        """The endpoint cannot be used until something changes there."""
        if not self.closed:
            self._close(reason, self._probe_until_available(), brief=False)

    def note_silence(self, *, silent: bool) -> None:
        """Report whether a server that has requests does not respond; they go on, and new ones are accepted."""
        if silent != self._silent and not self.closed:
            self._silent = silent
            self.report(True, SILENT if silent else "", False)  # noqa: FBT003 - positional in the callback

    async def close(self) -> None:
        """Stop waiting."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    def _close(self, reason: str, work: Coroutine[Any, Any, None], *, brief: bool) -> None:
        self.closed, self._silent = reason, False
        self._work = asyncio.create_task(work, name="availability")
        self.report(False, reason, brief)  # noqa: FBT003 - positional in the callback

    async def _verify(self, reason: str) -> None:
        if await self._fault():
            self.broken(reason)

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._open()

    async def _probe_until_available(self) -> None:
        while True:
            await asyncio.sleep(self._pauses.probe_s())
            if not (fault := await self._fault()):
                self._open()
                return
            if fault != self.closed:
                self.closed = fault
                self.report(False, fault, False)  # noqa: FBT003 - positional in the callback

    async def _fault(self) -> str:
        try:
            return await self._probe()
        except Exception:  # noqa: BLE001 - the next probe may succeed; without one the endpoint stays closed
            traceback.print_exc()
            return "The endpoint cannot be probed."

    def _open(self) -> None:
        self.closed = ""
        self.report(True, "", False)  # noqa: FBT003 - positional in the callback


PROBE_TIMEOUT_S = 2.0
NAMED_MODELS = 5  # Names listed in an error message.
UNNAMED = "default"  # The model name for servers that list none; they ignore it.
ABSENT = frozenset({404, 405, 501})
NO_MODEL = "The endpoint has no model yet."


class ProbeResult(NamedTuple):
    """The result of a probe. `fault`: why the endpoint cannot be used, or ""; `ours`: only other settings can help.

    `listed`: whether the server lists the model, None without a list; some list none and serve it all the same.
    """

    fault: str = ""
    ours: bool = False
    model: str = ""
    tasks: frozenset[Task] = frozenset()
    owner: str = ""
    context_tokens: int = 0
    listed: bool | None = None


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


_models = msgspec.json.Decoder(_Models | list[dict[str, Any]])  # Some services send the list alone.
_encode = msgspec.json.encode


async def probe(transport: Transport, address: EndpointUrl, before: str = "") -> ProbeResult:
    """`before`: the model chosen last, which is kept if the server still has it. Never raises."""
    try:
        found = await _model(transport, address, before)
        if found.fault:
            return found
        tokens = found.context_tokens or await read_context(transport, address.root)
        seen = await _routes(transport, found.model)
        return seen._replace(owner=found.owner, context_tokens=tokens, listed=found.listed)
    except CallTimeout:
        return ProbeResult(SILENT)
    except (NoResponse, ResponseAborted, InvalidOutput) as error:
        return ProbeResult(str(error))


async def _model(transport: Transport, address: EndpointUrl, before: str) -> ProbeResult:
    reply = await transport.get(address.base + "/models", PROBE_TIMEOUT_S)
    if reply.status in KEY_STATUSES:
        return ProbeResult(NO_KEY, ours=True)
    if reply.status == 200:
        return _chosen(reply, address.model, before)
    # Servers of one model may list none, and one that loads models on demand may fail to list them.
    loading = is_loading(reply.status, reply.body)
    listless = ProbeResult(LOADING) if loading else unexpected(reply.status, "GET /models")
    if reply.status not in ABSENT and (loading or is_redirect(reply.status) or not address.model):
        return listless
    health = await transport.get(address.root + "/health", PROBE_TIMEOUT_S)
    if health.status in ABSENT:
        nothing = f"There is no OpenAI-compatible server at {address.base}: it has neither /models nor /health."
        return listless if reply.status not in ABSENT else ProbeResult(nothing, ours=True)
    if health.status != 200:
        return unexpected(health.status, "GET /health")
    return ProbeResult(model=address.model or UNNAMED)


def is_redirect(status: int) -> bool:
    """Whether a server names another address. It is not followed: that would send the key there."""
    return 300 <= status < 400


def unexpected(status: int, request: str) -> ProbeResult:
    """The result of a probe whose request got this status."""
    if is_redirect(status):
        return ProbeResult(
            f"The endpoint redirects {request} ({status}): its URL must be the one that it redirects to."
        )
    return ProbeResult(f"The endpoint answers {status} to {request}.")


def _chosen(reply: EndpointResponse, wanted: str, before: str) -> ProbeResult:
    try:
        found = _models.decode(reply.body)
        listed = {str(model["id"]): model for model in (found.data if isinstance(found, _Models) else found)}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError):
        return ProbeResult("The endpoint's list of models cannot be read; is its URL that of an OpenAI-compatible API?")
    names = list(listed)
    if not names:
        return ProbeResult(model=wanted, listed=False) if wanted else ProbeResult(NO_MODEL)
    if wanted and wanted not in names:
        return ProbeResult(
            f"The endpoint has no model {wanted!r}; it has {', '.join(names[:NAMED_MODELS])}.", ours=True
        )
    # Servers of several models list them in no stable order.
    model = wanted or (before if before in names else names[0])
    entry = listed[model]
    owner, context_tokens = str(entry.get("owned_by")), listed_context(entry)
    return ProbeResult(model=model, owner=owner, context_tokens=context_tokens, listed=True)


async def _routes(transport: Transport, model: str) -> ProbeResult:
    """Generates nothing: the status for a body without an input shows whether a route exists."""
    routes = sorted(set(ROUTES.values()))
    body = Body(_encode({"model": model, "max_tokens": 1}))
    found = await asyncio.gather(*(transport.post(route, body, PROBE_TIMEOUT_S) for route in routes))
    if any(reply.status in KEY_STATUSES for reply in found):
        return ProbeResult(NO_KEY, ours=True)
    if any(is_loading(reply.status, reply.body) for reply in found):
        return ProbeResult(LOADING)
    present = {route for route, reply in zip(routes, found, strict=True) if reply.status not in ABSENT}
    there = frozenset(task for task, route in ROUTES.items() if route in present)
    if not there:
        return ProbeResult("The endpoint has neither /completions nor /chat/completions nor /embeddings.", ours=True)
    return ProbeResult(model=model, tasks=there)


class EndpointCapabilities:
    """Learnt from responses, for the life of the process."""

    def __init__(self) -> None:
        self.stream_usage = True
        """A stream can report its tokens."""
        self.takes_priority = False


PRIORITY_OWNER = "vllm"
"""`owned_by` of the models of a server that knows the priority field."""
PROBE_S = 10.0
_ONE_TOKEN = {"max_tokens": 1, "priority": 1}
_ASKED = (
    (Task.COMPLETE, {"prompt": "a"}),
    (Task.CHAT, {"messages": [{"role": "user", "content": "a"}]}),
)


async def takes_priority(transport: Transport, model: str, tasks: frozenset[Task]) -> bool:
    """Whether a small request with a priority is answered. Never raises."""
    found = next(((ROUTES[task], body) for task, body in _ASKED if task in tasks), None)
    if found is None:
        return False
    route, body = found
    try:
        sent = _encode({"model": model, **body, **_ONE_TOKEN})
        return (await transport.post(route, Body(sent), PROBE_S)).status == 200
    except (NoResponse, ResponseAborted, CallTimeout, InvalidOutput):
        return False


def refuses_priority(reply: EndpointResponse) -> bool:
    """Whether an error is about the field itself, as from a server that was restarted without that policy."""
    return reply.status in (400, 422, 500) and names_field(reply.body, "priority")


def refuses_usage(reply: EndpointResponse) -> bool:
    """Whether an error is about the field with which a stream is asked for its tokens."""
    return reply.status in (400, 422) and names_field(reply.body, "stream_options")
