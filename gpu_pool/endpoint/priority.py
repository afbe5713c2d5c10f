"""Whether a server takes the tier's `priority`, by which vLLM orders what it holds: asked once, by one token.

Lower is sooner there, as with tiers. A vLLM without `--scheduling-policy priority` refuses every request that has one.
Others are not asked: some read the field the other way round, and some bill for the question.
"""

from gpu_pool.backends.backend import InvalidOutput
from gpu_pool.backends.openai_endpoint.client import BrokenOff, NoAnswer, Reply, TooSlow, Transport
from gpu_pool.endpoint.bodies import ROUTES
from scheduler.payload import Task

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


def refuses_priority(reply: Reply) -> bool:
    """Whether a refusal is of the field itself, as by a server that was started anew without that policy."""
    return reply.status in (400, 422, 500) and b"priority" in reply.body.lower()
