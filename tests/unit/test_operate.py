"""`tierlane gpu`, `top` and `dlq` without servers: the effect of a cordon, rows, frames, and selections of dead letters."""

import io
import re
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from scheduler.protocol.pool_view import Observation, WorkerView
from scheduler.protocol.replies import Reply
from tierlane.connect import UsageError
from tierlane.operate.dead_letters import Selection
from tierlane.operate.pools import cordon_effect, worker_rows
from tierlane.operate.requeue import ending
from tierlane.operate.top import TopState, frame

TIER = {
    "depth": 1234,
    "oldest_ms": 87.6,
    "effective_limit_ratio": 0.5,
    "allocated_rps": 40.0,
    "shed_per_second": 2.5,
    "p95_ms": 120.4,
}
REASON = "w1\x1b[2J is cordoned."
CHECK = {"output": REASON, "action": "Uncordon\x1b it.", "runbook": "docs/runbooks/TierlaneGpuLost.md"}
DOCUMENT: dict[str, Any] = {
    "status": "degraded",
    "reasons": [f"Pool a: {REASON}"],
    "tiers": {"free": TIER},
    "checks": {"a/gpus:healthy": [CHECK]},
}


def worker(name: str, *, healthy: bool = True, status: str = "ready") -> WorkerView:
    return WorkerView(name, status, 0.5, 7, 100.0, 50.0, "tiny", "v1", age_ms=120.0, healthy=healthy)


def observation(*workers: WorkerView) -> Observation:
    return Observation(0, {}, list(workers), [], 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("name", "effect", "last"),
    [
        ("a", "It finishes 7 requests; pool default keeps 1 healthy GPU.", False),
        ("c", "It finishes 7 requests; pool other keeps 0 healthy GPUs.", True),
        ("d", "It finishes 7 requests; pool other keeps 1 healthy GPU.", False),
        ("x", "No worker with this id was seen", False),
    ],
)
def test_a_cordon_of_the_last_healthy_gpu_is_marked(name: str, effect: str, last: bool) -> None:
    """The effect is that on the pool of the worker."""
    seen = {
        "default": observation(worker("a"), worker("b")),
        "other": observation(worker("c"), worker("d", healthy=False)),
    }
    text, is_last = cordon_effect(name, seen)

    assert (text.startswith(effect), is_last) == (True, last)


def test_rows_of_workers_contain_cordoned_workers_that_are_away() -> None:
    """These are last, and are not in the list of one pool. A worker whose heartbeats ended is lost, without its old figures."""
    seen = {"default": observation(worker("b", status="cordoned", healthy=False), worker("a", healthy=False))}
    reasons = {"b": "", "z": "away"}

    rows = worker_rows(seen, reasons, with_absent=True)
    assert [rows[0][field] for field in ("utilization", "in_flight", "rps")] == [None] * 3
    assert rows[0]["problem"] == "last seen 0.1 s ago"

    assert [(row["worker"], row["status"], row["cordoned"], row["reason"]) for row in rows] == [
        ("a", "lost", False, None),
        ("b", "cordoned", True, "no reason given"),
        ("z", "not seen", True, "away"),
    ]
    assert [row["worker"] for row in worker_rows(seen, reasons, with_absent=False)] == ["a", "b"]


def test_workers_with_slots_show_them_with_their_source() -> None:
    """In the list of workers, and for each pool in `top`; a worker that runs batches has none."""
    slotted = replace(worker("a"), slots=64, slots_source="64 sequences in /metrics")
    rows = worker_rows({"default": observation(slotted, worker("b"))}, {}, with_absent=False)
    pool = {"healthy_gpus": 1, "total_gpus": 1, "slots": 64, "running": 7}

    assert [(row["slots"], row["slots_source"]) for row in rows] == [(64, "64 sequences in /metrics"), (None, None)]
    assert "7/64" in drawn(TopState("u", DOCUMENT | {"pools": {"a": pool}}, 0.0), 0.0)


