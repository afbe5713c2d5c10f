"""Request coalescing: requests may share one run, or a cached result.

They may if the model has `cache_ttl_s` and their parameters make the output deterministic. The coalescing key is a hash of
everything that the output depends on. It contains the customer, so that response times do not reveal the requests of other
customers, unless the model's `cache_scope` is `global`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from gateway.inference.hashing import canonical, hash_of
from ledger.catalog.snapshot import Model
from scheduler.payload import Payload, Task


class Coalescing(NamedTuple):
    """The coalescing key, how long the result may be cached, and of which version of the model it must be then."""

    key: str = ""
    keep_ms: int = 0
    version: str = ""


NOT_SHARED = Coalescing()


def deterministic(parameters: Mapping[str, Any], *, greedy: bool) -> bool:
    """Whether equal inputs have equal outputs with these parameters. `greedy`: the result of `greedy_by_default`.

    Temperature 0 selects the most likely token each time, as does an absent temperature if the backend is greedy. A
    sampled output (higher temperature, or `do_sample`) is reproducible only with a seed, which endpoints honour only as
    best effort.
    """
    if not greedy:
        temperature = parameters.get("temperature")
        return type(temperature) in (int, float) and temperature == 0 and not parameters.get("do_sample")
    seed = parameters.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool):
        return True
    temperature = parameters.get("temperature")
    likeliest = temperature is None or (type(temperature) in (int, float) and temperature == 0)
    return likeliest and not parameters.get("do_sample")


def coalescing_key(customer_id: str, payload: Payload, version: str) -> str:
    """Equal for requests with the same output. `customer_id` is "" if all customers share."""
    parts = (customer_id, payload.model, version, payload.task, payload.input, payload.parameters)
    return hash_of(canonical(parts))


def coalescing(customer_id: str, payload: Payload, model: Model, version: str, *, greedy: bool) -> Coalescing:
    """How a request of this customer shares, if its output is deterministic and it is not a stream.

    A stream needs its own run for its increments. A vector is deterministic with any parameters.
    """
    if payload.stream or not (payload.task is Task.EMBED or deterministic(payload.parameters, greedy=greedy)):
        return NOT_SHARED
    key = coalescing_key("" if model.cache_scope == "global" else customer_id, payload, version)
    return Coalescing(key, model.cache_ttl_s * 1000 if version else 0, version)
