"""Audit records to rows of both tables: folding, values that become NULL, and records that are set aside."""

import struct
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import permutations
from math import inf, nan
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from copied_rows import read_row
from ledger.audit.folding import Folded, outweighs
from ledger.audit.letter_rows import LetterRow, to_letter_row
from ledger.audit.rows import COLUMNS, id_of, to_row
from ledger.audit.writer import Batch, RejectedRow, make_batch
from ledger.schema.audit import requests
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.audit_records import AcceptedRecord, DeadLetterRecord, EndedRecord, Record, decode_entry
from scheduler.request_id import created_at

ID = "req_0199c0de00007000800000000000abcd"
OTHER = "req_0199c0de00017000800000000000abcd"
THIRD = "req_0199c0de00027000800000000000abcd"
CUSTOMER = "0199c0de-0000-7000-8000-00000000c001"
ACCEPTED = AcceptedRecord(ID, CUSTOMER, "k1", "paid", "tiny", "g1", 12, "trace", "/v1/messages")
COMPLETED = EndedRecord(ID, "completed", "", 1_750_000_000_123, 61.5, 9.25, 50.0, "b1", 32, "w1", 1, 7, 40, cost_ms=1.5)
EXPIRED = EndedRecord(ID, "failed", "queue_timeout", 1_750_000_002_000, 2000.0, -1.0, -1.0, "", 0, "", 0, 0, 0)
EXPIRED_AT = datetime(2025, 6, 15, 15, 6, 42, tzinfo=UTC)
TYPES = {column.name: type(column.type).__name__ for column in requests.columns}
BEGINNING = {
    "id": ID,
    "created_at": datetime.fromtimestamp(0x0199C0DE0000 / 1000, tz=UTC),
    "customer_id": CUSTOMER,
    "api_key_id": "k1",
    "tier": "paid",
    "model": "tiny",
    "gateway_id": "g1",
    "input_bytes": 12,
    "trace_id": "trace",
    "endpoint": "/v1/messages",
}


def row(accepted: AcceptedRecord | None, ended: EndedRecord | None, request_id: str = ID) -> dict[str, Any]:
    made = to_row(request_id, accepted, ended)
    assert id_of(made) == request_id
    return read_row(made, COLUMNS, TYPES)