def test_the_cause_of_an_unhealthy_worker_is_shown() -> None:
    """With its sentence in the list of workers, as a number for each pool in `top`."""
    away = replace(worker("a", status="away", healthy=False), cause="timeout", reason="The endpoint does not respond.")
    (row,) = worker_rows({"default": observation(away)}, {}, with_absent=False)
    pool = {"healthy_gpus": 1, "total_gpus": 4, "unhealthy_gpus": {"lost": 1, "timeout": 2}}

    assert (row["cause"], row["problem"]) == ("timeout", "The endpoint does not respond.")
    assert "1 lost, 2 timeout" in drawn(TopState("u", DOCUMENT | {"pools": {"a": pool}}, 0.0), 0.0)


def drawn(state: TopState, now_s: float) -> str:
    out = io.StringIO()
    Console(file=out, width=120, highlight=False).print(frame(state, now_s))
    return out.getvalue()


def test_a_frame_has_the_tiers_and_the_age_of_old_figures() -> None:
    """Control characters are escaped; before the first response there is only the problem. The installation is named."""
    assert "tierlane prod-eu " in drawn(TopState("u", DOCUMENT | {"installation": "prod-eu"}, 0.0), 0.0)
    text = drawn(TopState("u", DOCUMENT, 100.0, "The gateway at u does not respond: refused."), 107.0)

    assert text.splitlines()[:2] == ["The gateway at u does not respond: refused.", "The data below is 7 s old."]
    assert "Pool a: w1\\x1b[2J is cordoned.\n    Uncordon\\x1b it.\n    docs/runbooks/TierlaneGpuLost.md\n" in re.sub(
        " +\n", "\n", text
    )
    assert ["free", "1,234", "88", "50%", "40.0", "2.5", "120"] in [line.split() for line in text.splitlines()]
    assert drawn(TopState("u", problem="It does not answer."), 9.0) == "It does not answer.\n"


def test_a_frame_has_the_errors_of_each_tier_by_code() -> None:
    """The most frequent ones first, and the number of the others."""
    errors = {"queue_full": 3, "shed_for_priority": 1200, "gpu_timeout": 2, "internal_error": 0}
    errors |= {"worker_lost": 2, "deadline_exceeded": 2, "invalid_request": 1}
    text = drawn(TopState("u", DOCUMENT | {"tiers": {"free": TIER | {"errors_60s": errors}}}, 0.0), 0.0)

    assert (
        "Errors of the last minute\n"
        "free: 1,200 shed_for_priority, 3 queue_full, 2 deadline_exceeded, 2 gpu_timeout, 2 worker_lost, 1 others\n"
    ) in re.sub(" +\n", "\n", text)


@pytest.mark.parametrize(
    "document", [{}, {"tiers": 5, "pools": None, "reasons": "x"}, {"tiers": {"free": {"depth": "x"}}}]
)
def test_a_malformed_document_is_drawn(document: dict[str, Any]) -> None:
    """The document comes from outside."""
    assert "tierlane unknown" in drawn(TopState("u", document, 0.0), 0.0)


def test_dead_letters_are_selected_in_one_way() -> None:
    """By unique ids, by age, or all."""
    assert Selection.of(["b", "a", "b"], None, everything=False) == (["b", "a"], None)
    assert Selection.of([], "1h", everything=False) == (None, 3600.0)
    assert Selection.of([], None, everything=True) == (None, None)
    with pytest.raises(UsageError):
        Selection.of([], None, everything=False)
    with pytest.raises(UsageError, match=r"^--older-than: must be a number"):
        Selection.of([], "soon", everything=False)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "completed after 62 ms and 1 run."),
        (
            {"state": "failed", "error_code": "worker_lost", "attempts": 3},
            "failed, worker_lost after 62 ms and 3 runs.",
        ),
    ],
)
def test_the_result_of_a_requeue_does_not_contain_the_output(fields: dict[str, object], text: str) -> None:
    """State, code, time and number of runs."""
    whole = (
        "req_1",
        "c",
        "n",
        "completed",
        "",
        1,
        5.0,
        "b",
        1,
        "w",
        50.0,
        5,
        "v",
        "a secret output",
        3,
        "stop",
        "",
        1.5,
    )
    values = dict(zip(Reply.__struct_fields__, whole, strict=True)) | fields

    assert ending(Reply(**values), 0.0621) == text
    assert ending(None, 5.0).startswith("no result within 5 s")
