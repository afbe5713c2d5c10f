"""The capabilities learnt about an endpoint: token counts of streams, and priorities.

Whether a server accepts the tier's `priority`, by which vLLM orders its queue (lower is sooner), is tested once with one
token: a vLLM without `--scheduling-policy priority` rejects every request that has one. Other servers are not tested: some
interpret the field the other way round, and some bill for the test.
"""

import msgspec

from gpu_pool.backends.openai_endpoint.client import CALL_FAILURES, EndpointResponse, Transport
from gpu_pool.backends.openai_endpoint.errors import names_field
from gpu_pool.backends.openai_endpoint.messages import ROUTES, Body
from scheduler.payload import Task

PRIORITY_OWNER = "vllm"
"""`owned_by` of the models of a server that knows the priority field."""
PROBE_S = 10.0
_ONE_TOKEN = {"max_tokens": 1, "priority": 1}
_ASKED = (
    (Task.COMPLETE, {"prompt": "a"}),
    (Task.CHAT, {"messages": [{"role": "user", "content": "a"}]}),
)


class EndpointCapabilities:
    """Learnt from responses, for the life of the process."""

    def __init__(self) -> None:
        self.stream_usage = True
        """A stream can report its tokens."""
        self.takes_priority = False


async def takes_priority(transport: Transport, model: str, tasks: frozenset[Task]) -> bool:
    """Whether a small request with a priority is answered. Never raises."""
    found = next(((ROUTES[task], body) for task, body in _ASKED if task in tasks), None)
    if found is None:
        return False
    route, body = found
    try:
        sent = msgspec.json.encode({"model": model, **body, **_ONE_TOKEN})
        return (await transport.post(route, Body(sent), PROBE_S)).status == 200
    except CALL_FAILURES:
        return False


def refuses_priority(reply: EndpointResponse) -> bool:
    """Whether an error is about the field itself, as from a server that was restarted without that policy."""
    return reply.status in (400, 422, 500) and names_field(reply.body, "priority")


def refuses_usage(reply: EndpointResponse) -> bool:
    """Whether an error is about the field with which a stream is asked for its tokens."""
    return reply.status in (400, 422) and names_field(reply.body, "stream_options")
