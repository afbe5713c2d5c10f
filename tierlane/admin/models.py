"""What `tierlane model` looks at."""

from ledger.admin.changes import Change, find, remove
from ledger.admin.rows import list_models
from ledger.postgres import Connection
from ledger.schema.catalog import models
from tierlane.admin.tiers_and_models import NamedRows
from tierlane.output import Column


async def _delete_model(connection: Connection, name: str) -> list[Change]:
    return [await remove(connection, models, await find(connection, models, name))]


MODELS = NamedRows(
    table=models,
    read=list_models,
    drop=_delete_model,
    columns=(
        Column("name", "NAME"),
        Column("enabled", "ENABLED"),
        Column("pool", "POOL"),
        Column("max_batch_size", "BATCH"),
        Column("max_batch_tokens", "BATCH TOKENS"),
        Column("max_wait_ms", "WAIT MS"),
        Column("gpu_timeout_ms", "TIMEOUT MS"),
        Column("rps_per_gpu", "RPS/GPU"),
        Column("rps_per_gpu_fixed", "FIXED"),
        Column("target_utilization", "TARGET"),
        Column("cache_ttl_s", "CACHE S"),
        Column("cache_scope", "SHARED"),
    ),
)
