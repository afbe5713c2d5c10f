"""What health says of direct mode: who serves and since when, what the spool and each breaker are like."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gateway.direct.mode import DirectView
from gateway.operations.health_checks import HealthInputs, health
from health_inputs import health_inputs
from scheduler.protocol.pool_view import Observation, WorkerView

WORKER = WorkerView("worker-1", "ready", 0.5, 1, 100.0, True, 100.0, 50.0, "tiny", "v1")


def replace_worker(**changes: Any) -> WorkerView:
    return msgspec.structs.replace(WORKER, **changes)


REDIS_AWAY = {"redis_problem": "no answer", "look_age_s": 3.4}

CALM = DirectView(
    active=False,
    for_s=0.0,
    workers=0,
    serves=False,
    waiting=0,
    spool_bytes=0,
    spool_problem=None,
    bad_lines=0,
    breakers={"redis": "closed"},
)
SERVING = replace(CALM, active=True, for_s=3.21, workers=4, serves=True, spool_bytes=900, breakers={"redis": "open"})


def inputs(direct: DirectView, **changes: Any) -> HealthInputs:
    return health_inputs(observation=Observation(0, {}, [WORKER], [], 0, 0, 0, 0), direct=direct, **changes)


@pytest.mark.parametrize(
    ("direct", "changes", "status", "reasons"),
    [
        (CALM, {}, "healthy", []),
        (
            SERVING,
            REDIS_AWAY,
            "degraded",
            ["Redis does not answer; requests are served by direct calls to 4 workers since 3.2 s."],
        ),
        (
            replace(SERVING, workers=1, breakers={"redis": "closed"}),
            {},
            "degraded",
            [
                (
                    "Redis answers again, and is watched before it is trusted; "
                    "requests are served by direct calls to 1 worker since 3.2 s."
                )
            ],
        ),
        (
            replace(SERVING, serves=False, workers=0),
            REDIS_AWAY,
            "down",
            ["Redis was last looked at 3.4 s ago: no answer."],
        ),
        (
            replace(CALM, spool_problem="The spool is full: 67108864 bytes wait for Redis."),
            {},
            "degraded",
            ["The spool is full: 67108864 bytes wait for Redis."],
        ),
        (
            replace(CALM, breakers={"redis": "closed", "worker-2": "half_open"}),
            {},
            "degraded",
            ["Direct calls to worker-2 fail; they are tried again soon."],
        ),
    ],
)
def test_each_state_has_its_level_and_sentence(
    direct: DirectView, changes: dict[str, Any], status: str, reasons: list[str]
) -> None:
    """Down only where nobody is served."""
    _, document = health(inputs(direct, **changes))

    assert (document["status"], document["reasons"]) == (status, reasons)


def test_breakers_and_spool_are_checks() -> None:
    """Each with what was seen."""
    view = replace(SERVING, breakers={"redis": "open", "worker-1": "closed"})
    _, document = health(inputs(view, **REDIS_AWAY))
    seen = {name: check[0]["observedValue"] for name, check in document["checks"].items()}

    assert (seen["direct:spool"], seen["breaker:redis"], seen["breaker:worker-1"]) == (900, "open", "closed")


@pytest.mark.parametrize(
    "seen",
    [
        Observation(0, {}, [], [], 0, 0, 0, 0),  # Redis came back empty
        Observation(0, {}, [replace_worker(healthy=False)], [], 0, 0, 0, 0),
        Observation(0, {}, [WORKER], [], 0, 0, 0, 0, scheduler_age_ms=None, pass_age_ms=None),
        Observation(0, {}, [WORKER], [], 0, 0, 0, 0, scheduler_age_ms=9000.0, pass_age_ms=9000.0),
    ],
)
def test_who_serves_past_redis_is_not_down(seen: Observation) -> None:
    """Whatever was last seen of what the queues need: everybody is answered. Without direct mode it is an outage."""
    with_it = health_inputs(observation=seen, direct=SERVING, **REDIS_AWAY)
    without = health_inputs(observation=seen, direct=CALM)

    assert (health(with_it)[0], health(with_it)[1]["status"]) == (200, "degraded")
    assert health(without)[1]["status"] == "down"
