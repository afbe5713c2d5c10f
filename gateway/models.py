"""`GET /v1/models` and `GET /v1/models/{id}`: what a customer can name, in OpenAI's form. It spends nothing."""

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from gateway.answer import Answer
from gateway.catalog_view import CatalogView, IdentityView, ServedModels
from gateway.doorman import Doorman
from gateway.routes import Call
from gateway.standing import Standing
from scheduler.errors import ErrorCode, RequestError

OWNER = "tierlane"


class Models:
    """The handlers. `created` of a model is when this gateway began, as engines tell it: the catalog keeps no time."""

    def __init__(
        self,
        doorman: Doorman,
        standing: Standing,
        catalog: CatalogView,
        served: ServedModels,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._doorman = doorman
        self._standing = standing
        self._catalog = catalog
        self._served = served
        self._created = int(clock())

    async def list(self, call: Call) -> Answer:
        """All models of this pool, by name. Raises RequestError for who is not known."""
        identity = self._doorman.identify(call)
        names = sorted(self._served.names(self._catalog.snapshot))
        return self._answer(call, identity, {"object": "list", "data": [self._document(name) for name in names]})

    async def one(self, call: Call) -> Answer:
        """One of them. Raises RequestError `model_not_found`, or for who is not known."""
        identity = self._doorman.identify(call)
        name = unquote(call.tail)
        if name not in self._served.names(self._catalog.snapshot):
            raise RequestError(ErrorCode.MODEL_NOT_FOUND, param="model")
        return self._answer(call, identity, self._document(name))

    def _document(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": OWNER}

    def _answer(self, call: Call, identity: IdentityView, document: dict[str, Any]) -> Answer:
        return Answer.of(200, document, [("x-request-id", call.request_id), *self._standing.headers(identity)])
