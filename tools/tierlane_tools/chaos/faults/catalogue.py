"""The catalogue of faults (family, target, duration, parameters) and the schedule: a pure function of the seed.

`actions` injects the faults. Faults begin every 2 to 5 s and may overlap, but not two of one kind on one target, and no
other fault affects a role while one of its processes is restarted repeatedly. Kinds are drawn without replacement, so
that none is missing for long, beginning with one of each family. The first and last seconds are without faults.

A stack on a cluster has no proxies of Redis, because its clients connect to the addresses that the servers announce: network
faults are those of PostgreSQL there, and SIGSTOP of a primary cuts it off.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

Range = tuple[float, float]


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


ALL_ROLES = "roles"  # The client of a proxy that all roles share, that of a cell other than the default one.


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


INSTANT: Range = (0.0, 0.0)
SUSPENSION: Range = (0.2, 5.0)
SHORT: Range = (0.5, 5.0)
STEP: Range = (0.5, 8.0)
HOSTILE: Range = (2.0, 8.0)
REPEATED: Range = (6.0, 12.0)
REFUSALS: Range = (2.0, 10.0)
RESTART_EVERY_S = 3.0
PROXIES = (
    FaultTarget.REDIS_PROXY,
    FaultTarget.REDIS_PROXY,
    FaultTarget.POSTGRES_PROXY,
)  # Every request uses Redis.


def _process(
    name: str,
    place: FaultTarget,
    description: str,
    length_s: Range = INSTANT,
    *,
    outside: bool = True,
    repeats: str = "",
    needs: Needs = Needs.ANY,
) -> FaultKind:
    every_s = RESTART_EVERY_S if repeats else 0.0
    return FaultKind(
        name, Family.PROCESS, (place,), length_s, description, {}, outside, repeats, every_s=every_s, needs=needs
    )


def _proxy(name: str, description: str, length_s: Range = SHORT, **draws: Range) -> FaultKind:
    return FaultKind(name, Family.PROXY, PROXIES, length_s, description, draws)


def _redis(
    name: str,
    description: str,
    length_s: Range = INSTANT,
    *,
    outside: bool = True,
    needs: Needs = Needs.ANY,
    **draws: Range,
) -> FaultKind:
    return FaultKind(name, Family.REDIS, (FaultTarget.REDIS,), length_s, description, draws, outside, needs=needs)


def _postgres(name: str, description: str, length_s: Range = INSTANT, *, outside: bool = True) -> FaultKind:
    return FaultKind(name, Family.POSTGRES, (FaultTarget.POSTGRES,), length_s, description, outside=outside)


def _engine(name: str, description: str, length_s: Range = INSTANT, **draws: Range) -> FaultKind:
    return FaultKind(name, Family.ENGINE, (FaultTarget.ENGINE,), length_s, description, draws)


ROLES = (FaultTarget.GATEWAY, FaultTarget.SCHEDULER, FaultTarget.WORKER, FaultTarget.MODEL)

KINDS: tuple[FaultKind, ...] = (
    *(_process(f"kill-{role}", role, f"SIGKILL of a {role} process") for role in ROLES),
    *(_process(f"stop-{role}", role, f"SIGSTOP of a {role} process", SUSPENSION) for role in ROLES),
    *(_process(f"term-{role}", role, f"SIGTERM of a {role}, which shuts down") for role in ROLES[:3]),
    *(
        _process(
            f"restarts-{role}",
            role,
            f"SIGKILL of one {role} every {RESTART_EVERY_S:.0f} s",
            REPEATED,
            repeats=f"kill-{role}",
        )
        for role in ROLES[:3]
    ),
    _process("lose-workers", FaultTarget.WORKER, "SIGKILL of half of the workers and SIGTERM of the others, at once"),
    _process(
        "spool-full",
        FaultTarget.GATEWAY,
        "a gateway without Redis whose disk is full",
        SHORT,
        outside=False,
        needs=Needs.SERVER,
    ),
    _redis("kill-redis", "SIGKILL of Redis, which restarts empty; in a cluster its replica takes over", outside=False),
    _redis("stop-redis", "SIGSTOP of Redis", SUSPENSION),
    _redis("client-kill-normal", "CLIENT KILL TYPE normal: every command connection is closed"),
    _redis("client-kill-pubsub", "CLIENT KILL TYPE pubsub: every subscriber is closed"),
    _redis("flushall", "FLUSHALL: Redis is empty"),
    _redis("script-flush", "SCRIPT FLUSH: Redis has no scripts"),
    _redis(
        "maxmemory", "CONFIG SET maxmemory just above the used memory", SHORT, outside=False, spare_kib=(0.0, 512.0)
    ),
    _redis("client-pause", "CLIENT PAUSE ALL: Redis replies later", (0.2, 3.0), outside=False),
    _redis(
        "redis-disk-full",
        "the disk of the append-only file of Redis is full",
        SHORT,
        outside=False,
        needs=Needs.SERVER,
    ),
    _redis(
        "clock-forward",
        "the clock of Redis steps forwards, and back at the end",
        SHORT,
        outside=False,
        needs=Needs.SERVER,
        step_s=STEP,
    ),
    _redis(
        "clock-backward",
        "the clock of Redis steps backwards, and forwards at the end",
        SHORT,
        outside=False,
        needs=Needs.SERVER,
        step_s=STEP,
    ),
    _redis("failover", "CLUSTER FAILOVER: the replica takes over in order", outside=False, needs=Needs.CLUSTER),
    _redis(
        "migrate-slot",
        "the slot of a cell moves to another primary key by key",
        (1.0, 4.0),
        outside=False,
        needs=Needs.CLUSTER,
    ),
    _proxy("delay", "20 to 200 ms on the way to and from a server", delay_ms=(20.0, 200.0)),
    _proxy("drop-requests", "requests of one client to a server are lost"),
    _proxy("drop-replies", "replies of a server to one client are lost"),
    _proxy("cut", "every connection of one client to a server is reset", INSTANT),
    _proxy("refuse", "new connections of one client to a server are refused, open ones reset"),
    _postgres("kill-postgres", "SIGKILL of all processes of PostgreSQL", outside=False),
    _postgres("stop-postgres", "SIGSTOP of all processes of PostgreSQL", SUSPENSION),
    _postgres("pg-terminate", "pg_terminate_backend of every client"),
    _postgres("pg-lock", "LOCK TABLE requests", (1.0, 5.0)),
    _postgres("pg-disk-full", "PostgreSQL backends cannot write files", (0.3, 3.0), outside=False),
    FaultKind(
        "hostile-client",
        Family.CLIENT,
        (FaultTarget.GATEWAY,),
        HOSTILE,
        "incomplete heads and bodies, invalid hosts, garbage, abandoned streams and slow readers at a gateway",
    ),
    _engine("kill-engine", "SIGKILL of the engine, which restarts"),
    _engine("stop-engine", "SIGSTOP of the engine", SUSPENSION),
    _engine("engine-reset", "the engine resets the connections of all its calls"),
    _engine("engine-resets", "the engine resets a part of its new streams at a random token", SHORT, share=(0.1, 0.9)),
    _engine(
        "engine-busy", "the engine refuses new calls with 429 while more than a few run", REFUSALS, above=(-1.0, 8.0)
    ),
)

BY_NAME = {kind.name: kind for kind in KINDS}


QUIET_S = 3.0
GAP_S = (2.0, 5.0)
SHORT_GAP_S = (1.0, 2.5)  # A short run would otherwise have one or two faults.
SHORT_RUN_S = 30.0
BACK_S = 5.0  # By then a killed process is restarted, also on a busy machine.


@dataclass(frozen=True)
class Planned:
    """One planned fault: `at_s` and `length_s` in seconds, `index` counts from 0 among the targets of `place`."""

    at_s: float
    kind: FaultKind
    place: FaultTarget
    index: int
    length_s: float
    parameters: Mapping[str, float]

    def text(self, target: str) -> str:
        """One line: time, fault, target, length."""
        length = f" for {self.length_s:.1f} s" if self.length_s else ""
        drawn = "".join(f", {name} {value:.0f}" for name, value in self.parameters.items())
        return f"{self.at_s:6.1f} s  {self.kind.name} {target}{length}{drawn}"


def schedule(
    seed: int, duration_s: float, kinds: Sequence[FaultKind], targets: Mapping[FaultTarget, int]
) -> list[Planned]:
    """All faults of a run in order of time. `targets`: the number of targets of each place; kinds without one are left out.

    The same arguments give the same schedule on every machine.
    """
    possible = [kind for kind in kinds if any(targets.get(place) for place in kind.places)]
    if not possible:
        return []
    random = Random(f"{seed}/faults")
    drawn = _drawn(random, possible)
    planned: list[Planned] = []
    for at_s in _times(random, duration_s):
        fault = _planned(random, at_s, next(drawn), targets, duration_s - QUIET_S)
        if not any(_clash(fault, other) for other in planned):
            planned.append(fault)
    return planned


def _times(random: Random, duration_s: float) -> Iterator[float]:
    gap = GAP_S if duration_s >= SHORT_RUN_S else SHORT_GAP_S
    at_s = QUIET_S + random.uniform(0.0, gap[0])
    while at_s <= duration_s - QUIET_S:
        yield at_s
        at_s += random.uniform(*gap)


def _drawn(random: Random, kinds: Sequence[FaultKind]) -> Iterator[FaultKind]:
    """One kind of each family, then all others, then all kinds again and again."""
    kinds_left = list(kinds)
    random.shuffle(kinds_left)
    first = list({kind.family: kind for kind in kinds_left}.values())
    random.shuffle(first)
    yield from first
    yield from (kind for kind in kinds_left if kind not in first)
    while True:
        random.shuffle(kinds_left)
        yield from kinds_left


def _planned(random: Random, at_s: float, kind: FaultKind, targets: Mapping[FaultTarget, int], end_s: float) -> Planned:
    place = random.choice([place for place in kind.places if targets.get(place)])
    index = random.randrange(targets[place])
    length_s = min(random.uniform(*kind.length_s), max(end_s - at_s, 0.0))
    parameters = {name: random.uniform(*bounds) for name, bounds in sorted(kind.draws.items())}
    return Planned(at_s, kind, place, index, length_s, parameters)


def _clash(one: Planned, other: Planned) -> bool:
    if (one.kind.name, one.place, one.index) == (other.kind.name, other.place, other.index):
        return one.at_s <= _end(other) and other.at_s <= _end(one)
    # While one process of a role is restarted repeatedly, the others must serve.
    repeated = bool(one.kind.repeats or other.kind.repeats)
    return one.place is other.place and repeated and one.at_s <= _back(other) and other.at_s <= _back(one)


def _end(fault: Planned) -> float:
    return fault.at_s + fault.length_s


def _back(fault: Planned) -> float:
    return _end(fault) + BACK_S
