"""Whether an endpoint takes batches now: pauses, probes, and the capabilities that it turned out to have.

Closed while the server asks to be left alone, and while it is unavailable or rejects us. After the first it opens by
itself; after the second when a probe succeeds. Each change is reported. A probe checks address, key, model and routes,
and generates no text.

Capabilities are lists of prompts, tokens at the end of a stream, and priorities. Whether a server takes the tier's
`priority`, by which vLLM orders what it holds (lower is sooner), is asked once, by one token: a vLLM without
`--scheduling-policy priority` refuses every request that has one. Others are not asked: some read the field the other
way round, and some bill for the question.
"""

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

import msgspec

from gpu_pool.backends.backend import InvalidOutput
from gpu_pool.backends.openai_endpoint.client import BrokenOff, EndpointResponse, NoAnswer, TooSlow, Transport
from gpu_pool.backends.openai_endpoint.messages import ROUTES
from gpu_pool.backends.openai_endpoint.settings import EndpointUrl
from scheduler.payload import Task

STRIKES = 3
"""So many batches in a row that reached nobody, and no more are tried until a look at the endpoint succeeds."""
FIRST_S, LONGEST_BUSY_S, LONGEST_LOOK_S = 0.25, 8.0, 5.0
BRIEF_S = 1.5
"""An endpoint that answered and then asked to be left alone for so long in all, and no longer, is busy; beyond that it is as
good as away. Gateways wait for two seconds (gateway/limits/capacity.py) before they refuse for want of GPUs: they hear of it earlier.
"""


class Pauses:
    """Seconds to wait, longer each time; one batch that goes well, and everything begins anew."""

    def __init__(self) -> None:
        self.worked()

    def worked(self) -> None:
        """A batch was answered."""
        self._failed = 0
        self._busy_s = self._look_s = FIRST_S
        self._left_alone_s = 0.0

    def failed(self) -> bool:
        """A batch reached nobody; whether that is enough."""
        self._failed += 1
        return self._failed >= STRIKES

    def busy_s(self, asked_s: float | None) -> float:
        """The server takes nothing: what it asks for, else ever longer."""
        if asked_s is not None:
            return asked_s
        wait_s, self._busy_s = self._busy_s, min(LONGEST_BUSY_S, 2 * self._busy_s)
        return wait_s

    def brief(self, wait_s: float) -> bool:
        """The server is left alone for so long again; whether all of it since the last answer is but a short pause."""
        self._left_alone_s += wait_s
        return self._left_alone_s <= BRIEF_S

    def look_s(self) -> float:
        """Until the next look at an endpoint that is away."""
        wait_s, self._look_s = self._look_s, min(LONGEST_LOOK_S, 2 * self._look_s)
        return wait_s


Tell = Callable[[bool, str, bool], None]
"""Told whether batches are wanted, and if not, why in one sentence, and whether for a moment only."""

BUSY = "The endpoint takes no more requests for now."


def _nobody(wanted: bool, why: str, brief: bool) -> None:  # noqa: FBT001 - one who is told
    """Whoever has no supervisor to tell."""


