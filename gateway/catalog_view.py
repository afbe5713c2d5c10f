"""What the gateway asks of the catalog, as narrow protocols: the ledger's snapshot fits them, and so do literals."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import UNSET, UnsetType

from scheduler.errors import ErrorCode, RequestError


class TierRow(Protocol):
    """One row of `tiers`."""

    @property
    def name(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def guaranteed_share(self) -> float: ...
    @property
    def max_queue_depth(self) -> int: ...
    @property
    def shed_depth(self) -> int | None: ...
    @property
    def shed_wait_ms(self) -> int | None: ...
    @property
    def shadow(self) -> bool: ...


class ModelRow(Protocol):
    """One row of `models`."""

    @property
    def pool(self) -> str: ...
    @property
    def max_batch_size(self) -> int: ...
    @property
    def rps_per_gpu(self) -> float: ...
    @property
    def target_utilization(self) -> float: ...
    @property
    def enabled(self) -> bool: ...


class SnapshotView(Protocol):
    """The catalog at one moment."""

    @property
    def tiers(self) -> Sequence[TierRow]: ...
    @property
    def models(self) -> Mapping[str, ModelRow]: ...


class CatalogView(Protocol):
    """The catalog as it is kept up to date. `snapshot` is None until it was loaded once."""

    @property
    def snapshot(self) -> SnapshotView | None: ...
    @property
    def fresh(self) -> bool: ...
    @property
    def problem(self) -> str | None: ...

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
    def requests_per_second(self) -> float: ...
    @property
    def burst(self) -> float: ...
    @property
    def max_queue_ms(self) -> int: ...
    @property
    def customer_name(self) -> str: ...
    @property
    def max_concurrency(self) -> int: ...
    @property
    def tokens_per_minute(self) -> int | None: ...
    @property
    def quotas(self) -> Sequence[tuple[str, int]]: ...
    @property
    def key_rate(self) -> float: ...
    @property
    def key_burst(self) -> float: ...


def choose_model(models: Mapping[str, ModelRow], pool: str, wanted: str | UnsetType, default: str | None) -> str:
    """The name of the model to run. Raises RequestError `model_not_found` with `param`.

    Without a wish it is `default`, or the pool's only enabled model; with neither the client has to choose.
    """
    served = [name for name, row in models.items() if row.enabled and row.pool == pool]
    if wanted is not UNSET:
        if wanted in served:
            return wanted
        raise RequestError(ErrorCode.MODEL_NOT_FOUND, param="model")
    if default is not None and default in served:
        return default
    if len(served) == 1:
        return served[0]
    raise RequestError(ErrorCode.MODEL_NOT_FOUND, "Name the model: there is no default one.", "model")
