"""Audit records to rows: folding, and what becomes NULL."""

import struct
from datetime import UTC, datetime
from itertools import permutations
from math import inf, nan
from typing import Any

import pytest

from copied_rows import read_row
from ledger.audit.rows import COLUMNS, Folded, id_of, outweighs, to_row
from ledger.schema.audit import requests
from scheduler.protocol.audit_outbox import AcceptedRecord, EndedRecord, Record

ID = "req_0199c0de00007000800000000000abcd"
OTHER = "req_0199c0de00017000800000000000abcd"
CREATED = datetime.fromtimestamp(0x0199C0DE0000 / 1000, tz=UTC)
CUSTOMER = "0199c0de-0000-7000-8000-00000000c001"
ACCEPTED = AcceptedRecord(ID, CUSTOMER, "k1", "paid", "tiny", "g1", 12, "trace")
COMPLETED = EndedRecord(ID, "completed", "", 1_750_000_000_123, 61.5, 9.25, 50.0, "b1", 32, "w1", 1, 7, 40)
EXPIRED = EndedRecord(ID, "failed", "queue_timeout", 1_750_000_002_000, 2000.0, -1.0, -1.0, "", 0, "", 0, 0, 0)


TYPES = {column.name: type(column.type).__name__ for column in requests.columns}


def row(accepted: AcceptedRecord | None, ended: EndedRecord | None, request_id: str = ID) -> dict[str, Any]:
    made = to_row(request_id, accepted, ended)
    assert id_of(made) == request_id
    return read_row(made, COLUMNS, TYPES)


def changed(record: Any, **fields: Any) -> Any:
    return type(record)(**{name: getattr(record, name) for name in record.__struct_fields__} | fields)


def test_the_columns_are_the_tables() -> None:
    """All of them: the staging table and the merge have no others."""
    assert sorted(COLUMNS) == sorted(column.name for column in requests.columns)


def test_accepted_and_ended_make_one_whole_row() -> None:
    """Every column, literally; the creation time is the id's own."""
    assert row(ACCEPTED, COMPLETED) == {
        "id": ID,
        "created_at": CREATED,
        "customer_id": CUSTOMER,
        "api_key_id": "k1",
        "tier": "paid",
        "model": "tiny",
        "status": "completed",
        "error_code": None,
        "http_status": 200,
        "completed_at": datetime(2025, 6, 15, 15, 6, 40, 123000, tzinfo=UTC),
        "latency_ms": 61.5,
        "queue_ms": 9.25,
        "gpu_ms": 50.0,
        "batch_id": "b1",
        "batch_size": 32,
        "worker_id": "w1",
        "gateway_id": "g1",
        "attempts": 1,
        "tokens_used": 7,
        "input_bytes": 12,
        "output_bytes": 40,
        "trace_id": "trace",
        "mode": "queue",
        "delivered": False,
        "served_from": None,
    }


def test_an_accepted_record_alone_is_an_open_row() -> None:
    """Queued; nothing is known of its end."""
    known = {name for name, value in row(ACCEPTED, None).items() if value is not None}

    assert row(ACCEPTED, None)["status"] == "queued"
    assert known == {
        *("id", "created_at", "customer_id", "api_key_id", "tier", "model", "status"),
        *("gateway_id", "input_bytes", "trace_id"),
    }


def test_an_ended_record_alone_is_a_row_without_its_beginning() -> None:
    """What the accepted record would say is NULL until it comes; what never happened is NULL for good."""
    made = row(None, EXPIRED)

    known = {name: value for name, value in made.items() if value is not None and name not in {"id", "created_at"}}
    assert known == {
        "status": "failed",
        "error_code": "queue_timeout",
        "http_status": 504,
        "completed_at": datetime(2025, 6, 15, 15, 6, 42, tzinfo=UTC),
        "latency_ms": 2000.0,
        "attempts": 0,
        "mode": "queue",
        "delivered": False,
    }


