"""Kinds of faults: family, target, duration and parameters."""

from dataclasses import dataclass, field
from enum import StrEnum

Range = tuple[float, float]

ALL_ROLES = "roles"  # The client of a proxy that all roles share, that of a cell other than the default one.


class Family(StrEnum):
    """The part of the stack that a fault affects; each minute has at least one fault of each family."""

    PROCESS = "process"
    REDIS = "redis"
    PROXY = "proxy"
    POSTGRES = "postgres"
    CLIENT = "client"
    ENGINE = "engine"


class FaultTarget(StrEnum):
    """The kind of target: one of several processes or proxies, or a server."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    MODEL = "model"
    REDIS = "redis"
    POSTGRES = "postgres"
    ENGINE = "engine"
    REDIS_PROXY = "redis-proxy"
    POSTGRES_PROXY = "postgres-proxy"


class Needs(StrEnum):
    """The Redis that a fault needs: any, one server, or a cluster."""

    ANY = ""
    SERVER = "not with --cluster"
    CLUSTER = "only with --cluster"


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault. `length_s` INSTANT: it needs no heal. `draws`: ranges of further parameters.

    `outside`: it needs no proxy and can be undone, so it can be injected into an external stack. `repeats`: it repeats
    the fault of this name on one target every `every_s`; each repetition is an event of its own. `needs`: SERVER for what
    changes the clock or the files of one server, or needs the proxy of one gateway.
    """

    name: str
    family: Family
    places: tuple[FaultTarget, ...]
    length_s: Range
    description: str
    draws: dict[str, Range] = field(default_factory=dict)
    outside: bool = False
    repeats: str = ""
    every_s: float = 0.0
    needs: Needs = Needs.ANY

    def is_possible(self, *, clustered: bool) -> bool:
        """Whether it can be injected into a stack on a cluster, or into one on servers without cluster mode."""
        return self.needs in (Needs.ANY, Needs.CLUSTER if clustered else Needs.SERVER)
