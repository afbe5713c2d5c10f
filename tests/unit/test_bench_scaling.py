"""What the case of the fleet that follows its load makes of its figures."""

from typing import Any

import pytest
from cases import scaling


def step(direction: str, at_s: float) -> dict[str, Any]:
    return {"direction": direction, "at_s": at_s}


def found(**changes: Any) -> dict[str, Any]:
    part = {"scheduled": 1000, "lost": 0, "failed_after": 0, "refused": 20, "enterprise_failed": 0, "p95_ms": 120.0}
    part |= {"accepted": 980, "rows_of_others": changes.pop("rows_of_others", 980)}
    workers = changes.pop("workers", [2, 8, 2])
    steps = changes.pop("steps", [step("up", 5.0), step("up", 9.0), step("down", 60.0)])
    return {"loads": [part, part | changes], "looks": [{"workers": count} for count in workers], "steps": steps}


def verdict(data: dict[str, Any]) -> bool:
    return all(check.holds is not False for check in scaling.judge(data))


def test_a_fleet_that_followed_holds() -> None:
    """Refusals while workers are on their way are told, and count against nothing."""
    data = found()

    assert verdict(data)
    assert scaling.judge(data)[-1].measured == "40 of 2,000 (2.0%)"


@pytest.mark.parametrize(
    "change",
    [
        {"lost": 1},
        {"rows_of_others": 981},
        {"failed_after": 1},
        {"enterprise_failed": 1},
        {"p95_ms": 250.1},
        {"workers": [2, 7, 2]},
        {"workers": [2, 8, 3]},
        {"steps": [step("up", 5.0), step("down", 6.0), step("up", 7.0)]},
    ],
)
def test_each_figure_can_fail(change: dict[str, Any]) -> None:
    """Whatever else is right."""
    assert not verdict(found(**change))


@pytest.mark.parametrize(
    ("at_s", "most"),
    [([], 0), ([("up", 1.0)], 0), ([("up", 1.0), ("down", 2.0)], 1), ([("up", 1.0), ("down", 2.0), ("up", 6.0)], 1)],
)
def test_turns_are_counted_within_a_cooldown(at_s: list[tuple[str, float]], most: int) -> None:
    """Those of any stretch of four seconds."""
    assert scaling.most_turns([step(direction, at) for direction, at in at_s], 4.0) == most
