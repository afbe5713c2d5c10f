"""What `tierlane check` makes of what it saw: pure judgements, and how they are printed."""

from typing import Any

import msgspec
import pytest

from ledger.catalog.snapshot import Model, Tier
from scheduler.protocol.pool_view import Observation, WorkerView
from tierlane.check import system
from tierlane.check.system import CheckItem, document, lines_of, passes, status_line

FREE = Tier("free", 3, 0.1, (10.0, 20.0, 8, None), 500, 2000, None, None)
TINY = Model("tiny", "default", 8, None, 40, 3000, 100.0, 0.8, 0, True)


def worker(name: str, *, healthy: bool, status: str = "ready") -> WorkerView:
    return WorkerView(name, status, 0.5, 0, 120.0, healthy, 100.0, 50.0, "tiny", "v1")


def looking(*workers: WorkerView) -> Observation:
    return Observation(0, {}, list(workers), [], 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("info", "levels"),
    [
        ({"redis_version": "7.0.15", "maxmemory_policy": "noeviction"}, ["pass", "pass", "pass"]),
        ({"redis_version": "7.2.0-rc1", "maxmemory_policy": "noeviction"}, ["pass", "pass", "pass"]),
        ({"redis_version": "6.2.0", "maxmemory_policy": "allkeys-lru"}, ["fail", "pass", "fail"]),
        ({"redis_version": "7.2.4", "maxmemory_policy": "noeviction", "cluster_enabled": 1}, ["pass", "fail", "pass"]),
        ({}, ["fail", "pass", "fail"]),
    ],
)
def test_redis(info: dict[str, object], levels: list[str]) -> None:
    """The floor of the version, that it is no cluster, and that nothing is evicted."""
    assert [item.level for item in system.judge_redis(info)] == levels


@pytest.mark.parametrize(
    ("skew_ms", "round_trip_ms", "level"),
    [(0.0, 1.0, "pass"), (-99.0, 0.0, "pass"), (101.0, 0.0, "fail"), (-140.0, 20.0, "fail"), (105.0, 20.0, "pass")],
)
def test_clocks(skew_ms: float, round_trip_ms: float, level: str) -> None:
    """100 ms, and what the round trip leaves open is no proof."""
    assert system.judge_clock("redis", skew_ms, round_trip_ms).level == level


@pytest.mark.parametrize(
    ("revision", "behind", "level"),
    [("2", False, "pass"), ("1", True, "fail"), (None, True, "fail"), ("3", False, "warn")],
)
def test_migrations(revision: str | None, behind: bool, level: str) -> None:
    """An old schema fails; a newer one than this installation's is borne."""
    assert system.judge_migrations(revision, "2", behind=behind).level == level


def test_the_catalog() -> None:
    """A paused tier and a catalog without models are told."""
    paused = msgspec.structs.replace(FREE, paused=True)

    assert [item.level for item in system.judge_tiers([FREE])] == ["pass"]
    assert [(item.level, item.said) for item in system.judge_tiers([paused])][1] == ("warn", "paused: free")
    assert system.judge_models([TINY]).level == "pass"
    assert system.judge_models([msgspec.structs.replace(TINY, enabled=False)]).level == "fail"
    assert system.judge_models([]).level == "fail"


def test_pools() -> None:
    """Each pool that an enabled model names needs a healthy worker; one that is cordoned is named."""
    other = msgspec.structs.replace(TINY, name="other", pool="other")
    off = msgspec.structs.replace(TINY, name="off", pool="off", enabled=False)
    seen = {
        "default": looking(worker("w1", healthy=True), worker("w2", healthy=False, status="cordoned")),
        "other": looking(worker("w3", healthy=False)),
        "off": looking(),
    }

    items = system.judge_pools([TINY, other, off], seen)

    assert [(item.name, item.level) for item in items] == [("pool default", "warn"), ("pool other", "fail")]
    assert items[0].advice == "Cordoned: w2."


@pytest.mark.parametrize(
    ("document", "levels"),
    [
        ({"status": "healthy", "reasons": [], "audit_lag_ms": 12}, ["pass", "pass"]),
        ({"status": "degraded", "reasons": ["A.", "B."], "audit_lag_ms": 10_001}, ["warn", "fail"]),
        ({"status": "down", "reasons": ["A."], "audit_lag_ms": None}, ["fail", "warn"]),
        ({}, ["fail", "warn"]),
    ],
)
def test_a_gateway(document: dict[str, Any], levels: list[str]) -> None:
    """`degraded` is a warning with its reasons, what else is not healthy a failure."""
    items = system.judge_gateway(document)

    assert [item.level for item in items] == levels
    assert items[0].advice == " ".join(document.get("reasons", []))


def test_dead_letters() -> None:
    """They fail nothing: somebody has to look at them."""
    assert [system.judge_dead_letters(count).level for count in (0, 3)] == ["pass", "warn"]


def test_what_is_printed() -> None:
    """Groups in their order, a mark each, advice below, one line of status; the same for programs."""
    items = [
        CheckItem("audit", "lag", "warn", "not known"),
        CheckItem("redis", "version", "fail", "6.0\x1b[2J", "Upgrade it."),
        CheckItem("settings", "readable", "pass", "here"),
        CheckItem("redis", "clock", "pass", "+0 ms"),
    ]
    lines = lines_of(items)

    assert [line.split()[:2] for line in lines if line] == [
        ["settings"],
        ["\u2713", "readable"],
        ["redis"],
        ["\u2717", "version"],
        ["Upgrade", "it."],
        ["\u2713", "clock"],
        ["audit"],
        ["!", "lag"],
        ["Status", "check"],
    ]
    assert "6.0\\x1b[2J" in "\n".join(lines)
    assert lines[-1] == "Status check results are \u2717 (4 checks, 1 failed, 1 with a warning)"
    assert (passes(items), passes(items[:1])) == (False, True)
    assert status_line(items[:1]).startswith("Status check results are \u2713")
    assert [check["group"] for check in document(items)["checks"]] == ["settings", "redis", "redis", "audit"]
    assert document(items)["ok"] is False
