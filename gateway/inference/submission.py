"""From a decoded request to its submission: limits, token estimate, deadline, trace, coalescing key, Idempotency-Key.

Requests may share one run, or a cached result, if the model has `cache_ttl_s` and their parameters make the output
deterministic. The coalescing key is a hash of everything that the output depends on. It contains the customer, so that
response times do not reveal the requests of other customers, unless the model's `cache_scope` is `global`.

An Idempotency-Key (draft-ietf-httpapi-idempotency-key-header) may be quoted or bare; both forms name the same key. Keys
belong to a customer. Only hashes are stored, because clients put order numbers and personal data into them. A replayed
response has the id of the stored request in its body and `x-request-id`, so that support can find it. The replay itself
was not accepted and has no audit row.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
from multidict import CIMultiDictProxy

from gateway.api.format import DocumentForm, InferenceRequest
from gateway.catalog import IdentityView, ModelRow
from ratelimit.limits import EffectiveLimits
from ratelimit.quotas import Meter
from ratelimit.request_limits import ENDPOINT, RequestLimits
from scheduler.body_store import BodyStore
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.fault_log import log_fault
from scheduler.payload import DOCUMENTS, Payload, Task, encode_payload
from scheduler.protocol.admission import Submission
from scheduler.protocol.increments import IncrementTarget
from scheduler.protocol.pool_view import WorkerView
from scheduler.protocol.replies import Results, StoredReply
from scheduler.token_estimates import estimate

SAMPLING_BACKENDS = (ENDPOINT,)
"""Backends that sample if a request has no temperature: the default of an endpoint is often 0.7 or 1."""
_HASH_CHARACTERS = 32  # 128 bits.
_canonical = msgspec.msgpack.Encoder(order="deterministic").encode


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


def one_version(workers: Sequence[WorkerView]) -> str:
    """The model version that all healthy workers run; "" if they run several versions or none is known."""
    versions = {worker.model_version for worker in workers if worker.healthy}
    return versions.pop() if len(versions) == 1 else ""


def passes_chats_on(workers: Sequence[WorkerView]) -> bool:
    """Whether every one of these workers passes chats on to a server."""
    return all(worker.backend.startswith(SAMPLING_BACKENDS) for worker in workers)


def greedy_by_default(workers: Sequence[WorkerView]) -> bool:
    """Whether no worker of the pool samples without a temperature; False if no worker is known."""
    return bool(workers) and not any(worker.backend.startswith(SAMPLING_BACKENDS) for worker in workers)


def same(customer_id: str, payload: Payload, version: str) -> str:
    """The coalescing key: equal for requests with the same output. `customer_id` is "" if all customers share."""
    parts = (customer_id, payload.model, version, payload.task, payload.input, payload.parameters)
    return sha256(_canonical(parts)).hexdigest()[:_HASH_CHARACTERS]


def let_share(submission: Submission, payload: Payload, model: ModelRow, version: str, *, greedy: bool) -> None:
    """Set the coalescing key of the submission, if its output is deterministic and it is not a stream.

    A stream needs its own run for its increments. A vector is deterministic with any parameters.
    """
    if payload.stream or not (payload.task is Task.EMBED or deterministic(payload.parameters, greedy=greedy)):
        return
    customer_id = "" if model.cache_scope == "global" else submission.customer_id
    submission.same = same(customer_id, payload, version)
    submission.keep_answer_ms = model.cache_ttl_s * 1000 if version else 0
    submission.model_version = version


HEADER = "Idempotency-Key"
MAX_CHARACTERS = 255
_QUOTED = re.compile(r'"((?:[!#-\[\]-~]|\\["\\])*)"')
_BARE = re.compile(r"[!#-~][!-~]*")
_ANYWHERE = ""  # Keeps fingerprints equal to those of earlier versions, which hashed one more field.


class Idempotency(NamedTuple):
    """The key, unique over all customers, and the fingerprint of its body. Both are empty if no key was sent."""

    value: str = ""
    fingerprint: str = ""


NONE = Idempotency()


def idempotency_key(headers: CIMultiDictProxy[str]) -> str | None:
    """The key that the client sent, or None. Raises RequestError that names the header."""
    values = headers.getall(HEADER, None)
    if values is None:
        return None
    if len(values) != 1:
        raise _invalid(f"Send at most one {HEADER} header.")
    key = _parsed(values[0])
    if not 1 <= len(key) <= MAX_CHARACTERS:
        raise _invalid(f"{HEADER} must be 1 to {MAX_CHARACTERS} visible ASCII characters, bare or in double quotes.")
    return key


def idempotency(customer_id: str, key: str, payload: Payload) -> Idempotency:
    """The stored key and the body's fingerprint. White space, member order and `stream` do not change the fingerprint."""
    parts = (payload.model, payload.input, payload.parameters, payload.task, _ANYWHERE)
    return Idempotency(f"{customer_id}:{_hash(key.encode())}", _hash(_canonical(parts)))


