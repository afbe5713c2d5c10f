"""The catalog that the gateway requires, as narrow protocols, which the ledger's snapshot and values in tests satisfy."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from msgspec import UNSET, UnsetType

from ratelimit.limits import Values
from scheduler.cells.places import CellView
from scheduler.errors import ErrorCode, RequestError

MAX_LISTED = 10


class TierRow(Protocol):
    """One row of `tiers`."""

    @property
    def name(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def limits(self) -> Values: ...
    @property
    def guaranteed_share(self) -> float: ...
    @property
    def max_queue_depth(self) -> int: ...
    @property
    def max_queue_ms(self) -> int | None: ...  # None: by the backend of the pool.
    @property
    def shed_depth(self) -> int | None: ...
    @property
    def shed_wait_ms(self) -> int | None: ...
    @property
    def shadow(self) -> bool: ...
    @property
    def paused(self) -> bool: ...
    @property
    def slo_ms(self) -> int | None: ...
    @property
    def slo_success(self) -> float | None: ...
    @property
    def interactive_jobs(self) -> bool: ...
    @property
    def auxiliary_rate(self) -> float | None: ...
    @property
    def auxiliary_burst(self) -> float | None: ...


class ModelRow(Protocol):
    """One row of `models`."""

    @property
    def pool(self) -> str: ...
    @property
    def max_batch_size(self) -> int: ...
    @property
    def rps_per_gpu(self) -> float: ...
    @property
    def rps_per_gpu_fixed(self) -> bool: ...
    @property
    def target_utilization(self) -> float: ...
    @property
    def cache_ttl_s(self) -> int: ...
    @property
    def cache_scope(self) -> str: ...
    @property
    def capabilities(self) -> frozenset[str] | None: ...
    @property
    def enabled(self) -> bool: ...
    def price_at(self, now: float) -> tuple[float, float, float]: ...


class CustomerRow(Protocol):
    """One row of `customers`, with its base limits."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def tier(self) -> str: ...
    @property
    def suspended(self) -> bool: ...
    @property
    def limits(self) -> Values: ...
    @property
    def max_queue_ms(self) -> int | None: ...  # None: by the backend of the pool.
    @property
    def quotas(self) -> Sequence[tuple[str, int]]: ...
    @property
    def callback_hosts(self) -> str | None: ...
    @property
    def weight(self) -> float: ...
    @property
    def cell(self) -> str | None: ...
    @property
    def spread(self) -> int: ...
    def identity(self, key_id: str = "") -> "IdentityView": ...


class SnapshotView(Protocol):
    """The catalog at one moment."""

    @property
    def tiers(self) -> Sequence[TierRow]: ...
    @property
    def customers(self) -> Mapping[str, CustomerRow]: ...
    @property
    def models(self) -> Mapping[str, ModelRow]: ...
    @property
    def cordoned(self) -> frozenset[str]: ...
    @property
    def cells(self) -> Sequence[CellView]: ...
    @property
    def version(self) -> int: ...


class CatalogView(Protocol):
    """The catalog as it is kept up to date. `snapshot` is None until it was loaded once."""

    @property
    def snapshot(self) -> SnapshotView | None: ...
    @property
    def fresh(self) -> bool: ...
    @property
    def problem(self) -> str | None: ...
    @property
    def bad_row(self) -> bool: ...

    @property
    def left_s(self) -> float: ...  # For how long known keys are served without PostgreSQL; negative: not any more.

    def age_s(self) -> float: ...

    def identify(self, presented: str, wall_now: float) -> "IdentityView": ...


class IdentityView(Protocol):
    """Who a key belongs to and what it may do at its base limit."""

    @property
    def key_id(self) -> str: ...
    @property
    def customer_id(self) -> str: ...
    @property
    def tier(self) -> str: ...
    @property
    def priority(self) -> int: ...  # The tier's, 1 first.
    @property
    def limits(self) -> Values: ...
    @property
    def max_queue_ms(self) -> int | None: ...  # None: by the backend of the pool.
    @property
    def customer_name(self) -> str: ...
    @property
    def quotas(self) -> Sequence[tuple[str, int]]: ...
    @property
    def key_rate(self) -> float: ...
    @property
    def key_burst(self) -> float: ...
    @property
    def weight(self) -> float: ...
    @property
    def key_weight(self) -> float: ...
    @property
    def cell(self) -> str | None: ...
    @property
    def spread(self) -> int: ...


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
        self._models: Mapping[str, ModelRow] | None = None
        self._served: frozenset[str] = frozenset()
        self._unnamed: str | None = None
        self.sharing: Mapping[str, ModelRow] = {}

    def names(self, snapshot: SnapshotView | None) -> frozenset[str]:
        """All that are served."""
        models = snapshot.models if snapshot is not None else {}
        if models is not self._models:
            self._look(models)
        return self._served

    def choose(
        self,
        snapshot: SnapshotView | None,
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

    def _look(self, models: Mapping[str, ModelRow]) -> None:
        served = frozenset(name for name, row in models.items() if row.enabled and row.pool == self._pool)
        only = next(iter(served)) if len(served) == 1 else None
        self._unnamed = self._default if self._default in served else only
        self._models, self._served = models, served
        self.sharing = {name: models[name] for name in served if models[name].cache_ttl_s > 0}
