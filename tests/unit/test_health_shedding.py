"""The first sentence that on-call reads: who is shed, how much, why and since when."""

import pytest

from gateway.health_shedding import Flow, shedding
from gateway.losses import Loss

AT_14_02 = 14 * 3_600_000 + 2 * 60_000
WELL = Flow(100.0, 0.0, 100.0)


@pytest.mark.parametrize(
    ("tiers", "capacity_rps", "losses", "reason"),
    [
        ({"paid": WELL, "free": WELL}, 310.0, (), None),
        ({"paid": WELL, "free": WELL}, 310.0, (Loss("gpu-3", AT_14_02),), None),  # a loss alone is not its news
        ({"free": Flow(100.0, 1.9, 100.0)}, 310.0, (), None),  # the edge of a limit that works
        ({"free": Flow(1.0, 0.4, 1.0)}, 310.0, (), None),  # two in five seconds
        (
            {"paid": Flow(200.0, 0.0, 200.0), "free": Flow(280.0, 106.4, 280.0)},
            310.0,
            (Loss("gpu-3", AT_14_02),),
            "free is shed 38%: capacity 310/s under demand 480/s since gpu-3 was lost at 14:02 UTC.",
        ),
        (
            {"paid": Flow(200.0, 10.0, 200.0), "free": Flow(280.0, 280.0, 280.0)},
            160.0,
            (Loss("gpu-1", AT_14_02 + 90_000), Loss("gpu-3", AT_14_02)),
            "paid is shed 5%, free is shed 100%: capacity 160/s under demand 480/s since gpu-3 and 1 more were lost at 14:02 UTC.",
        ),
        (
            {"free": Flow(280.0, 28.0, 280.0)},
            310.0,
            (),
            "free is shed 10%: demand 280/s within capacity 310/s, but too many wait.",
        ),
        ({"free": Flow(0.0, 5.0, 4.0)}, 1.0, (), "free is shed 100%: capacity 1/s under demand 4/s."),
    ],
)
def test_the_reason(tiers: dict[str, Flow], capacity_rps: float, losses: tuple[Loss, ...], reason: str | None) -> None:
    """Degraded where there is one."""
    found = shedding(tiers, capacity_rps, losses)

    assert (found.reason, found.level) == (reason, "healthy" if reason is None else "degraded")
