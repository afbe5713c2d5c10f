"""The endpoints of the Open Inference Protocol in its REST form."""

from collections.abc import Callable
from typing import TypeVar
from urllib.parse import unquote

from gateway.api.inference import ApiFormat
from gateway.api.open_inference.error_form import TENSOR_FORM
from gateway.api.open_inference.metadata import OpenInferenceParts, ServerLive, ServerMetadata, ServerReady
from gateway.api.open_inference.rest_tensors import BINARY, JSON_LENGTH, read_tensors, write_tensors
from gateway.api.open_inference.tensors import TEXT_INPUT, TensorRequest
from gateway.http.response import HttpResponse
from gateway.http.router import Handler, RoutedRequest
from ledger.catalog.snapshot import Identity
from scheduler.errors import RequestError

EXTENSIONS = ("binary_tensor_data", "parameters")
T = TypeVar("T")
INFER = "/v2/models/{id...}/infer"
"""The route, which is the name of the endpoint in metrics and logs."""


class OpenInference:
    """The handlers of the REST form. `handler`: makes the handler of inference requests in a format."""

    def __init__(self, parts: OpenInferenceParts, handler: Callable[[ApiFormat], Handler]) -> None:
        self.parts = parts
        self._handler = handler
        self._server = ServerMetadata("tierlane", parts.version, EXTENSIONS)

    async def server(self, request: RoutedRequest) -> HttpResponse:
        """`GET /v2`."""
        return HttpResponse.of(200, self._server, [("x-request-id", request.request_id)])

    async def live(self, request: RoutedRequest) -> HttpResponse:
        """`GET /v2/health/live`."""
        return HttpResponse.of(200, ServerLive(live=True), [("x-request-id", request.request_id)])

    async def ready(self, request: RoutedRequest) -> HttpResponse:
        """`GET /v2/health/ready`: 503 unless the gateway accepts traffic."""
        ready = self.parts.not_ready() is None
        return HttpResponse.of(200 if ready else 503, ServerReady(ready), [("x-request-id", request.request_id)])

    async def model(self, request: RoutedRequest) -> HttpResponse:
        """`GET /v2/models/{id...}`. Raises RequestError for an unknown caller."""
        return self._described(request, self.parts.metadata, lambda _: 200)

    async def model_ready(self, request: RoutedRequest) -> HttpResponse:
        """`GET /v2/models/{id...}/ready`: 503 if it is not. Raises RequestError for an unknown caller."""
        return self._described(request, self.parts.readiness, lambda found: 200 if found.ready else 503)

    async def infer(self, request: RoutedRequest) -> HttpResponse:
        """`POST /v2/models/{id...}/infer`. Raises RequestError for an unknown caller."""
        length = request.headers.get(JSON_LENGTH)

        def read(raw: bytes, max_input_bytes: int) -> TensorRequest:
            model, version = model_and_version(request.tail)
            self.parts.check_model(model, version)
            return read_tensors(raw, max_input_bytes, model=model, json_length=length)

        return await self._handler(
            ApiFormat(
                read,
                write_tensors,
                TEXT_INPUT,
                "model_name",
                endpoint=INFER,
                media=(BINARY,),
                form=TENSOR_FORM,
            )
        )(request)

    def _described(
        self, request: RoutedRequest, describe: Callable[[Identity, str, str], T], status: Callable[[T], int]
    ) -> HttpResponse:
        identity = self.parts.authenticator.identify(request)
        headers = self.parts.limits_of(identity).headers(identity)
        try:
            document = describe(identity, *model_and_version(request.tail))
        except RequestError as error:
            return self.parts.error_responses.answer(error, request.request_id, headers, form=TENSOR_FORM)
        return HttpResponse.of(status(document), document, [("x-request-id", request.request_id), *headers])


def model_and_version(tail: str) -> tuple[str, str]:
    """The model and the version, "" without one, of a path."""
    model, found, version = tail.rpartition("/versions/")
    return (unquote(model), unquote(version)) if found else (unquote(tail), "")
