"""The frame of endpoints that read or change what belongs to a customer, and run no model.

Their requests count against the limit of auxiliary requests. Their responses have the limit headers of the customer.
"""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import TypeVar

from gateway.http.error_responses import ErrorResponses
from gateway.http.problem_details import wants_problem
from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.inference.entry import Entry
from ledger.catalog.snapshot import Identity
from scheduler.errors import ErrorCode, RequestError

Endpoints = TypeVar("Endpoints", bound="CustomerEndpoints")


class CustomerEndpoints:
    """What handlers under `customer_endpoint` need. `faults` writes their errors."""

    def __init__(self, entry: Entry, faults: ErrorResponses) -> None:
        self.entry = entry
        self.faults = faults

    def check_open(self) -> None:
        """Raises RequestError while the gateway is draining."""
        if self.entry.drain_state.closed:
            raise RequestError(ErrorCode.DRAINING)


def customer_endpoint(
    operation: Callable[[Endpoints, RoutedRequest, Identity], Awaitable[object]],
) -> Callable[[Endpoints, RoutedRequest], Awaitable[HttpResponse]]:
    """The handler of an operation, which returns a document, or a response with its own headers.

    Raises RequestError if the caller is unknown; other errors, and those of a gateway that is draining, become responses.
    """

    @wraps(operation)
    async def handle(self: Endpoints, request: RoutedRequest) -> HttpResponse:
        identity = self.entry.authenticator.identify(request)
        limits = self.entry.limits_of(identity).headers(identity)
        try:
            self.check_open()
            found = await operation(self, request, identity)
        except RequestError as error:
            return self.faults.answer(error, request.request_id, limits, problem=wants_problem(request.headers))
        response = found if isinstance(found, HttpResponse) else HttpResponse.of(200, found)
        first = [("x-request-id", request.request_id), ("Cache-Control", "no-store"), *limits]
        response.headers = [*first, *response.headers]
        return response

    return handle
