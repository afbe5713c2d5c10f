"""The models that a pool serves, and the error for any other.

A key may be limited to some models (Identity.models). Any other is an unknown model for it, and is not named in errors.
"""

from collections.abc import Callable, Collection, Mapping

from msgspec import UNSET, UnsetType

from ledger.catalog.snapshot import Model, Snapshot
from scheduler.errors import ErrorCode, RequestError

MAX_LISTED = 10


def visible(names: Collection[str], allowed: Collection[str] | None) -> Collection[str]:
    """The names that a key with this list of models sees; None: all."""
    return names if allowed is None else [name for name in names if name in allowed]


def named(names: Collection[str]) -> str:
    """A sentence with the first names of the models that `GET /v1/models` shows."""
    if not names:
        return "No model is served now."
    listed = ", ".join(f"`{name}`" for name in sorted(names)[:MAX_LISTED])
    more = f" and {len(names) - MAX_LISTED} more (GET /v1/models)" if len(names) > MAX_LISTED else ""
    return f"Models: {listed}{more}."


def model_not_found(param: str, names: Collection[str], allowed: Collection[str] | None = None) -> RequestError:
    """The error for a model that is not served, with the names of those that are.

    `allowed`: the models of the key, None for all. The error is the same whether the model exists or not.
    """
    if allowed is None:
        return RequestError(ErrorCode.MODEL_NOT_FOUND, f"There is no such model. {named(names)}", param)
    message = f"There is no such model, or this key may not use it. {_named_for_key(names, allowed)}"
    return RequestError(ErrorCode.MODEL_NOT_FOUND, message, param)


def model_required(param: str, names: Collection[str], allowed: Collection[str] | None = None) -> RequestError:
    """The error for a request without a model, if there is no default one. `allowed` as in `model_not_found`."""
    models = named(names) if allowed is None else _named_for_key(names, allowed)
    message = f"`{param}` is required: there is no default model. {models}"
    return RequestError(ErrorCode.MODEL_NOT_FOUND, message, param)


def _named_for_key(names: Collection[str], allowed: Collection[str]) -> str:
    seen = visible(names, allowed)
    return named(seen) if seen else "No model that this key may use is served now."


class ServedModels:
    """Which models a pool serves, looked up once for each picture of the catalog.

    `sharing` has the rows of those whose equal requests share, as of the last look: hardly any, and most often none.
    """

    def __init__(self, pool: str, default: str | None) -> None:
        self._pool = pool
        self._default = default
        self._models: Mapping[str, Model] | None = None
        self._served: frozenset[str] = frozenset()
        self._unnamed: str | None = None
        self.sharing: Mapping[str, Model] = {}

    def names(self, snapshot: Snapshot | None) -> frozenset[str]:
        """All that are served."""
        models = snapshot.models if snapshot is not None else {}
        if models is not self._models:
            self._look(models)
        return self._served

    def choose(
        self,
        snapshot: Snapshot | None,
        wanted: str | UnsetType,
        param: str = "model",
        all_names: Callable[[], Collection[str]] | None = None,
        allowed: Collection[str] | None = None,
    ) -> str:
        """The name of the model to run. Raises RequestError `model_not_found` with `param`.

        `all_names`: those of the models of all pools, for the message. `allowed`: those of the key, also only for the
        message: what a key may use is decided before its request is placed.

        Without a wish it is the default one, or the pool's only enabled model; with neither the client has to choose.
        """
        served = self.names(snapshot)
        if wanted is UNSET:
            if self._unnamed is not None:
                return self._unnamed
            raise model_required(param, all_names() if all_names is not None else served, allowed)
        if wanted in served:
            return wanted
        raise model_not_found(param, all_names() if all_names is not None else served, allowed)

    def unnamed(self, snapshot: Snapshot | None) -> str | None:
        """The model of a request that names none; None if such a request is rejected."""
        self.names(snapshot)
        return self._unnamed

    def _look(self, models: Mapping[str, Model]) -> None:
        served = frozenset(name for name, row in models.items() if row.enabled and row.pool == self._pool)
        only = next(iter(served)) if len(served) == 1 else None
        self._unnamed = self._default if self._default in served else only
        self._models, self._served = models, served
        self.sharing = {name: models[name] for name in served if models[name].cache_ttl_s > 0}
