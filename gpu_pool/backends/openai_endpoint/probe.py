"""A probe of an endpoint: address, key, model and routes. It generates no text."""

import asyncio
from typing import Any, NamedTuple

import msgspec

from gpu_pool.backends.openai_endpoint.client import EndpointResponse, Transport
from gpu_pool.backends.openai_endpoint.context import listed_context, read_context
from gpu_pool.backends.openai_endpoint.errors import KEY_STATUSES, LOADING, NO_KEY, is_loading
from gpu_pool.backends.openai_endpoint.faults import EndpointFault, FaultCause
from gpu_pool.backends.openai_endpoint.messages import ROUTES, Body
from gpu_pool.backends.openai_endpoint.settings import EndpointUrl
from scheduler.payload import Task

PROBE_TIMEOUT_S = 2.0
NAMED_MODELS = 5  # Names listed in an error message.
UNNAMED = "default"  # The model name for servers that list none; they ignore it.
ABSENT = frozenset({404, 405, 501})
NO_MODEL = EndpointFault("The endpoint has no model yet.", FaultCause.MODEL_MISSING)


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


async def probe(transport: Transport, address: EndpointUrl, before: str = "") -> ProbeResult:
    """`before`: the model chosen last, which is kept if the server still has it. Raises CALL_FAILURES."""
    found = await _model(transport, address, before)
    if found.fault:
        return found
    tokens = found.context_tokens or await read_context(transport, address.root)

    # This generates nothing: the status for a body without an input shows whether a route exists.
    routes = sorted(set(ROUTES.values()))
    body = Body(msgspec.json.encode({"model": found.model, "max_tokens": 1}))
    replies = await asyncio.gather(*(transport.post(route, body, PROBE_TIMEOUT_S) for route in routes))
    if any(reply.status in KEY_STATUSES for reply in replies):
        return ProbeResult(NO_KEY, ours=True)
    if any(is_loading(reply.status, reply.body) for reply in replies):
        return ProbeResult(LOADING)
    present = {route for route, reply in zip(routes, replies, strict=True) if reply.status not in ABSENT}
    tasks = frozenset(task for task, route in ROUTES.items() if route in present)
    if not tasks:
        none = "The endpoint has neither /completions nor /chat/completions nor /embeddings."
        return ProbeResult(EndpointFault(none, FaultCause.WRONG_SERVER), ours=True)
    return found._replace(tasks=tasks, context_tokens=tokens)


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
        words = f"There is no OpenAI-compatible server at {address.base}: it has neither /models nor /health."
        nothing = EndpointFault(words, FaultCause.WRONG_SERVER)
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
        redirects = f"The endpoint redirects {request} ({status}): its URL must be the one that it redirects to."
        return ProbeResult(EndpointFault(redirects, FaultCause.WRONG_SERVER))
    return ProbeResult(EndpointFault(f"The endpoint answers {status} to {request}.", FaultCause.STATUS))


def _chosen(reply: EndpointResponse, wanted: str, before: str) -> ProbeResult:
    try:
        found = _models.decode(reply.body)
        listed = {str(model["id"]): model for model in (found.data if isinstance(found, _Models) else found)}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError):
        unreadable = "The endpoint's list of models cannot be read; is its URL that of an OpenAI-compatible API?"
        return ProbeResult(EndpointFault(unreadable, FaultCause.WRONG_SERVER))
    names = list(listed)
    if not names:
        return ProbeResult(model=wanted, listed=False) if wanted else ProbeResult(NO_MODEL)
    if wanted and wanted not in names:
        missing = f"The endpoint has no model {wanted!r}; it has {', '.join(names[:NAMED_MODELS])}."
        return ProbeResult(EndpointFault(missing, FaultCause.MODEL_MISSING), ours=True)
    # Servers of several models list them in no stable order.
    model = wanted or (before if before in names else names[0])
    entry = listed[model]
    owner, context_tokens = str(entry.get("owned_by")), listed_context(entry)
    return ProbeResult(model=model, owner=owner, context_tokens=context_tokens, listed=True)