def with_more(fingerprint: str, more: str) -> str:
    """The fingerprint of a body that differs by `more` than the model's payload."""
    return _hash(f"{fingerprint} {more}".encode())


def _parsed(value: str) -> str:
    """The characters of a key; "" if it is not valid."""
    if quoted := _QUOTED.fullmatch(value):
        return re.sub(r"\\(.)", r"\1", quoted[1])
    return value if _BARE.fullmatch(value) else ""


def _hash(data: bytes) -> str:
    return sha256(data).hexdigest()[:_HASH_CHARACTERS]


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, message, HEADER)


NONCE_BYTES = 8
DEFAULT_OUTPUT_TOKENS = 16
MOST_OUTPUT_TOKENS = 2**31  # Larger values would lose digits in a bucket that is stored as a float.
_OUTPUT_FIELDS = ("max_tokens", "max_new_tokens")


class Nonces:
    """Random texts of 16 hexadecimal digits. One system call draws many, because a call costs as much as decoding a request."""

    def __init__(self, a_call: int = 512) -> None:
        self._a_call = a_call
        self._drawn: list[str] = []

    def draw(self) -> str:
        """A nonce that was not returned before."""
        if not self._drawn:
            digits = os.urandom(NONCE_BYTES * self._a_call).hex()
            self._drawn = [digits[i : i + 2 * NONCE_BYTES] for i in range(0, len(digits), 2 * NONCE_BYTES)]
        return self._drawn.pop()


_nonces = Nonces()


def build_submission(
    request_id: str,
    identity: IdentityView,
    payload: Payload,
    limits: EffectiveLimits,
    *,
    within: RequestLimits,
    meter: Callable[[str], Meter] = lambda _model: Meter(),
    endpoint: str = "",
    key: str | None = None,
    trace: str = "",
    stream_to: str = "",
    body: InferenceRequest | None = None,
) -> Submission:
    """The submission of one request, with the time `within` allows. `key`: its Idempotency-Key; `stream_to`: the gateway that streams its output, or "".

    `body`: the request, if it may be in its document form. `meter` returns what metered quotas charge for a request of a
    model.
    """
    document = None if body is None else body.document
    value, fingerprint = NONE
    if key is not None:
        identified = payload if body is None else body.identified(payload)
        value, fingerprint = idempotency(identity.customer_id, key, identified)
    named = document is not None and payload.input == request_id  # It is a file beside Redis.
    input_bytes = document.size if document is not None and named else size_of(payload.input)
    nonce = _nonces.draw()
    address = IncrementTarget(stream_to, nonce).written() if stream_to else ""
    return Submission(
        id=request_id,
        tier=identity.tier,
        customer_id=identity.customer_id,
        api_key_id=identity.key_id,
        nonce=nonce,
        model=payload.model,
        input_bytes=input_bytes,
        total_ms=within.total_ms,
        queue_ms=identity.max_queue_ms or within.queue_ms,
        limits=limits,
        trace_id=trace,
        endpoint=endpoint,
        idempotency=value,
        fingerprint=fingerprint,
        tokens=_charged(token_estimate(payload, input_bytes, document), limits),
        meter=meter(payload.model) if limits.metered else None,
        body=encode_payload(payload.with_target(address, identity.priority, identity.customer_id)),
    )