def known(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def test_accepted_and_ended_make_one_row_with_every_column() -> None:
    """The creation time is that in the id. The columns are those of the table."""
    assert sorted(COLUMNS) == sorted(column.name for column in requests.columns)
    assert row(ACCEPTED, COMPLETED) == BEGINNING | {
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
        "attempts": 1,
        "tokens_used": 7,
        "output_bytes": 40,
        "cost_ms": 1.5,
        "mode": "queue",
        "delivered": False,
        "served_from": None,
    }


def test_one_record_alone_is_a_row_with_gaps() -> None:
    """An accepted record is an open row; an ended record has the values of the end."""
    assert known(row(ACCEPTED, None)) == BEGINNING | {"status": "queued"}
    assert known(row(None, EXPIRED)) == {
        "id": ID,
        "created_at": BEGINNING["created_at"],
        "status": "failed",
        "error_code": "queue_timeout",
        "http_status": 504,
        "completed_at": EXPIRED_AT,
        "latency_ms": 2000.0,
        "attempts": 0,
        "mode": "queue",
        "delivered": False,
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"state": "failed", "error_code": ""}, {"error_code": "internal_error", "http_status": 500}),
        ({"state": "failed", "error_code": "from_the_future"}, {"error_code": "from_the_future", "http_status": 500}),
        ({"error_code": "gpu_timeout"}, {"status": "completed", "error_code": None, "http_status": 200}),
        ({"latency_ms": nan, "queue_ms": inf, "gpu_ms": -0.5}, {"latency_ms": None, "queue_ms": None, "gpu_ms": None}),
        ({"queue_ms": 0.0, "attempts": 0}, {"queue_ms": 0.0, "attempts": 0}),
        ({"tokens_used": 0, "output_bytes": 5}, {"tokens_used": None, "output_bytes": 5}),
        ({"batch_size": 0, "worker_id": ""}, {"batch_size": None, "worker_id": None}),
        ({"ended_at_ms": 0}, {"completed_at": None}),
        ({"ended_at_ms": -1}, {"completed_at": None}),
        ({"mode": "direct", "delivered": True}, {"mode": "direct", "delivered": True}),
        ({"mode": "from_the_future"}, {"mode": None}),
        ({"served_from": "cache"}, {"served_from": "cache"}),
        ({"served_from": "collapsed"}, {"served_from": "collapsed"}),
        ({"served_from": "from_the_future"}, {"served_from": None}),
    ],
)
def test_odd_values_become_values_that_the_table_accepts(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """An audit row is not lost because of a detail."""
    made = row(replace(ACCEPTED, model="größe"), replace(COMPLETED, **fields))

    assert {name: made[name] for name in expected} == expected
    assert made["model"] == "größe"


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
def test_a_malformed_id_is_rejected(request_id: str) -> None:
    """It has no creation time, so no partition."""
    with pytest.raises((ValueError, OverflowError)):
        row(ACCEPTED, COMPLETED, request_id)


@pytest.mark.parametrize(
    ("accepted", "ended"),
    [
        *[({}, {"state": state}) for state in ("", "queued", "processing", "done")],
        *[({}, {"attempts": 2**40}), ({}, {"ended_at_ms": 2**60}), ({}, {"ended_at_ms": 2**48})],
        ({"customer_id": "nobody"}, {}),
    ],
)
def test_records_that_no_column_can_hold_are_rejected(accepted: dict[str, Any], ended: dict[str, Any]) -> None:
    """An end that is not terminal, a number that is too large, and a customer id that is no UUID."""
    with pytest.raises((ValueError, struct.error)):
        row(replace(ACCEPTED, **accepted), replace(COMPLETED, **ended))


def test_records_fold_by_id_in_any_order() -> None:
    """Accepted before ended, after it, or alone."""
    other = replace(ACCEPTED, id=OTHER)

    for order in permutations([ACCEPTED, COMPLETED, other]):
        folded = Folded(order)
        assert (folded.accepted, folded.ended) == ({ID: ACCEPTED, OTHER: other}, {ID: COMPLETED})


DELIVERED = replace(COMPLETED, mode="direct", delivered=True, batch_id="d1")
DELIVERED_FAILURE = replace(EXPIRED, error_code="no_capacity", mode="direct", delivered=True)
DELIVERED_TIMEOUT = replace(EXPIRED, error_code="deadline_exceeded", mode="direct", delivered=True)


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (COMPLETED, EXPIRED, COMPLETED),
        (COMPLETED, DELIVERED, COMPLETED),
        (COMPLETED, DELIVERED_FAILURE, DELIVERED_FAILURE),  # the client got another response
        (EXPIRED, COMPLETED, EXPIRED),
        (EXPIRED, DELIVERED_FAILURE, DELIVERED_FAILURE),
        (EXPIRED, DELIVERED, DELIVERED),
        (DELIVERED, EXPIRED, DELIVERED),
        (DELIVERED, COMPLETED, DELIVERED),
        (DELIVERED, DELIVERED_FAILURE, DELIVERED),
        (DELIVERED, DELIVERED_TIMEOUT, DELIVERED_TIMEOUT),  # the disk was too slow for the result to be sent
        (DELIVERED_TIMEOUT, DELIVERED, DELIVERED_TIMEOUT),
        (DELIVERED_FAILURE, DELIVERED, DELIVERED_FAILURE),
        (DELIVERED_FAILURE, EXPIRED, DELIVERED_FAILURE),
        (DELIVERED_FAILURE, COMPLETED, DELIVERED_FAILURE),
    ],
)
def test_of_two_ends_the_first_is_kept(first: EndedRecord, second: EndedRecord, kept: EndedRecord) -> None:
    """Unless only the second was delivered to the client. Replayed records change nothing."""
    for order in ([ACCEPTED, first, second], [first, ACCEPTED, first, second, first, ACCEPTED]):
        folded = Folded(order)
        assert (folded.accepted, folded.ended, folded.letters) == ({ID: ACCEPTED}, {ID: kept}, {})
    assert outweighs(second, first) == (kept is second)


def test_a_delivered_result_behind_a_result_is_kept_for_the_row_in_the_table() -> None:
    """An earlier batch may have written another end, which only the delivered result outweighs."""

    def folded(*records: Record) -> tuple[dict[str, EndedRecord], dict[str, EndedRecord]]:
        found = Folded(records)
        return found.ended, found.delivered

    assert folded(COMPLETED, DELIVERED, DELIVERED, ACCEPTED) == ({ID: COMPLETED}, {ID: DELIVERED})
    assert folded(COMPLETED, DELIVERED_FAILURE) == ({ID: DELIVERED_FAILURE}, {})
    assert folded(DELIVERED_FAILURE, COMPLETED) == ({ID: DELIVERED_FAILURE}, {})
    assert folded(DELIVERED, DELIVERED) == ({ID: DELIVERED}, {})


def as_lua_packs(body: bytes) -> Raw:
    """Lua's cmsgpack writes any string as a msgpack str."""
    head = bytes([0xA0 | len(body)]) if len(body) < 32 else b"\xda" + len(body).to_bytes(2, "big")
    return Raw(head + body)


