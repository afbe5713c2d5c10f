"""What `tierlane tier` looks at."""

from ledger.admin.rows import list_tiers
from ledger.admin.tiers import delete_tier
from ledger.schema.catalog import tiers
from tierlane.admin.tiers_and_models import NamedRows
from tierlane.output import Column

TIERS = NamedRows(
    table=tiers,
    read=list_tiers,
    drop=delete_tier,
    columns=(
        Column("name", "NAME"),
        Column("priority", "PRIO"),
        Column("guaranteed_share", "SHARE"),
        Column("requests_per_second", "RPS"),
        Column("burst", "BURST"),
        Column("max_concurrency", "CONCURRENCY"),
        Column("tokens_per_minute", "TOKENS/MIN"),
        Column("max_queue_depth", "DEPTH"),
        Column("max_queue_ms", "WAIT MS"),
        Column("shed_depth", "SHED DEPTH"),
        Column("shed_wait_ms", "SHED MS"),
        Column("shadow", "SHADOW"),
        Column("paused", "PAUSED"),
        Column("quotas", "QUOTAS"),
        Column("customers", "CUSTOMERS"),
    ),
)
