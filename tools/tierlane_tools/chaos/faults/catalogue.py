"""The catalogue of faults; `actions` injects them.

A stack on a cluster has no proxies of Redis, because its clients connect to the addresses that the servers announce: network
faults are those of PostgreSQL there, and SIGSTOP of a primary cuts it off.
"""

from tierlane_tools.chaos.faults.fault_kind import Family, FaultKind, FaultTarget, Needs, Range

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

ROLES = (FaultTarget.GATEWAY, FaultTarget.SCHEDULER, FaultTarget.WORKER, FaultTarget.MODEL)


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
