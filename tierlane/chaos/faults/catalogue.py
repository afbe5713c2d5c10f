"""The catalogue of faults (family, target, duration, parameters) and the schedule: a pure function of the seed.

How a fault is injected is in `actions`. Faults come every 2 to 5 s and may overlap, but never two of one kind on one
target, and no other on a role of which one process is restarted again and again. Kinds are dealt like cards, so that
none is missing for long, and the first deal has one of each family. The first and the last seconds are quiet.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

Range = tuple[float, float]


class Family(StrEnum):
    """Which part of the stack a fault is about; a minute of chaos has at least one of each."""

    PROCESS = "process"
    REDIS = "redis"
    PROXY = "proxy"
    POSTGRES = "postgres"
    CLIENT = "client"


class FaultTarget(StrEnum):
    """What a fault hits: one of several processes, one of several proxies, or a server of which there is one."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    MODEL = "model"
    REDIS = "redis"
    POSTGRES = "postgres"
    REDIS_PROXY = "redis-proxy"
    POSTGRES_PROXY = "postgres-proxy"


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault. `length_s` (0, 0) is a blow: over at once. `draws`: ranges of further parameters.

    `outside`: it needs no proxy of ours and nothing that could not be undone, so it may be done to any stack.
    `repeats`: it is the blow of this name, again and again on one target, every `every_s`; each is an event of its own.
    """

    name: str
    family: Family
    places: tuple[FaultTarget, ...]
    length_s: Range
    says: str
    draws: dict[str, Range] = field(default_factory=dict)
    outside: bool = False
    repeats: str = ""
    every_s: float = 0.0


BLOW: Range = (0.0, 0.0)
STANDSTILL: Range = (0.2, 5.0)
SPELL: Range = (0.5, 5.0)
STEP: Range = (0.5, 8.0)
HOSTILE: Range = (2.0, 8.0)
IN_A_ROW: Range = (6.0, 12.0)
RESTART_EVERY_S = 3.0
PROXIES = (
    FaultTarget.REDIS_PROXY,
    FaultTarget.REDIS_PROXY,
    FaultTarget.POSTGRES_PROXY,
)  # Redis is asked for every request.


def _killed(place: FaultTarget) -> FaultKind:
    return FaultKind(f"kill-{place}", Family.PROCESS, (place,), BLOW, f"SIGKILL of a {place} process", outside=True)


def _stopped(place: FaultTarget) -> FaultKind:
    return FaultKind(
        f"stop-{place}", Family.PROCESS, (place,), STANDSTILL, f"SIGSTOP of a {place} process", outside=True
    )


def _ended(place: FaultTarget) -> FaultKind:
    return FaultKind(
        f"term-{place}", Family.PROCESS, (place,), BLOW, f"SIGTERM of a {place}, which hands back", outside=True
    )


def _restarted(place: FaultTarget) -> FaultKind:
    says = f"SIGKILL of one {place} every {RESTART_EVERY_S:.0f} s"
    kill = f"kill-{place}"
    return FaultKind(
        f"restarts-{place}",
        Family.PROCESS,
        (place,),
        IN_A_ROW,
        says,
        outside=True,
        repeats=kill,
        every_s=RESTART_EVERY_S,
    )


def _proxy(name: str, says: str, length_s: Range = SPELL, **draws: Range) -> FaultKind:
    return FaultKind(name, Family.PROXY, PROXIES, length_s, says, draws)


def _redis(name: str, says: str, length_s: Range = BLOW, *, outside: bool = True, **draws: Range) -> FaultKind:
    return FaultKind(name, Family.REDIS, (FaultTarget.REDIS,), length_s, says, draws, outside)


def _postgres(name: str, says: str, length_s: Range = BLOW, *, outside: bool = True) -> FaultKind:
    return FaultKind(name, Family.POSTGRES, (FaultTarget.POSTGRES,), length_s, says, outside=outside)


ROLES = (FaultTarget.GATEWAY, FaultTarget.SCHEDULER, FaultTarget.WORKER, FaultTarget.MODEL)

KINDS: tuple[FaultKind, ...] = (
    *(_killed(role) for role in ROLES),
    *(_stopped(role) for role in ROLES),
    *(_ended(role) for role in (FaultTarget.GATEWAY, FaultTarget.SCHEDULER, FaultTarget.WORKER)),
    *(_restarted(role) for role in (FaultTarget.GATEWAY, FaultTarget.SCHEDULER, FaultTarget.WORKER)),
    FaultKind(
        "lose-workers",
        Family.PROCESS,
        (FaultTarget.WORKER,),
        BLOW,
        "SIGKILL of half of the workers and SIGTERM of the others, at once",
        outside=True,
    ),
    FaultKind(
        "spool-full",
        Family.PROCESS,
        (FaultTarget.GATEWAY,),
        SPELL,
        "a gateway without Redis whose disk takes no byte more",
    ),
    _redis("kill-redis", "SIGKILL of Redis, which comes back empty", outside=False),
    _redis("stop-redis", "SIGSTOP of Redis", STANDSTILL),
    _redis("client-kill-normal", "CLIENT KILL TYPE normal: every command connection is closed"),
    _redis("client-kill-pubsub", "CLIENT KILL TYPE pubsub: every subscriber is closed"),
    _redis("flushall", "FLUSHALL: Redis is empty"),
    _redis("script-flush", "SCRIPT FLUSH: Redis knows no script"),
    _redis("maxmemory", "CONFIG SET maxmemory just above what is used", SPELL, outside=False, spare_kib=(0.0, 512.0)),
    _redis("client-pause", "CLIENT PAUSE ALL: Redis takes commands and answers later", (0.2, 3.0), outside=False),
    _redis("redis-disk-full", "an append-only file of Redis that takes no byte more", SPELL, outside=False),
    _redis(
        "clock-forward", "the clock of Redis steps forwards, and back at the end", SPELL, outside=False, step_s=STEP
    ),
    _redis(
        "clock-backward", "the clock of Redis steps backwards, and on at the end", SPELL, outside=False, step_s=STEP
    ),
    _proxy("delay", "20 to 200 ms on the way to and from a server", delay_ms=(20.0, 200.0)),
    _proxy("drop-requests", "what one client sends to a server is lost"),
    _proxy("drop-replies", "what a server answers one client is lost: half-open"),
    _proxy("cut", "every connection of one client to a server is reset", BLOW),
    _proxy("refuse", "new connections of one client to a server are refused, open ones reset"),
    _postgres("kill-postgres", "SIGKILL of all processes of PostgreSQL", outside=False),
    _postgres("stop-postgres", "SIGSTOP of all processes of PostgreSQL", STANDSTILL),
    _postgres("pg-terminate", "pg_terminate_backend of every client"),
    _postgres("pg-lock", "LOCK TABLE requests", (1.0, 5.0)),
    _postgres("pg-disk-full", "backends of PostgreSQL that can write no file", (0.3, 3.0), outside=False),
    FaultKind(
        "hostile-client",
        Family.CLIENT,
        (FaultTarget.GATEWAY,),
        HOSTILE,
        "half heads, half bodies, strange hosts, garbage, abandoned streams and slow readers at a gateway",
    ),
)

BY_NAME = {kind.name: kind for kind in KINDS}


QUIET_S = 3.0
GAP_S = (2.0, 5.0)
SHORT_GAP_S = (1.0, 2.5)  # A run of seconds would otherwise see one or two.
SHORT_RUN_S = 30.0
BACK_S = 5.0  # By then a process that was killed is there again, on a machine that has other things to do as well.


@dataclass(frozen=True)
class Planned:
    """One fault to come: `at_s` and `length_s` in seconds, `index` counts from 0 among the targets of `place`."""

    at_s: float
    kind: FaultKind
    place: FaultTarget
    index: int
    length_s: float
    parameters: Mapping[str, float]

    def told(self, target: str) -> str:
        """One line, as it is shown: when, what, on whom, how long."""
        length = f" for {self.length_s:.1f} s" if self.length_s else ""
        drawn = "".join(f", {name} {value:.0f}" for name, value in self.parameters.items())
        return f"{self.at_s:6.1f} s  {self.kind.name} {target}{length}{drawn}"


def schedule(
    seed: int, duration_s: float, kinds: Sequence[FaultKind], targets: Mapping[FaultTarget, int]
) -> list[Planned]:
    """All faults of a run in order of time. `targets`: how many there are of each place; kinds without one are left out.

    The same arguments give the same schedule on every machine.
    """
    possible = [kind for kind in kinds if any(targets.get(place) for place in kind.places)]
    if not possible:
        return []
    random = Random(f"{seed}/faults")
    cards = _dealt(random, possible)
    planned: list[Planned] = []
    for at_s in _times(random, duration_s):
        fault = _planned(random, at_s, next(cards), targets, duration_s - QUIET_S)
        if not any(_clash(fault, other) for other in planned):
            planned.append(fault)
    return planned


def _times(random: Random, duration_s: float) -> Iterator[float]:
    gap = GAP_S if duration_s >= SHORT_RUN_S else SHORT_GAP_S
    at_s = QUIET_S + random.uniform(0.0, gap[0])
    while at_s <= duration_s - QUIET_S:
        yield at_s
        at_s += random.uniform(*gap)


def _dealt(random: Random, kinds: Sequence[FaultKind]) -> Iterator[FaultKind]:
    """One of each family first, then what is left of the pack, then whole packs for ever."""
    pack = list(kinds)
    random.shuffle(pack)
    first = list({kind.family: kind for kind in pack}.values())
    random.shuffle(first)
    yield from first
    yield from (kind for kind in pack if kind not in first)
    while True:
        random.shuffle(pack)
        yield from pack


def _planned(random: Random, at_s: float, kind: FaultKind, targets: Mapping[FaultTarget, int], end_s: float) -> Planned:
    place = random.choice([place for place in kind.places if targets.get(place)])
    index = random.randrange(targets[place])
    length_s = min(random.uniform(*kind.length_s), max(end_s - at_s, 0.0))
    parameters = {name: random.uniform(*bounds) for name, bounds in sorted(kind.draws.items())}
    return Planned(at_s, kind, place, index, length_s, parameters)


def _clash(one: Planned, other: Planned) -> bool:
    if (one.kind.name, one.place, one.index) == (other.kind.name, other.place, other.index):
        return one.at_s <= _end(other) and other.at_s <= _end(one)
    # While one of a role is restarted again and again, the others are what the promise rests on.
    in_a_row = bool(one.kind.repeats or other.kind.repeats)
    return one.place is other.place and in_a_row and one.at_s <= _back(other) and other.at_s <= _back(one)


def _end(fault: Planned) -> float:
    return fault.at_s + fault.length_s


def _back(fault: Planned) -> float:
    return _end(fault) + BACK_S
