"""What a gateway that is well knows when it is asked for its health, in tests of what health makes of it."""

from typing import Any

from gateway.operations.health_checks import HealthInputs


def health_inputs(**changes: Any) -> HealthInputs:
    """`changes` name the observation, and whatever is not as in a gateway that is well."""
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