@pytest.mark.parametrize(
    ("said", "stored"), [("", None), ("cache", "cache"), ("collapsed", "collapsed"), ("from_the_future", None)]
)
def test_where_an_answer_came_from_is_said(said: str, stored: str | None) -> None:
    """Its own run, an answer that was kept, or another's run; what a newer version knows must not cost the row."""
    assert row(ACCEPTED, changed(COMPLETED, served_from=said))["served_from"] == stored


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"state": "failed", "error_code": ""}, {"error_code": "internal_error", "http_status": 500}),
        ({"state": "failed", "error_code": "from_the_future"}, {"error_code": "from_the_future", "http_status": 500}),
        ({"error_code": "gpu_timeout"}, {"status": "completed", "error_code": None, "http_status": 200}),
        ({"latency_ms": nan, "queue_ms": inf, "gpu_ms": -0.5}, {"latency_ms": None, "queue_ms": None, "gpu_ms": None}),
        ({"queue_ms": 0.0}, {"queue_ms": 0.0}),
        ({"latency_ms": inf, "queue_ms": 1.5}, {"latency_ms": None, "queue_ms": 1.5}),
        ({"tokens_used": 0, "output_bytes": 5}, {"tokens_used": None, "output_bytes": 5}),
        ({"batch_size": 0, "worker_id": ""}, {"batch_size": None, "worker_id": None}),
        ({"attempts": 0}, {"attempts": 0}),
        ({"ended_at_ms": 0}, {"completed_at": None}),
        ({"ended_at_ms": -1}, {"completed_at": None}),
        ({"mode": "direct", "delivered": True}, {"mode": "direct", "delivered": True}),
        ({"mode": "from_the_future"}, {"mode": None}),
    ],
)
def test_odd_values_become_what_the_table_takes(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """An audit row is not refused for a detail."""
    made = row(ACCEPTED, changed(COMPLETED, **fields))

    assert {name: made[name] for name in expected} == expected


@pytest.mark.parametrize(
    "request_id",
    [
        "",
        "req_",
        "job_0199c0de00007000800000000000abcd",
        ID.upper(),
        ID[:-1],
        ID + "0",
        ID.replace("7", "4", 1),
        "req_" + "f" * 12 + "7" + "f" * 19,
    ],
)
def test_an_id_that_is_not_ours_is_refused(request_id: str) -> None:
    """It has no creation time, so no partition."""
    with pytest.raises((ValueError, OverflowError)):
        row(ACCEPTED, COMPLETED, request_id)


@pytest.mark.parametrize("state", ["", "queued", "processing", "done"])
def test_an_end_that_is_no_end_is_refused(state: str) -> None:
    """Only completed and failed are terminal."""
    with pytest.raises(ValueError, match="terminal"):
        row(ACCEPTED, changed(COMPLETED, state=state))


@pytest.mark.parametrize("fields", [{"attempts": 2**40}, {"ended_at_ms": 2**60}, {"ended_at_ms": 2**48}])
def test_a_number_that_no_column_holds_is_refused(fields: dict[str, Any]) -> None:
    """Before it is sent; and a time that PostgreSQL would take and nobody could read."""
    with pytest.raises((ValueError, struct.error)):
        row(ACCEPTED, changed(COMPLETED, **fields))


def test_a_customer_that_is_none_is_refused() -> None:
    """PostgreSQL takes any sixteen bytes."""
    with pytest.raises(ValueError, match="UUID"):
        row(changed(ACCEPTED, customer_id="nobody"), COMPLETED)


def test_text_is_counted_in_bytes() -> None:
    """A model may be called anything."""
    assert row(changed(ACCEPTED, model="größe"), COMPLETED)["model"] == "größe"


def test_records_fold_by_id_in_any_order() -> None:
    """Accepted before ended, after it, apart: one pair each."""
    stranger = changed(ACCEPTED, id=OTHER)

    for order in permutations([ACCEPTED, COMPLETED, stranger]):
        folded = Folded(order)
        assert (folded.accepted, folded.ended) == ({ID: ACCEPTED, OTHER: stranger}, {ID: COMPLETED})


TOLD = changed(COMPLETED, mode="direct", delivered=True, batch_id="d1")
TOLD_FAILURE = changed(EXPIRED, error_code="no_capacity", mode="direct", delivered=True)
TOLD_TIMEOUT = changed(EXPIRED, error_code="deadline_exceeded", mode="direct", delivered=True)


@pytest.mark.parametrize(
    ("first", "second", "stands"),
    [
        (COMPLETED, EXPIRED, COMPLETED),
        (COMPLETED, TOLD, COMPLETED),
        (COMPLETED, TOLD_FAILURE, TOLD_FAILURE),  # another answer was given to the client
        (EXPIRED, COMPLETED, EXPIRED),
        (EXPIRED, TOLD_FAILURE, TOLD_FAILURE),
        (EXPIRED, TOLD, TOLD),  # the same
        (TOLD, EXPIRED, TOLD),
        (TOLD, COMPLETED, TOLD),
        (TOLD, TOLD_FAILURE, TOLD),
        (TOLD, TOLD_TIMEOUT, TOLD_TIMEOUT),  # the result was noted, and the disk took too long for it to be sent
        (TOLD_TIMEOUT, TOLD, TOLD_TIMEOUT),
        (TOLD_FAILURE, TOLD, TOLD_FAILURE),
        (TOLD_FAILURE, EXPIRED, TOLD_FAILURE),
        (TOLD_FAILURE, COMPLETED, TOLD_FAILURE),
    ],
)
def test_of_two_ends_the_first_stands(first: EndedRecord, second: EndedRecord, stands: EndedRecord) -> None:
    """Unless the client was given another answer, and the end before it was told to nobody. Replays change nothing."""
    for order in ([ACCEPTED, first, second], [first, ACCEPTED, first, second, first, ACCEPTED]):
        folded = Folded(order)
        assert (folded.accepted, folded.ended, folded.letters) == ({ID: ACCEPTED}, {ID: stands}, {})
    assert outweighs(second, first) == (stands is second)


def test_a_told_result_behind_a_result_is_kept_for_what_the_table_may_hold() -> None:
    """An earlier batch may have left another end, which only what the client was told outweighs."""

    def told(*records: Record) -> tuple[dict[str, EndedRecord], dict[str, EndedRecord]]:
        folded = Folded(records)
        return folded.ended, folded.told

    assert told(COMPLETED, TOLD, TOLD, ACCEPTED) == ({ID: COMPLETED}, {ID: TOLD})
    assert told(COMPLETED, TOLD_FAILURE) == ({ID: TOLD_FAILURE}, {})
    assert told(TOLD_FAILURE, COMPLETED) == ({ID: TOLD_FAILURE}, {})
    assert told(TOLD, TOLD) == ({ID: TOLD}, {})