NO_ROOM = "Too many large requests are in progress; try again soon."


def size_of(text: str) -> int:
    """Bytes of the text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def with_document(
    payload: Payload, body: InferenceRequest, request_id: str, store: BodyStore | None
) -> tuple[Payload, list[bytes | memoryview] | None]:
    """The payload with the chat that is passed on. If it belongs into a file of the store, its name, and the chat beside it."""
    document = body.document
    if document is None or payload.task is not Task.CHAT_DOCUMENT:
        return payload, None
    if store is not None and store.takes(document.size):
        return payload.with_input(request_id), document.parts or [payload.input.encode()]
    return (payload.with_input(document.text) if document.parts else payload), None


def store_chat(request_id: str, parts: list[bytes | memoryview], store: BodyStore) -> None:
    """Write a large chat, and free its memory. Raises RequestError `no_capacity` if there is no room for it."""
    if not store.put(request_id, parts):
        raise RequestError(ErrorCode.NO_CAPACITY, NO_ROOM)
    parts.clear()


def token_estimate(payload: Payload, input_bytes: int, document: DocumentForm | None = None) -> int:
    """Tokens charged until the usage is known: a quarter of the input's bytes, plus the maximum output of each choice."""
    choices = 1 if document is None or payload.task not in DOCUMENTS else document.choices
    return input_tokens(payload, input_bytes, document) + _output_tokens(payload) * choices


def input_tokens(payload: Payload, input_bytes: int, document: DocumentForm | None = None) -> int:
    """The part of the estimate for the input."""
    read = estimate(input_bytes)
    return read if document is None or payload.task not in DOCUMENTS else max(1, read + document.tokens)


def _charged(estimate: int, limits: EffectiveLimits) -> int:
    """At most one minute's limit: a larger charge, if the request is cancelled, would block its customer for days."""
    for bucket in limits.buckets:
        if bucket.kind.settled:
            return min(estimate, max(1, int(bucket.size)))
    return estimate


def _output_tokens(payload: Payload) -> int:
    for name in _OUTPUT_FIELDS:
        wanted = payload.parameters.get(name)
        # 500.0 is an integer in JSON, and servers accept "500"; `type` excludes True, which is an int in Python.
        if type(wanted) is str and wanted.isascii() and wanted.isdigit():
            wanted = float(wanted)
        if type(wanted) is int or type(wanted) is float:
            return math.ceil(min(max(0, wanted), MOST_OUTPUT_TOKENS))
    return DEFAULT_OUTPUT_TOKENS


def is_retry(headers: CIMultiDictProxy[str]) -> bool:
    """Whether OpenAI's client marks this as a retry: `x-stainless-retry-count` over 0."""
    count = headers.get("x-stainless-retry-count")
    return count is not None and count.isascii() and count.isdigit() and count.strip("0") != ""


REPLAYED = ("Idempotent-Replayed", "true")


async def stored_reply(results: Results, request_id: str, customer_id: str) -> StoredReply:
    """The stored reply. Raises RequestError `no_capacity` if it cannot be read now.

    The nonce is that of the first call, so only the customer can be compared; the stored key contains the customer too.
    """
    try:
        stored = await results.stored(request_id)
    except RedisUnavailable:
        stored = None
    if stored is not None and stored.reply.customer_id != customer_id:
        log_fault("a stored reply belongs to another customer", None, request_id=request_id)
        stored = None
    if stored is None:
        raise RequestError(ErrorCode.NO_CAPACITY)
    return stored
