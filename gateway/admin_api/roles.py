"""What an operator of each role may do: one table."""

from collections.abc import Mapping
from enum import StrEnum


class Action(StrEnum):
    """What an address does with the catalog."""

    READ = "read"
    CORDON = "cordon"
    DRAIN_CELL = "drain_cell"
    SUSPEND_CUSTOMER = "suspend_customer"
    REVOKE_KEY = "revoke_key"
    ADMINISTER = "administer"


ROLE_ACTIONS: Mapping[str, frozenset[Action]] = {
    "viewer": frozenset({Action.READ}),
    "operator": frozenset(Action) - {Action.ADMINISTER},
    "admin": frozenset(Action),
}
"""The actions of each role, the role with the fewest first."""


def least_role(action: Action) -> str:
    """The role with the fewest actions that has this one."""
    return next(role for role, actions in ROLE_ACTIONS.items() if action in actions)
