"""`GET /v1/models` and `GET /v1/models/{id}`, free of charge: in OpenAI's format, or with `anthropic-version` in Anthropic's."""

from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Literal, NotRequired, Protocol, TypedDict
from urllib.parse import unquote

from gateway.auth.authenticator import KEY_HEADER, Authenticator
from gateway.http.error_responses import ErrorResponses
from gateway.http.problem_details import wants_problem
from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.limits.customer_limits import CustomerLimits
from gateway.served_models import model_not_found, visible
from ledger.catalog.snapshot import Identity

OWNER = "tierlane"
CREATED = 0
"""The catalog has no time of a model; both APIs allow the epoch for an unknown one, and all gateways must send the same."""
VERSION_HEADER = "anthropic-version"
"""Sent by each of Anthropic's clients."""


class ModelEntry(TypedDict):
    """One model. `created` is Unix time in seconds; `root` equals `id`; `max_model_len` is the context length in tokens, if it is known."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: NotRequired[int]


class ModelList(TypedDict):
    """The models that the key may use, by name."""

    object: Literal["list"]
    data: list[ModelEntry]


class MessagesModel(TypedDict):
    """One model in Anthropic's format. `max_input_tokens`: its context length, if it is known."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: NotRequired[int]


class MessagesModelList(TypedDict):
    """All models in Anthropic's format, on one page."""

    data: list[MessagesModel]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


class AllModels(Protocol):
    """The models of all pools."""

    def names(self) -> Collection[str]:
        """All that requests can name."""

    def context_tokens(self, model: str, /) -> int:
        """The context length of a model; 0 if it is not known."""


class Models:
    """The handlers."""

    def __init__(
        self,
        authenticator: Authenticator,
        limits_of: Callable[[Identity], CustomerLimits],
        served: AllModels,
        error_responses: ErrorResponses,
    ) -> None:
        self._authenticator = authenticator
        self._limits_of = limits_of
        self._served = served
        self._error_responses = error_responses

    async def list(self, request: RoutedRequest) -> HttpResponse:
        """List the served models that the key may use. Raises RequestError for an unknown caller."""
        identity = self._authenticator.identify(request, KEY_HEADER)
        names = sorted(visible(self._served.names(), identity.models))
        if VERSION_HEADER in request.headers:
            models = [self._messages_model(name) for name in names]
            ends = (names[0], names[-1]) if names else (None, None)
            return self._respond(
                request, identity, {"data": models, "has_more": False, "first_id": ends[0], "last_id": ends[1]}
            )
        return self._respond(request, identity, {"object": "list", "data": [self._document(name) for name in names]})

    async def one(self, request: RoutedRequest) -> HttpResponse:
        """Return one model, or `model_not_found`. Raises RequestError for an unknown caller."""
        identity = self._authenticator.identify(request, KEY_HEADER)
        name = unquote(request.tail)
        if name in visible(self._served.names(), identity.models):
            is_messages = VERSION_HEADER in request.headers
            document = self._messages_model(name) if is_messages else self._document(name)
            return self._respond(request, identity, document)
        error = model_not_found("model", self._served.names(), identity.models)
        headers = self._limits_of(identity).headers(identity)
        return self._error_responses.answer(error, request.request_id, headers, problem=wants_problem(request.headers))

    def _document(self, name: str) -> ModelEntry:
        entry: ModelEntry = {"id": name, "object": "model", "created": CREATED, "owned_by": OWNER, "root": name}
        if tokens := self._served.context_tokens(name):
            entry["max_model_len"] = tokens
        return entry

    def _messages_model(self, name: str) -> MessagesModel:
        created_at = f"{datetime.fromtimestamp(CREATED, UTC):%Y-%m-%dT%H:%M:%SZ}"
        model: MessagesModel = {"type": "model", "id": name, "display_name": name, "created_at": created_at}
        if tokens := self._served.context_tokens(name):
            model["max_input_tokens"] = tokens
        return model

    def _respond(
        self,
        request: RoutedRequest,
        identity: Identity,
        document: ModelEntry | ModelList | MessagesModel | MessagesModelList,
    ) -> HttpResponse:
        return HttpResponse.of(
            200, document, [("x-request-id", request.request_id), *self._limits_of(identity).headers(identity)]
        )
