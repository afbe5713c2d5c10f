"""A request's explanation, put together of literal values."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ledger.audit.queries import RequestRow
from scheduler.protocol.limits import RejectionRecord
from scheduler.protocol.replies import RequestDetail
from scheduler.request_id import created_at, new_request_id
from tierlane.explain.answer import is_request_id
from tierlane.explain.request import KEPT, explain_request
from tierlane.explain.text import as_json, request_lines

ID = "req_0197f3a0000070008000000000000001"
BEGAN = created_at(ID)


def row(status: str = "completed", **fields: Any) -> RequestRow:
    known = dict.fromkeys(RequestRow.__struct_fields__) | {"id": ID, "created_at": BEGAN, "status": status}
    known |= {"customer_id": "c", "tier": "free", "latency_ms": 62.0, "queue_ms": 5.0, "attempts": 1}
    known |= {"completed_at": BEGAN + timedelta(milliseconds=62), "batch_id": "b1", "worker_id": "w7"}
    return RequestRow(**(known | fields))


def detail(state: str = "processing", **fields: Any) -> RequestDetail:
    known: dict[str, Any] = {"tier": "free", "customer_id": "c", "error_code": "", "attempts": 1, "accepted_ms": 1000}
    return RequestDetail(state=state, **(known | {"formed_ms": 1005, "ended_ms": None} | fields))


REFUSAL = RejectionRecord(
    id=ID,
    customer_id="c",
    key_id="k1",
    tier="free",
    code="reduced_capacity",
    outcome="customer_limit",
    factor=0.381,
    rate=38.1,
    burst=7.6,
    limit="38.1 requests/s (burst 7)",
    left=0.25,
    remaining=0.25,
    retry_after_ms=75,
    more=3,
)


@pytest.mark.parametrize(
    ("known", "found", "said"),
    [
        ({"row": row()}, "accepted", "Completed after 62 ms and 1 run."),
        (
            {"row": row("failed", error_code="worker_lost", attempts=3)},
            "accepted",
            "Failed with worker_lost after 62 ms and 3 runs: The workers that ran this request were lost.",
        ),
        (
            {"row": row("failed", error_code="of_the_future", latency_ms=None)},
            "accepted",
            "Failed with of_the_future and 1 run: this version does not know the code.",
        ),
        ({"detail": detail()}, "accepted", "Accepted; in a batch, after 1 run begun."),
        (
            {"detail": detail("queued", attempts=0, formed_ms=None), "row": row("queued", completed_at=None)},
            "accepted",
            "Accepted; queued, after 0 runs.",
        ),
        ({"detail": detail("queued"), "row": row()}, "accepted", "Completed after 62 ms and 1 run."),
        ({"detail": detail("completed", ended_ms=1070)}, "accepted", "Completed after 70 ms and 1 run."),
        ({"row": row(), "refusal": REFUSAL}, "accepted", "Completed after 62 ms and 1 run."),
        ({}, "unknown", f"{ID} is not known. {KEPT}"),
        ({"not_read": ["Redis is away."]}, "unknown", f"{ID} was not found in what could be read. {KEPT}"),
    ],
)
def test_what_became_of_it(known: dict[str, Any], found: str, said: str) -> None:
    """An end in the audit outweighs what Redis says; a row outweighs a refusal."""
    everything: dict[str, Any] = {"row": None, "detail": None, "refusal": None, "not_read": []} | known
    told = explain_request(ID, **everything)

    assert (told.found, told.said) == (found, [said])
    assert told.not_read == everything["not_read"]


def test_a_refusal_is_told_whole() -> None:
    """Which limit, its figures, the factor, how many more, what to do."""
    told = explain_request(ID, None, None, REFUSAL, [])

    at = f"{BEGAN:%Y-%m-%d %H:%M:%S}"
    assert told.said == [
        (
            f"Rejected with reduced_capacity at {at} UTC by the customer's limit over all its keys: 38.1 requests/s (burst 7) in "
            "force, 0.25 left."
        ),
        "The limits of tier free were at 38 % of their base; its base limit would have accepted the request.",
        "3 more requests of the customer rejected for the same reason within a quarter of a second.",
        (
            "What to do: The customer did nothing wrong: its limits rise again with more GPUs or less demand. The response said to retry after "
            "75 ms."
        ),
    ]
    assert told.facts["rate"] == 38.1
    assert "quota" not in told.facts


def test_the_screen_has_the_timeline() -> None:
    """And what the audit knows, but for what it does not."""
    lines = request_lines(explain_request(ID, row(), None, None, []))

    start = BEGAN.isoformat(timespec="milliseconds")
    assert lines[0] == ID
    assert f"{start}  accepted   after 0 ms" in lines
    assert [line.split()[1] for line in lines if line.startswith(start[:10])] == ["accepted", "batched", "completed"]
    assert "worker_id    w7" in lines
    assert not [line for line in lines if line.startswith("gpu_ms")]


def test_json_has_everything() -> None:
    """Figures by name, times and events."""
    document = json.loads(as_json(explain_request(ID, row(), None, None, ["x"])))

    assert (document["request_id"], document["found"], document["not_read"]) == (ID, "accepted", ["x"])
    assert document["facts"]["batch_id"] == "b1"
    assert [event["event"] for event in document["timeline"]] == ["accepted", "batched", "completed"]


def test_who_reads_learns_how_long_things_are_kept() -> None:
    """So that nobody looks for what is gone."""
    assert "Rejections are kept for 10 min" in KEPT


@pytest.mark.parametrize(
    ("text", "is_one"),
    [(new_request_id(), True), ("acme", False), ("req_", False), ("req_acme", False), (ID.removeprefix("req_"), False)],
)
def test_requests_and_customers_are_told_apart(text: str, is_one: bool) -> None:
    """By the form of the id."""
    assert is_request_id(text) is is_one


def test_times_are_utc() -> None:
    """Whatever the clock of the reader."""
    assert BEGAN.tzinfo is UTC
    assert isinstance(BEGAN, datetime)
