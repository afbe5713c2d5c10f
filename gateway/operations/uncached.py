"""JSON responses that must not be cached."""

from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest


def uncached(call: RoutedRequest, document: object, status: int = 200) -> HttpResponse:
    """The response with a document of this moment."""
    return HttpResponse.of(status, document, [("x-request-id", call.request_id), ("Cache-Control", "no-store")])
