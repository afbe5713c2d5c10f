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
from scheduler.bounded_dict import BoundedDict
from scheduler.payload import Payload, add_context
from scheduler.protocol.admission import Residence, Submission, SubmissionGroup
from scheduler.protocol.increments import IncrementTarget
from scheduler.tracing import Context

MOST_GROUPS = 10_000

_nonces = Nonces()


class SubmissionGroups:
    """The groups of recent submissions, by key, model and endpoint: most requests are of one that a moment ago had another.

    `limits`: those of an identity now. `meter`: what metered quotas charge for a request of a model. `residence`: what
    admission checks of a customer's home.
    """

    def __init__(
        self,
        limits: Callable[[Identity], EffectiveLimits],
        meter: Callable[[str], Meter],
        residence: Callable[[Identity], Residence],
    ) -> None:
        self._limits = limits
        self._meter = meter
        self._residence = residence
        self._groups: BoundedDict[tuple[str, str, str], SubmissionGroup] = BoundedDict(MOST_GROUPS)

    def of(self, identity: Identity, model: str, endpoint: str, *, background: bool) -> SubmissionGroup:
        """The group of a request."""
        limits, home = self._limits(identity), self._residence(identity)
        meter = self._meter(model) if limits.metered else None
        key = (identity.key_id, model, endpoint)
        known = self._groups.get(key)
        if (
            known is None
            or known.limits is not limits
            or known.home is not home
            or known.tier != identity.tier
            or known.background is not background
            or known.meter != meter
        ):
            known = self._groups[key] = SubmissionGroup(
                identity.tier, identity.customer_id, identity.key_id, model, limits, endpoint, meter, background, home
            )
        return known


def build_submission(
    request_id: str,
    identity: Identity,
    payload: Payload,
    group: SubmissionGroup,
    within: RequestLimits,
    *,
    trace: str | Context = "",
    terms: Terms = INTERACTIVE,
    key: str | None = None,
    stream_to: str = "",
    body: InferenceRequest | None = None,
    in_list: int = 0,
    together: int = 0,
    shared: Coalescing = NOT_SHARED,
) -> Submission:
    """The submission of one request, with the time `within` allows. `key`: its Idempotency-Key; `stream_to`: the gateway that streams its output, or "".

    `body`: the request, if it may be in its document form. `trace`: the id of the caller's trace, or the span of a sampled
    request. `in_list`: the inputs of its list; `together`: the same for its first member, else 0.
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
    total_ms, queue_ms, nonce = within.total_ms, identity.max_queue_ms or within.queue_ms, ""
    if terms is not INTERACTIVE:
        nonce = terms.nonce
        if terms.deadline_ms:
            total_ms = queue_ms = terms.deadline_ms
        if terms.at_most_ms:
            total_ms, queue_ms = min(total_ms, terms.at_most_ms), min(queue_ms, terms.at_most_ms)
    nonce = nonce or _nonces.draw()
    target = IncrementTarget(stream_to, nonce).written() if stream_to else ""
    packed = payload.encode_for(target, identity.priority, identity.customer_id)
    if not isinstance(trace, str):
        packed, trace = add_context(packed, trace), trace.trace_id
    # By position: names would cost as much as the rest of this function.
    return Submission(
        request_id,
        group,
        nonce,
        input_bytes,
        total_ms,
        queue_ms,
        packed,
        _charged(token_estimate(payload, input_bytes, document), group.limits),
        trace,
        value,
        fingerprint,
        together,
        terms.again,
        *shared,
    )


def _charged(estimate: int, limits: EffectiveLimits) -> int:
    """At most one minute's limit: a larger charge, if the request is cancelled, would block its customer for days."""
    for bucket in limits.buckets:
        if bucket.kind.settled:
            return min(estimate, max(1, int(bucket.size)))
    return estimate
