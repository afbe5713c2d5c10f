"""A look at an endpoint: is it there, does it take our key, which model has it, and which routes. It makes no text."""

import asyncio
from typing import Any, NamedTuple

import msgspec

from gpu_pool.backends.backend import InvalidOutput
from gpu_pool.backends.openai_endpoint.client import BrokenOff, NoAnswer, Reply, TooSlow, Transport
from gpu_pool.backends.openai_endpoint.settings import Address
from gpu_pool.endpoint.bodies import ROUTES
from scheduler.payload import Task

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


async def look(transport: Transport, address: Address, before: str = "") -> Look:
    """`before`: the model that was chosen last, which stays where the server still has it. Never raises."""
    try:
        found = await _model(transport, address, before)
        if found.fault:
            return found
        return (await _routes(transport, found.model))._replace(owner=found.owner)
    except (NoAnswer, BrokenOff, TooSlow, InvalidOutput) as error:
        return Look(str(error))


async def _model(transport: Transport, address: Address, before: str) -> Look:
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


def _chosen(reply: Reply, wanted: str, before: str) -> Look:
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
