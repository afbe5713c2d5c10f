"""The models that a pool serves, and the error for any other."""

from collections.abc import Callable, Collection, Mapping

from msgspec import UNSET, UnsetType

from ledger.catalog.snapshot import Model, Snapshot
from scheduler.errors import ErrorCode, RequestError

MAX_LISTED = 10


def named(names: Collection[str]) -> str:
    """A sentence with the first names of the models served, which `GET /v1/models` shows to every customer."""
    if not names:
        return "No model is served now."
    listed = ", ".join(f"`{name}`" for name in sorted(names)[:MAX_LISTED])
    more = f" and {len(names) - MAX_LISTED} more (GET /v1/models)" if len(names) > MAX_LISTED else ""
    return f"Models: {listed}{more}."


def model_not_found(param: str, names: Collection[str]) -> RequestError:
    """The error for a model that is not served, with the names of those that are."""
    return RequestError(ErrorCode.MODEL_NOT_FOUND, f"There is no such model. {named(names)}", param)


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
    ) -> str:
        """The name of the model to run. Raises RequestError `model_not_found` with `param`.

        `all_names`: those of the models of all pools, for the message.

        Without a wish it is the default one, or the pool's only enabled model; with neither the client has to choose.
        """
        served = self.names(snapshot)
        if wanted is UNSET:
            if self._unnamed is not None:
                return self._unnamed
            names = all_names() if all_names is not None else served
            raise RequestError(
                ErrorCode.MODEL_NOT_FOUND, f"`{param}` is required: there is no default model. {named(names)}", param
            )
        if wanted in served:
            return wanted
        raise model_not_found(param, all_names() if all_names is not None else served)

    def _look(self, models: Mapping[str, Model]) -> None:
        served = frozenset(name for name, row in models.items() if row.enabled and row.pool == self._pool)
        only = next(iter(served)) if len(served) == 1 else None
        self._unnamed = self._default if self._default in served else only
        self._models, self._served = models, served
        self.sharing = {name: models[name] for name in served if models[name].cache_ttl_s > 0}
