"""What becomes an event: two documents of state, and the sentences between them."""

from typing import Any

import pytest
from msgspec.structs import replace

from gateway.operations.state import DashboardEvent, DashboardState, GpuState, TierState, WorkerState, changes

FREE = TierState("free", 0.1, 0, 0.0, 10.0, 10.0, 0.0, 10.0, 10.0, 1.0, 1.0, None, None, None)
ONE = WorkerState("gpu-1", "default", "ready", True, 0.5, 1, 100, 10.0, 5.0, "tiny", "v1", None)
TWO = replace(ONE, id="gpu-2")
PAUSING = replace(TWO, status="paused", healthy=False, pausing=True)
NOW_MS = 50_000


def document(**changed: Any) -> DashboardState:
    """A system that is well."""
    fields: dict[str, Any] = dict.fromkeys(DashboardState.__struct_fields__, 0)
    fields |= {"at_ms": NOW_MS, "gateway": "g1", "status": "healthy", "reasons": [], "redis_problem": None}
    fields |= {"tiers": [FREE], "workers": [ONE, TWO], "gateways": ["g1"], "events": []}
    return DashboardState(**fields | changed)


WELL = document()


@pytest.mark.parametrize(
    ("before", "now", "events"),
    [
        ({}, {}, []),
        (
            {},
            {"status": "degraded", "reasons": ["1 of 2 GPUs is not healthy."]},
            [(NOW_MS, "bad", "Status is degraded: 1 of 2 GPUs is not healthy.")],
        ),
        ({"status": "down"}, {}, [(NOW_MS, "good", "Status is healthy.")]),
        (
            {},
            {"workers": [ONE, replace(TWO, healthy=False, age_ms=1200)]},
            [(NOW_MS - 1200, "bad", "gpu-2 was lost: this was its last heartbeat.")],
        ),
        (
            {},
            {"workers": [ONE, replace(TWO, healthy=False, status="down", gpu=GpuState(0.0, 0, 0, 0, "Xid 79"))]},
            [(NOW_MS, "bad", "gpu-2 is down, Xid 79.")],
        ),
        (
            {"workers": [ONE, replace(TWO, model_pid=7)]},
            {"workers": [ONE, replace(TWO, model_pid=8)]},
            [(NOW_MS, "bad", "gpu-2's model process restarted.")],
        ),
        ({"workers": [ONE, TWO]}, {"workers": [ONE, replace(TWO, model_pid=8)]}, []),
        (
            {},
            {"workers": [ONE, replace(TWO, healthy=False, status="cordoned")]},
            [(NOW_MS, "news", "gpu-2 is cordoned.")],
        ),
        ({}, {"workers": [ONE, PAUSING]}, []),
        ({"workers": [ONE, PAUSING]}, {}, []),
        (
            {"workers": [ONE, PAUSING]},
            {"workers": [ONE, replace(PAUSING, pausing=False, age_ms=1200)]},
            [(NOW_MS - 1200, "bad", "gpu-2 was lost: this was its last heartbeat.")],
        ),
        (
            {"workers": [ONE, PAUSING]},
            {"workers": [ONE, replace(TWO, healthy=False, status="away")]},
            [(NOW_MS, "bad", "gpu-2 is away.")],
        ),
        ({"workers": [ONE, replace(TWO, healthy=False)]}, {}, [(NOW_MS, "good", "gpu-2 is serving.")]),
        ({"workers": [ONE]}, {}, [(NOW_MS, "news", "gpu-2 joined: ready.")]),
        ({}, {"workers": [ONE]}, [(NOW_MS, "news", "gpu-2 left.")]),
        (
            {"workers": [ONE, replace(TWO, healthy=False)]},
            {"workers": [ONE]},
            [(NOW_MS, "news", "gpu-2 was removed.")],
        ),
        ({}, {"tiers": [replace(FREE, limit_ratio=0.95)]}, []),
        (
            {},
            {"tiers": [replace(FREE, limit_ratio=0.4)]},
            [(NOW_MS, "bad", "Limits of free are reduced to 40%.")],
        ),
        (
            {"tiers": [replace(FREE, limit_ratio=0.4)]},
            {"tiers": [replace(FREE, limit_ratio=0.3)]},
            [],
        ),
        (
            {"tiers": [replace(FREE, limit_ratio=0.4)]},
            {},
            [(NOW_MS, "good", "Limits of free are nearly restored.")],
        ),
        ({}, {"dlq": 2}, [(NOW_MS, "bad", "2 new dead letters, 2 in total.")]),
        ({"dlq": 2}, {}, [(NOW_MS, "news", "2 dead letters removed, 0 remain.")]),
        # What Redis does not tell did not change: its workers are not gone.
        ({}, {"redis_problem": "no answer.", "workers": []}, [(NOW_MS, "bad", "Redis is not available: no answer.")]),
        ({"redis_problem": "no answer.", "workers": []}, {}, [(NOW_MS, "good", "Redis is available again.")]),
        ({}, {"gateways": ["g2"]}, [(NOW_MS, "news", "Gateway g2 joined."), (NOW_MS, "news", "Gateway g1 left.")]),
    ],
)
def test_the_events_between_two_documents(
    before: dict[str, Any], now: dict[str, Any], events: list[tuple[int, str, str]]
) -> None:
    """None where nothing is different."""
    assert changes(document(**before), document(**now)) == [DashboardEvent(*each) for each in events]
