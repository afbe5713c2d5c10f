"""`GET /v1/models` and `GET /v1/models/{id}` in OpenAI's format, free of charge."""

import time
from collections.abc import Callable, Collection
from typing import Literal, TypedDict
from urllib.parse import unquote

from gateway.auth.authenticator import Authenticator
from gateway.catalog import IdentityView, model_not_found
from gateway.http.errors import ErrorResponses, wants_problem
from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.limits.customer_limits import CustomerLimits

OWNER = "tierlane"


class ModelEntry(TypedDict):
    """One model. `created` is Unix time in seconds."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(TypedDict):
    """All models, by name."""

    object: Literal["list"]
    data: list[ModelEntry]


class Models:
    """The handlers. `created` of a model is the start of this gateway, since the catalog has no time."""

    def __init__(
        self,
        authenticator: Authenticator,
        limits_of: Callable[[IdentityView], CustomerLimits],
        names: Callable[[], Collection[str]],
        error_responses: ErrorResponses,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._authenticator = authenticator
        self._limits_of = limits_of
        self._names = names
        self._error_responses = error_responses
        self._created = int(clock())

    async def list(self, request: RoutedRequest) -> HttpResponse:
        """List all served models. Raises RequestError for an unknown caller."""
        identity = self._authenticator.identify(request)
        names = sorted(self._names())
        return self._respond(request, identity, {"object": "list", "data": [self._document(name) for name in names]})

    async def one(self, request: RoutedRequest) -> HttpResponse:
        """Return one model, or `model_not_found`. Raises RequestError for an unknown caller."""
        identity = self._authenticator.identify(request)
        name = unquote(request.tail)
        if name in self._names():
            return self._respond(request, identity, self._document(name))
        error = model_not_found("model", self._names())
        headers = self._limits_of(identity).headers(identity)
        return self._error_responses.answer(error, request.request_id, headers, problem=wants_problem(request.headers))

    def _document(self, name: str) -> ModelEntry:
        return {"id": name, "object": "model", "created": self._created, "owned_by": OWNER}

    def _respond(
        self, request: RoutedRequest, identity: IdentityView, document: ModelEntry | ModelList
    ) -> HttpResponse:
        return HttpResponse.of(
            200, document, [("x-request-id", request.request_id), *self._limits_of(identity).headers(identity)]
        )
