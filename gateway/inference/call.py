"""The data of one call of an inference endpoint: a single request, a list, a stream, a job, or a line of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from multidict import CIMultiDictProxy

from gateway.api.format import InferenceRequest
from gateway.api.inference import ApiFormat
from gateway.http.retry_header import is_retry
from gateway.inference.pending import PendingRequest
from gateway.inference.traces import trace_id
from ledger.catalog.api_key import KeyParts
from ledger.catalog.snapshot import Identity
from scheduler.request_id import new_request_id

if TYPE_CHECKING:
    from gateway.inference.pipeline import InferencePipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a transport decides about the submissions of its calls. Times are in ms from the start of the call; 0: no rule.

    `deadline_ms` replaces the deadline and the queue time of the tier, `at_most_ms` shortens them. `again`: Redis may have lost
    the request, which was accepted before. `nonce`: instead of a random one. `fingerprint`: what must be equal, beside the payload,
    if the Idempotency-Key is used again. `beside_redis`: a large chat is a file, which is removed with its pending request.
    """

    deadline_ms: int = 0
    at_most_ms: int = 0
    background: bool = False
    again: bool = False
    nonce: str = ""
    fingerprint: tuple[str, ...] = ()
    beside_redis: bool = True


INTERACTIVE = Terms()
"""The terms of calls whose client waits for the response, and sets no deadline."""


class KnownHeaders(NamedTuple):
    """The headers of an authenticated call, and what its stages read from them. `key`: its API key, parsed."""

    headers: CIMultiDictProxy[str]
    authorization: Sequence[str]
    key: KeyParts
    is_retry: bool
    trace_id: str


class InferenceCall:
    """One call. `created`: when its id was created. All times are monotonic seconds.

    `pipeline` is None until the call is placed (gateway/inference/entry.py), `pending` until its pending requests are built.
    """

    __slots__ = (
        "api_format",
        "body",
        "created",
        "headers",
        "identity",
        "is_retry",
        "key",
        "large",
        "passed_on",
        "pending",
        "pipeline",
        "replayed",
        "request_id",
        "size",
        "started",
        "terms",
        "trace_id",
    )

    identity: Identity  # Set by authentication.
    started: float  # Set once the body was read: when the deadline begins.
    body: InferenceRequest  # Set by decoding,
    size: int  # with the bytes of the body as it was sent.
    large: list[bytes | memoryview] | None  # Set when it is built: the chat, if it becomes a file beside Redis,
    passed_on: bool  # and whether the output will be lines of a model's server.

    def __init__(
        self,
        api_format: ApiFormat,
        request_id: str,
        headers: CIMultiDictProxy[str],
        created: float,
        known: KnownHeaders | None = None,
    ) -> None:
        """`known`: what is known of the headers, if they were read before."""
        self.api_format = api_format
        self.request_id = request_id
        self.headers = headers
        self.created = created
        if known is None:
            self.is_retry, self.trace_id = is_retry(headers), trace_id(headers)
        else:
            self.is_retry, self.trace_id = known.is_retry, known.trace_id
        self.terms = INTERACTIVE
        self.key: str | None = None  # The Idempotency-Key.
        self.pipeline: InferencePipeline | None = None
        self.pending: PendingRequest | None = None  # Of a list the first one.
        self.replayed = False  # Whether a reply is the stored one of an Idempotency-Key.

    def member_id(self, index: int) -> str:
        """The request id of a list member. The first member has that of the call."""
        return new_request_id() if index else self.request_id
