"""Which requests may share one run, or an answer that is kept: those of a model with `cache_ttl_s` whose parameters leave
nothing to chance.

What names them is a hash of all that the output depends on: the model, its version where all workers have the same one,
what is asked and with which parameters. The customer is in it, so that no customer can learn by the time of an answer what
another one asks, unless the model's `cache_scope` says that it is for all.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from gateway.catalog import ModelRow
from scheduler.payload import Payload, Task
from scheduler.protocol.admission import Submission
from scheduler.protocol.pool_view import WorkerView

SAMPLING_BACKENDS = ("openai:",)
"""Backends that sample where a request has no temperature: an endpoint's default is its own, often 0.7 or 1."""
_HASH_CHARACTERS = 32  # 128 bits.
_canonical = msgspec.msgpack.Encoder(order="deterministic").encode


def deterministic(parameters: Mapping[str, Any], *, greedy: bool) -> bool:
    """Whether equal inputs have equal outputs with these. `greedy`: as `greedy_by_default` says of the workers.

    Temperature 0 takes the likeliest token each time, and so does no temperature where the backend is greedy. Above, or
    where the client asks for a drawn text (`do_sample`), the draw can only be had again with a seed, which endpoints
    obey as well as they can and no better.
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


def one_version(workers: Sequence[WorkerView]) -> str:
    """The version of the model that all healthy workers run; "" where there is not just one, or none is known."""
    versions = {worker.model_version for worker in workers if worker.healthy}
    return versions.pop() if len(versions) == 1 else ""


def greedy_by_default(workers: Sequence[WorkerView]) -> bool:
    """Whether no worker of the pool samples without a temperature; False where no worker is known."""
    return bool(workers) and not any(worker.backend.startswith(SAMPLING_BACKENDS) for worker in workers)


def same(customer_id: str, payload: Payload, version: str) -> str:
    """What names this request and all that must have the same output; `customer_id` is "" where all customers share."""
    asked = (customer_id, payload.model, version, payload.task, payload.input, payload.parameters)
    return sha256(_canonical(asked)).hexdigest()[:_HASH_CHARACTERS]


def let_share(submission: Submission, payload: Payload, model: ModelRow, version: str, *, greedy: bool) -> None:
    """Say in the submission with whom it shares, where it may. A stream does not: its pieces come from a run of its own.

    A vector is the same each time, whatever the parameters.
    """
    if payload.stream or not (payload.task is Task.EMBED or deterministic(payload.parameters, greedy=greedy)):
        return
    customer_id = "" if model.cache_scope == "global" else submission.customer_id
    submission.same = same(customer_id, payload, version)
    submission.keep_answer_ms = model.cache_ttl_s * 1000 if version else 0
    submission.model_version = version