class EndpointAvailability:
    """`look` returns why the endpoint cannot be used, or "" where it can."""

    def __init__(self, look: Callable[[], Awaitable[str]]) -> None:
        self._look = look
        self._pauses = Pauses()
        self._work: asyncio.Task[None] | None = None
        self.tell: Tell = _nobody
        self.shut = ""
        """Why no batch is wanted; "": the door is open."""

    def worked(self) -> None:
        """A batch was answered."""
        self._pauses.worked()

    def busy(self, asked_s: float | None) -> None:
        """The server wants to be left alone, for so many seconds if it said so."""
        if not self.shut:
            wait_s = self._pauses.busy_s(asked_s)
            self._shut(BUSY, self._wait(wait_s), brief=self._pauses.brief(wait_s))

    def failed(self, reason: str) -> None:
        """A batch was lost, or reached nobody."""
        if self._pauses.failed():
            self.broken(reason)

    def broken(self, reason: str) -> None:
        """Nothing will go well before something changes there."""
        if not self.shut:
            self._shut(reason, self._wait_for_it(), brief=False)

    async def close(self) -> None:
        """Stop waiting."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    def _shut(self, reason: str, work: Coroutine[Any, Any, None], *, brief: bool) -> None:
        self.shut = reason
        self._work = asyncio.create_task(work, name="door")
        self.tell(False, reason, brief)  # noqa: FBT003 - one of two words

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._open()

    async def _wait_for_it(self) -> None:
        while True:
            await asyncio.sleep(self._pauses.look_s())
            if await self._is_well():
                self._open()
                return

    async def _is_well(self) -> bool:
        try:
            return not await self._look()
        except Exception:  # noqa: BLE001 - whatever it is, the next look may go well; without one the door stays shut
            traceback.print_exc()
            return False

    def _open(self) -> None:
        self.shut = ""
        self.tell(True, "", False)  # noqa: FBT003 - see above


LOOK_S = 2.0
NAMED_MODELS = 5  # Of those that a server has, in a sentence.
UNNAMED = "default"  # What a server that lists no model is told; such servers do not look at it.
_KEY = frozenset({401, 403, 407})
_ABSENT = frozenset({404, 405, 501})
_NO_KEY = "The endpoint refuses the key: set TIERLANE_ENDPOINT_API_KEY."


class Look(NamedTuple):
    """What was seen. `fault`: why it cannot be used, "" where it can; `ours`: only another setting helps."""

    fault: str = ""
    ours: bool = False
    model: str = ""
    tasks: frozenset[Task] = frozenset()
    owner: str = ""


class _Listed(msgspec.Struct):
    id: str
    owned_by: Any = None  # "vllm" where it is one; servers have all sorts of things there.


class _Models(msgspec.Struct):
    data: list[_Listed]


_models = msgspec.json.Decoder(_Models)


async def look(transport: Transport, address: EndpointUrl, before: str = "") -> Look:
    """`before`: the model that was chosen last, which stays where the server still has it. Never raises."""
    try:
        found = await _model(transport, address, before)
        if found.fault:
            return found
        return (await _routes(transport, found.model))._replace(owner=found.owner)
    except (NoAnswer, BrokenOff, TooSlow, InvalidOutput) as error:
        return Look(str(error))


async def _model(transport: Transport, address: EndpointUrl, before: str) -> Look:
    reply = await transport.get(address.base + "/models", LOOK_S)
    if reply.status in _KEY:
        return Look(_NO_KEY, ours=True)
    if reply.status == 200:
        return _chosen(reply, address.model, before)
    # Servers of one model may list none, and one that loads models as they are asked for may fail to list them.
    listless = Look(f"The endpoint answers {reply.status} when it is asked for its models.")
    if reply.status not in _ABSENT and not address.model:
        return listless
    health = await transport.get(address.root + "/health", LOOK_S)
    if health.status in _ABSENT and reply.status not in _ABSENT:
        return listless
    if health.status in _ABSENT:
        return Look(f"There is no OpenAI-style server at {address.base}: it has neither models nor health.", ours=True)
    return Look(
        "" if health.status == 200 else f"The endpoint's health says {health.status}.", model=address.model or UNNAMED
    )


def _chosen(reply: EndpointResponse, wanted: str, before: str) -> Look:
    try:
        owners = {model.id: model.owned_by for model in _models.decode(reply.body).data}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Look("The endpoint's list of models cannot be read.")
    names = list(owners)
    if not names:
        return Look(model=wanted) if wanted else Look("The endpoint has no model yet.")
    if wanted and wanted not in names:
        return Look(f"The endpoint has no model {wanted!r}, but {', '.join(names[:NAMED_MODELS])}.", ours=True)
    # Servers of several models list them in no lasting order.
    model = wanted or (before if before in names else names[0])
    return Look(model=model, owner=str(owners[model]))


async def _routes(transport: Transport, model: str) -> Look:
    """Asks for nothing: what a route says to a body without an input tells whether it is there."""
    tasks = list(ROUTES)
    found = await asyncio.gather(*(_status(transport, ROUTES[task], model) for task in tasks))
    if any(status in _KEY for status in found):
        return Look(_NO_KEY, ours=True)
    there = frozenset(task for task, status in zip(tasks, found, strict=True) if status not in _ABSENT)
    if not there:
        return Look("The endpoint neither completes nor chats nor embeds.", ours=True)
    return Look(model=model, tasks=there)


async def _status(transport: Transport, route: str, model: str) -> int:
    reply = await transport.post(route, {"model": model, "max_tokens": 1}, LOOK_S)
    return reply.status


ODD_LISTS = 3
"""So many lists in a row that were answered wrongly, each of whose texts alone went well, and no more are sent."""


class EndpointCapabilities:
    """Learnt from answers, for the life of the process."""

    def __init__(self) -> None:
        self.takes_lists = True
        self.tells_usage = True
        """A stream may be asked for its tokens."""
        self.takes_priority = False
        self._odd = 0

    def list_went_well(self) -> None:
        """All of it was answered."""
        self._odd = 0

    def list_failed(self, *, refused: bool, alone_went_well: bool) -> None:
        """It was not answered, or wrongly. `refused`: as a bad request; `alone_went_well`: each text by itself was."""
        if not alone_went_well:
            return  # One of the texts was to blame.
        self._odd += 1
        if refused or self._odd >= ODD_LISTS:
            self.takes_lists = False


ORDERS = "vllm"
"""Who owns the models of a server that knows the field, as its list of models says."""
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
        return (await transport.post(route, {"model": model, **body, **_ONE_TOKEN}, PROBE_S)).status == 200
    except (NoAnswer, BrokenOff, TooSlow, InvalidOutput):
        return False


def refuses_priority(reply: EndpointResponse) -> bool:
    """Whether a refusal is of the field itself, as by a server that was started anew without that policy."""
    return reply.status in (400, 422, 500) and b"priority" in reply.body.lower()
