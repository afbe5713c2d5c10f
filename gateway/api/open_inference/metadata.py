"""The descriptions of server and models in the Open Inference Protocol, which both its forms send."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from gateway.api.open_inference.tensors import BYTES, TEXT_INPUT, TEXT_OUTPUT, VERSION, check_version
from gateway.auth.authenticator import Authenticator
from gateway.http.error_responses import ErrorResponses
from gateway.limits.customer_limits import CustomerLimits
from gateway.served_models import model_not_found
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Identity

PLATFORM = "tierlane"


class TensorMetadata(msgspec.Struct, gc=False):
    """A tensor of a model; -1 is a dimension of any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ModelMetadata(msgspec.Struct, gc=False):
    """A model. All models have the same tensors."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


def _tensor(name: str) -> TensorMetadata:
    return TensorMetadata(name, BYTES, (-1,))


class ServerMetadata(msgspec.Struct, gc=False):
    """The server."""

    name: str
    version: str
    extensions: tuple[str, ...]


class ServerLive(msgspec.Struct, gc=False):
    """The event loop is running."""

    live: bool


class ServerReady(msgspec.Struct, gc=False):
    """Whether the gateway accepts traffic."""

    ready: bool


class ModelReady(msgspec.Struct, gc=False):
    """Whether requests of the model are served."""

    name: str
    ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenInferenceParts:
    """What both forms of the protocol use."""

    authenticator: Authenticator
    catalog: Catalog
    limits_of: Callable[[Identity], CustomerLimits]
    error_responses: ErrorResponses
    names: Callable[[], Collection[str]]  # Of all models that requests can name.
    not_ready: Callable[[], str | None]  # What the gateway is waiting for; None if it accepts traffic.
    model_ready: Callable[[str], bool]  # Whether the pool of a model has a healthy GPU.
    version: str

    def check_model(self, model: str, version: str, allowed: Collection[str] | None = None) -> None:
        """Raises RequestError `model_not_found` unless the model is in the catalog, in this version, and in `allowed`.

        A model whose pool is still being started is in the catalog: the pipeline rejects its requests for now.
        """
        check_version(version)
        row = self.catalog.snapshot.models.get(model) if self.catalog.snapshot is not None else None
        if row is None or not row.enabled or not (allowed is None or model in allowed):
            raise model_not_found("model_name", self.names(), allowed)

    def metadata(self, identity: Identity, model: str, version: str) -> ModelMetadata:
        """The description of a model. Raises RequestError `model_not_found`."""
        self.check_model(model, version, identity.models)
        return ModelMetadata(model, (VERSION,), PLATFORM, (_tensor(TEXT_INPUT),), (_tensor(TEXT_OUTPUT),))

    def readiness(self, identity: Identity, model: str, version: str) -> ModelReady:
        """Whether requests of a model are served. Raises RequestError `model_not_found`."""
        self.check_model(model, version, identity.models)
        return ModelReady(model, self.not_ready() is None and self.model_ready(model))
