"""The modules of the verbs, each imported when one of its attributes is read, since help must be fast."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierlane.admin import apply, config_history, customers, operators, requests, tiers_and_models, values
    from tierlane.operate import batches, cells, dead_letters, pools, requeue, usage
else:

    class LazyModule:
        """A module that is imported when one of its attributes is read."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(import_module(self._name), attribute)

    apply = LazyModule("tierlane.admin.apply")
    config_history = LazyModule("tierlane.admin.config_history")
    customers = LazyModule("tierlane.admin.customers")
    operators = LazyModule("tierlane.admin.operators")
    requests = LazyModule("tierlane.admin.requests")
    tiers_and_models = LazyModule("tierlane.admin.tiers_and_models")
    values = LazyModule("tierlane.admin.values")
    batches = LazyModule("tierlane.operate.batches")
    cells = LazyModule("tierlane.operate.cells")
    dead_letters = LazyModule("tierlane.operate.dead_letters")
    pools = LazyModule("tierlane.operate.pools")
    requeue = LazyModule("tierlane.operate.requeue")
    usage = LazyModule("tierlane.operate.usage")

__all__ = [
    "apply",
    "batches",
    "cells",
    "config_history",
    "customers",
    "dead_letters",
    "operators",
    "pools",
    "requests",
    "requeue",
    "tiers_and_models",
    "usage",
    "values",
]
