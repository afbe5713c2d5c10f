"""The stages of a call before it has a pipeline: authenticate, read, decode, place.

A call is placed once its customer and its model are known: both decide the pool and the cell that serve it. A call that
ends before is recorded by the gateway's own pool.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec import UnsetType

from gateway.api.format import InferenceRequest, check_size
from gateway.api.inference import ApiFormat
from gateway.auth.authenticator import Authenticator
from gateway.auth.service_tier import served_as
from gateway.http.body.budget import BodyBudget
from gateway.http.body.reading import check_media, read_body
from gateway.http.request import HttpRequest
from gateway.http.response import HttpResponse
from gateway.http.router import DrainState, RoutedRequest
from gateway.inference.call import InferenceCall
from gateway.inference.idempotency import idempotency_key
from gateway.inference.pipeline import InferencePipeline
from gateway.limits.customer_limits import CustomerLimits
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Identity
from ratelimit.request_limits import RequestLimits
from scheduler.errors import ErrorCode, RequestError

Place = Callable[[Identity, str | UnsetType, str], InferencePipeline]
"""The pipeline of a model's pool in a cell, "" for the customer's own. Raises RequestError `no_capacity` while it is starting."""

Permit = Callable[[Identity, str | UnsetType, str], str | UnsetType]
"""The model that a caller may use, from the one that it names in a field. Raises RequestError `model_not_found`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What calls need before they are placed. One for each gateway.

    `own`: the pipeline of the gateway's own pool. `largest`: the limits of the pool with the largest ones, because a body is
    read before its pool is known. `limits_of`: the limits of a customer in its cell.
    """

    own: InferencePipeline
    place_call: Place
    permit: Permit
    largest: Callable[[], RequestLimits]
    limits_of: Callable[[Identity], CustomerLimits]
    authenticator: Authenticator
    catalog: Catalog
    drain_state: DrainState
    bodies: BodyBudget

    def call(self, api_format: ApiFormat, request: HttpRequest) -> InferenceCall:
        """A new call. Raises RequestError, which is recorded, if its caller is unknown."""
        call = InferenceCall(api_format, request.request_id, request.headers, self.own.clock())
        identify = partial(self.authenticator.identify, key_header=api_format.key_header)
        call.identity = self.own.events.known(identify, request, api_format.endpoint)
        return call

    async def read(self, call: InferenceCall, request: RoutedRequest) -> bytes:
        """Read the Idempotency-Key and the body. Raises RequestError if either is not acceptable, or while draining."""
        http_request, most = request.request, self.largest().body_bytes
        call.key = idempotency_key(request.headers)
        arrived_whole = http_request.content.is_eof()
        if self.drain_state.closed:
            raise RequestError(ErrorCode.DRAINING)
        check_media(request.headers, http_request.content_length or 0, most, call.api_format.media)
        raw = await read_body(http_request, most, self.bodies.share(call.identity))
        if not arrived_whole:  # Reading may have taken seconds, in which the key may have been revoked or moved.
            call.identity = self.authenticator.identify(request, call.api_format.key_header)
        # The time of a slow upload does not count against the deadline; the gateway's own time does.
        call.started = request.arrived if arrived_whole else self.own.clock()
        return raw

    def decode(self, call: InferenceCall, raw: bytes) -> None:
        """Decode and check the body. Raises RequestError that names the field."""
        try:
            body = call.api_format.read(raw, self.largest().input_bytes)
        except RequestError as error:
            # A format that checks the model does not know the caller, to whom the error may name only its own models.
            field, allowed = call.api_format.model_field, call.identity.models
            if error.code is ErrorCode.MODEL_NOT_FOUND and error.param == field and allowed is not None:
                self.permit(call.identity, "", field)
            raise
        self.accept(call, body, len(raw))

    def accept(self, call: InferenceCall, body: InferenceRequest, size: int) -> None:
        """Take a decoded body of `size` bytes, with the tier that it selects. Raises RequestError that names the field."""
        call.body, call.size = body, size
        if body.service_tier is not None:
            call.identity = served_as(call.identity, body.service_tier, self.catalog.snapshot)

    def pipeline_of(self, call: InferenceCall, cell: str = "") -> InferencePipeline:
        """The pipeline of the call's model, which its caller must be allowed to use. Raises RequestError."""
        if call.identity.models is not None:
            model = self.permit(call.identity, call.body.model, call.api_format.model_field)
            if model is not call.body.model:
                call.body = msgspec.structs.replace(call.body, model=model)
        pipeline = call.pipeline = self.place_call(call.identity, call.body.model, cell)
        return pipeline

    def place(self, call: InferenceCall, cell: str = "") -> InferencePipeline:
        """Find the pipeline that serves the call. `cell`: of CustomerMoved. Raises RequestError."""
        pipeline = self.pipeline_of(call, cell)
        check_size(call.body, call.size, pipeline.limits())
        return pipeline

    def reject(self, call: InferenceCall, error: Exception) -> HttpResponse:
        """Record the error and build its response."""
        return (call.pipeline or self.own).reject(call, error)

    def left(self, call: InferenceCall) -> None:
        """The connection was closed before the response: cancel the pending requests and record it."""
        (call.pipeline or self.own).left(call)

    async def answered(self, call: InferenceCall, response: Awaitable[HttpResponse]) -> HttpResponse:
        """The response of a call, or that of its error. Raises CancelledError if the client left."""
        try:
            return await response
        except asyncio.CancelledError:
            self.left(call)
            raise
        except Exception as error:  # noqa: BLE001  # every error has a response, with the limit headers
            return self.reject(call, error)
