"""`tierlane gpu`, `queue`, `top` without servers: help, options, what is made of a look."""

import io
from typing import Any

import pytest
from rich.console import Console

from scheduler.protocol.pool_view import Observation, WorkerView
from tierlane.operate.pools import cordon_effect, worker_rows
from tierlane.operate.top import TopState, frame

TIER = {
    "depth": 1234,
    "oldest_ms": 87.6,
    "effective_limit_ratio": 0.5,
    "allocated_rps": 40.0,
    "shed_per_second": 2.5,
    "p95_ms": 120.4,
}
DOCUMENT: dict[str, Any] = {
    "status": "degraded",
    "reasons": ["1 of 4 GPUs is not healthy: w1\x1b[2J is cordoned."],
    "requests_per_second": 321.0,
    "capacity_rps": 400.0,
    "queue_depth": 1234,
    "dlq": 2,
    "audit_lag_ms": 15,
    "healthy_gpus": 3,
    "total_gpus": 4,
    "gpu_utilization": 0.82,
    "padding_waste": 0.1,
    "tiers": {"free": TIER},
}


def worker(name: str, *, healthy: bool = True, status: str = "ready") -> WorkerView:
    return WorkerView(name, status, 0.5, 7, 120.0, healthy, 100.0, 50.0, "tiny", "v1")


def looking(*workers: WorkerView) -> Observation:
    return Observation(0, {}, list(workers), [], 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("name", "said", "last"),
    [
        ("a", "It finishes 7 requests; pool default keeps 1 healthy GPU.", False),
        ("c", "It finishes 7 requests; pool other keeps 0 healthy GPUs.", True),
        ("d", "It finishes 7 requests; pool other keeps 1 healthy GPU.", False),
        ("x", "No worker with this id was seen in the last five minutes; the cordon applies when it starts.", False),
    ],
)
def test_what_a_cordon_leaves(name: str, said: str, last: bool) -> None:
    """The last healthy one of a pool is told from others, and from one that is not healthy anyway."""
    seen = {"default": looking(worker("a"), worker("b")), "other": looking(worker("c"), worker("d", healthy=False))}

    assert cordon_effect(name, seen) == (said, last)


def test_rows_of_workers() -> None:
    """In order, each with whether it is cordoned; what no pool has heard of comes last, and not in one pool's list."""
    seen = {"default": looking(worker("b", status="cordoned", healthy=False), worker("a"))}
    reasons = {"b": "", "z": "away"}

    rows = worker_rows(seen, reasons, with_absent=True)

    assert [(row["worker"], row["cordoned"], row["reason"]) for row in rows] == [
        ("a", False, None),
        ("b", True, "no reason given"),
        ("z", True, "away"),
    ]
    assert [row["worker"] for row in worker_rows(seen, reasons, with_absent=False)] == ["a", "b"]


def drawn(seen: TopState, now_s: float) -> str:
    out = io.StringIO()
    Console(file=out, width=120, highlight=False).print(frame(seen, now_s))
    return out.getvalue()


def test_a_frame_has_status_tiers_and_pools() -> None:
    """What is told of each, and nothing that moves the cursor."""
    text = drawn(TopState("http://x", DOCUMENT, 100.0), 100.5)
    lines = [line.split() for line in text.splitlines()]

    assert "tierlane degraded   321.0 requests/s of 400.0   1,234 waiting   dead letters 2   audit lag 15 ms" in text
    assert "w1\\x1b[2J is cordoned" in text
    assert ["free", "1,234", "88", "50%", "40.0", "2.5", "120"] in lines
    assert ["all", "3/4", "82%", "400.0", "1,234", "10%"] in lines
    assert "old" not in text


def test_a_gateway_that_is_away_is_said_with_the_age() -> None:
    """Old figures must not be taken for new ones; and before there were any, there is only why."""
    text = drawn(TopState("u", DOCUMENT, 100.0, "The gateway at u does not respond: refused."), 107.0)

    assert text.splitlines()[:2] == ["The gateway at u does not respond: refused.", "The data below is 7 s old."]
    assert drawn(TopState("u", problem="It does not answer."), 9.0) == "It does not answer.\n"


@pytest.mark.parametrize(
    "document", [{}, {"tiers": 5, "pools": None, "reasons": "x"}, {"tiers": {"free": {"depth": "x"}}}]
)
def test_a_strange_document_is_drawn_all_the_same(document: dict[str, Any]) -> None:
    """It comes from outside."""
    assert "tierlane unknown" in drawn(TopState("u", document, 0.0), 0.0)
