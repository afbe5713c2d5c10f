"""`GET /v1/models` and `GET /v1/models/{id}`: what a customer can name, in OpenAI's form. It spends nothing."""

import time
from collections.abc import Callable, Collection
from typing import Literal, TypedDict
from urllib.parse import unquote

from gateway.auth.authenticator import Authenticator
from gateway.catalog import IdentityView
from gateway.http.errors import ErrorResponses, wants_problem
from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.limits.customer_limits import CustomerLimits
from scheduler.errors import ErrorCode, RequestError

OWNER = "tierlane"


class ModelEntry(TypedDict):
    """One model; `created` in seconds of Unix time."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(TypedDict):
    """All of them, by name."""

    object: Literal["list"]
    data: list[ModelEntry]


class Models:
    """The handlers. `created` of a model is when this gateway began, as engines tell it: the catalog keeps no time."""

    def __init__(
        self,
        authenticator: Authenticator,
        customer_limits: CustomerLimits,
        names: Callable[[], Collection[str]],
        faults: ErrorResponses,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._authenticator = authenticator
        self._customer_limits = customer_limits
        self._names = names
        self._faults = faults
        self._created = int(clock())

    async def list(self, call: RoutedRequest) -> HttpResponse:
        """All models that are served here, by name. Raises RequestError for who is not known."""
        identity = self._authenticator.identify(call)
        names = sorted(self._names())
        return self._answer(call, identity, {"object": "list", "data": [self._document(name) for name in names]})

    async def one(self, call: RoutedRequest) -> HttpResponse:
        """One of them, or `model_not_found`. Raises RequestError for who is not known."""
        identity = self._authenticator.identify(call)
        name = unquote(call.tail)
        if name in self._names():
            return self._answer(call, identity, self._document(name))
        error = RequestError(ErrorCode.MODEL_NOT_FOUND, param="model")
        headers = self._customer_limits.headers(identity)
        return self._faults.answer(error, call.request_id, headers, problem=wants_problem(call.headers))

    def _document(self, name: str) -> ModelEntry:
        return {"id": name, "object": "model", "created": self._created, "owned_by": OWNER}

    def _answer(self, call: RoutedRequest, identity: IdentityView, document: ModelEntry | ModelList) -> HttpResponse:
        return HttpResponse.of(
            200, document, [("x-request-id", call.request_id), *self._customer_limits.headers(identity)]
        )