def letter(**fields: Any) -> DeadLetterRecord:
    body = encode_payload(Payload("tiny", "hello", {"n": 1}))
    record = DeadLetterRecord(ID, "c1", "paid", "worker_lost", 3, ["w1", "w2", "w3"], as_lua_packs(body))
    return replace(record, **fields)


@pytest.mark.parametrize("size", [1, 31, 32, 300, 60_000])
def test_a_dead_letter_becomes_a_complete_row(size: int) -> None:
    """The model is that in the body, the time that of the end; the body is kept byte by byte."""
    body = encode_payload(Payload("tiny", "x" * size, {}))

    assert to_letter_row(letter(body=as_lua_packs(body)), EXPIRED) == LetterRow(
        request_id=ID,
        dead_at=EXPIRED_AT,
        customer_id="c1",
        tier="paid",
        model="tiny",
        error_code="worker_lost",
        attempts=3,
        worker_ids=["w1", "w2", "w3"],
        body=body,
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"body": Raw(b"\xa0")}, {"body": None, "model": None}),
        ({"body": Raw(b"\xc0")}, {"body": None, "model": None}),
        ({"body": Raw(b"\xc2")}, {"body": None, "model": None}),
        ({"body": Raw(b"\xa3\xff\x00x")}, {"body": b"\xff\x00x", "model": None}),
        ({"customer_id": "", "tier": "", "worker_ids": []}, {"customer_id": None, "tier": None, "worker_ids": []}),
        ({"error_code": ""}, {"error_code": "internal_error"}),
    ],
)
def test_a_dead_letter_with_gaps_is_kept(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """The database sets the time if the end is not in the batch."""
    made = to_letter_row(letter(**fields), None)

    assert {name: getattr(made, name) for name in expected} == expected
    assert made.dead_at is None


def ids_of(rows: Sequence[bytes | LetterRow]) -> list[str]:
    return [each.request_id if isinstance(each, LetterRow) else id_of(each) for each in rows]


def set_aside(batch: Batch) -> list[list[Record]]:
    return [list(decode_entry(entry)[0]) for entry in batch.bad]


async def batch_of(*records: Record) -> Batch:
    return await make_batch(Folded(records))


async def test_a_bad_dead_letter_is_set_aside_alone() -> None:
    """Before it reaches PostgreSQL, whose log would contain the input; its request gets its row."""
    bad = letter(attempts=-1, body=as_lua_packs(b"a customer's secret"))

    batch = await batch_of(ACCEPTED, EXPIRED, bad, letter(id=OTHER))

    assert (ids_of(batch.new), ids_of(batch.known)) == ([], [ID, OTHER])
    assert [isinstance(each, LetterRow) for each in batch.known] == [False, True]
    assert (set_aside(batch), batch.requests()) == ([[bad]], 1)
    assert "secret" not in batch.rejection
    for fields in ({"id": "req_short"}, {"attempts": 2**40}):
        with pytest.raises(ValueError, match="is not a"):
            to_letter_row(letter(**fields), None)


async def test_a_rejected_row_is_set_aside_without_its_dead_letter() -> None:
    """And a rejected dead letter without its row."""
    batch = await batch_of(ACCEPTED, EXPIRED, letter())
    request, dead = batch.known

    batch.refuse([RejectedRow(request, "no")])
    assert set_aside(batch) == [[ACCEPTED, EXPIRED]]
    assert (batch.requests(), list(batch.key_uses())) == (0, [])
    batch.refuse([RejectedRow(dead, "no"), RejectedRow(request, "no, again")])
    assert [len(records) for records in set_aside(batch)] == [2, 1]


async def test_rows_are_new_if_the_batch_has_their_accepted_record() -> None:
    """Others may be in the table already; a second result is written after all of them."""
    third = replace(COMPLETED, id=THIRD)

    batch = await batch_of(ACCEPTED, replace(COMPLETED, id=OTHER), third, replace(third, mode="direct", delivered=True))

    assert (ids_of(batch.new), sorted(ids_of(batch.known)), ids_of(batch.later)) == ([ID], [OTHER, THIRD], [THIRD])
    assert (batch.requests(), batch.bad) == (3, [])


async def test_the_last_use_of_a_key_is_its_newest_request() -> None:
    """In any order of records; a record that is set aside is no use."""
    bad, newer = replace(ACCEPTED, id="req_short"), replace(ACCEPTED, id=OTHER)

    batch = await batch_of(newer, ACCEPTED, bad, replace(ACCEPTED, id=OTHER[:-1] + "0", api_key_id=""))

    assert list(batch.key_uses()) == [("k1", created_at(OTHER))]
    assert set_aside(batch) == [[bad]]
