"""A literal identity for tests, with base limits that a test can change."""

from typing import Any

from customer_limits import with_values
from ledger.catalog.snapshot import Identity


def identity(**changes: Any) -> Identity:
    """A customer of 2 requests/s and burst 10."""
    fields: dict[str, Any] = {
        "key_id": "k",
        "customer_id": "c",
        "customer_name": "acme",
        "tier": "free",
        "requests_per_second": 2.0,
        "burst": 10.0,
        "max_concurrency": 5,
        "tokens_per_minute": None,
        "max_queue_ms": 2000,
    }
    return Identity(**with_values(fields | changes))
