"""From a decoded request to its submission: limits, tokens, deadline, trace, and Idempotency-Key."""

from collections.abc import Callable

from gateway.api.format import InferenceRequest
from gateway.inference.call import INTERACTIVE, Terms
from gateway.inference.coalescing import NOT_SHARED, Coalescing
from gateway.inference.idempotency import idempotency, with_more
from gateway.inference.nonces import Nonces
from gateway.inference.token_estimate import token_estimate
from ledger.catalog.snapshot import Identity
from ratelimit.limits import EffectiveLimits
from ratelimit.quotas import Meter
from ratelimit.request_limits import RequestLimits
from scheduler.payload import Payload, add_context, encode_payload
from scheduler.protocol.admission import Residence, Submission
from scheduler.protocol.increments import IncrementTarget
from scheduler.tracing import Context

_nonces = Nonces()


def build_submission(
    request_id: str,
    identity: Identity,
    payload: Payload,
    limits: EffectiveLimits,
    *,
    within: RequestLimits,
    meter: Callable[[str], Meter] = lambda _model: Meter(),
    endpoint: str = "",
    key: str | None = None,
    trace: str | Context = "",
    stream_to: str = "",
    body: InferenceRequest | None = None,
    terms: Terms = INTERACTIVE,
    in_list: int = 0,
    together: int = 0,
    home: Residence = Residence.ONLY,
    shared: Coalescing = NOT_SHARED,
) -> Submission:
    """The submission of one request, with the time `within` allows. `key`: its Idempotency-Key; `stream_to`: the gateway that streams its output, or "".

    `body`: the request, if it may be in its document form. `meter` returns what metered quotas charge for a request of a
    model. `trace`: the id of the caller's trace, or the span of a sampled request. `in_list`: the inputs of its list;
    `together`: the same for its first member, else 0.
    """
    document = None if body is None else body.document
    value = fingerprint = ""
    if key is not None:
        identified = payload if body is None else body.identified(payload)
        value, fingerprint = idempotency(identity.customer_id, key, identified)
        for more in (*((str(in_list),) if in_list else ()), *terms.fingerprint):
            fingerprint = with_more(fingerprint, more)
    if document is not None and payload.input == request_id:  # It is a file beside Redis.
        input_bytes = document.size
    else:
        input_bytes = len(payload.input) if payload.input.isascii() else len(payload.input.encode())
    total_ms, queue_ms = within.total_ms, identity.max_queue_ms or within.queue_ms
    if terms.deadline_ms:
        total_ms = queue_ms = terms.deadline_ms
    if terms.at_most_ms:
        total_ms, queue_ms = min(total_ms, terms.at_most_ms), min(queue_ms, terms.at_most_ms)
    nonce = terms.nonce or _nonces.draw()
    address = IncrementTarget(stream_to, nonce).written() if stream_to else ""
    packed = encode_payload(payload.with_target(address, identity.priority, identity.customer_id))
    return Submission(
        id=request_id,
        tier=identity.tier,
        customer_id=identity.customer_id,
        api_key_id=identity.key_id,
        nonce=nonce,
        model=payload.model,
        input_bytes=input_bytes,
        total_ms=total_ms,
        queue_ms=queue_ms,
        limits=limits,
        trace_id=trace if isinstance(trace, str) else trace.trace_id,
        endpoint=endpoint,
        idempotency=value,
        fingerprint=fingerprint,
        tokens=_charged(token_estimate(payload, input_bytes, document), limits),
        meter=meter(payload.model) if limits.metered else None,
        background=terms.background,
        together=together,
        again=terms.again,
        home=home,
        same=shared.key,
        keep_answer_ms=shared.keep_ms,
        model_version=shared.version,
        body=packed if isinstance(trace, str) else add_context(packed, trace),
    )


def _charged(estimate: int, limits: EffectiveLimits) -> int:
    """At most one minute's limit: a larger charge, if the request is cancelled, would block its customer for days."""
    for bucket in limits.buckets:
        if bucket.kind.settled:
            return min(estimate, max(1, int(bucket.size)))
    return estimate
