"""Inputs of the health checks for a healthy gateway."""

from typing import Any

from gateway.operations.health.checks import HealthInputs


def health_inputs(**changes: Any) -> HealthInputs:
    """`changes`: the observation, and every input that differs from those of a healthy gateway."""
    fields: dict[str, Any] = {
        "look_age_s": 0.1,
        "redis_problem": None,
        "catalog_loaded": True,
        "catalog_fresh": True,
        "catalog_age_s": 0.5,
        "catalog_problem": None,
        "subscribed": True,
        "leaving": False,
        "capacity_rps": 160.0,
    }
    return HealthInputs(**fields | changes)
