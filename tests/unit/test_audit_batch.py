"""Folded records to rows of both tables, and what is set aside of them."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec import Raw

from ledger.audit.rows import Folded, LetterRow, id_of, to_letter_row
from ledger.audit.writer import Batch, RejectedRow, make_batch
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.audit_outbox import AcceptedRecord, DeadLetterRecord, EndedRecord, Record, decode_entry
from scheduler.request_id import created_at

ID = "req_0199c0de00007000800000000000abcd"
OTHER = "req_0199c0de00017000800000000000abcd"
CUSTOMER = "0199c0de-0000-7000-8000-00000000c001"
ACCEPTED = AcceptedRecord(ID, CUSTOMER, "k1", "paid", "tiny", "g1", 12, "trace")
COMPLETED = EndedRecord(ID, "completed", "", 1_750_000_000_123, 61.5, 9.25, 50.0, "b1", 32, "w1", 1, 7, 40)
EXPIRED = EndedRecord(ID, "failed", "queue_timeout", 1_750_000_002_000, 2000.0, -1.0, -1.0, "", 0, "", 0, 0, 0)


def changed(record: Any, **fields: Any) -> Any:
    return type(record)(**{name: getattr(record, name) for name in record.__struct_fields__} | fields)


def letter(**fields: Any) -> DeadLetterRecord:
    body = encode_payload(Payload("tiny", "hello", {"n": 1}))
    whole = DeadLetterRecord(ID, "c1", "paid", "worker_lost", 3, ["w1", "w2", "w3"], as_lua_packs(body))
    return changed(whole, **fields)


def as_lua_packs(body: bytes) -> Raw:
    """Lua's cmsgpack writes any string as a msgpack str."""
    head = bytes([0xA0 | len(body)]) if len(body) < 32 else b"\xda" + len(body).to_bytes(2, "big")
    return Raw(head + body)


@pytest.mark.parametrize("size", [1, 31, 32, 300, 60_000])
def test_a_dead_letter_becomes_a_whole_row(size: int) -> None:
    """Its model is read from the body, its time from the end of the request; the body is kept byte by byte."""
    body = encode_payload(Payload("tiny", "x" * size, {}))

    made = to_letter_row(letter(body=as_lua_packs(body)), EXPIRED)

    assert made == LetterRow(
        request_id=ID,
        dead_at=datetime(2025, 6, 15, 15, 6, 42, tzinfo=UTC),
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
    """The time is left to the database where the end is not in the batch."""
    made = to_letter_row(letter(**fields), None)

    assert {name: getattr(made, name) for name in expected} == expected
    assert made.dead_at is None


@pytest.mark.parametrize("fields", [{"id": "req_short"}, {"attempts": -1}, {"attempts": 2**40}])
def test_a_dead_letter_that_no_table_takes_is_refused(fields: dict[str, Any]) -> None:
    """Before it reaches PostgreSQL, whose log would quote it."""
    with pytest.raises(ValueError, match="is not a"):
        to_letter_row(letter(**fields), None)


def ids_of(rows: Sequence[bytes | LetterRow]) -> list[str]:
    return [row.request_id if isinstance(row, LetterRow) else id_of(row) for row in rows]


async def batch_of(*records: Record) -> Batch:
    return await make_batch(Folded(records))


async def test_a_bad_dead_letter_costs_its_request_nothing() -> None:
    """Its own record alone is set aside, and what is told of it shows nothing of the input."""
    bad = letter(attempts=-1, body=as_lua_packs(b"a customer's secret"))

    batch = await batch_of(ACCEPTED, EXPIRED, bad, letter(id=OTHER))

    assert (ids_of(batch.new), ids_of(batch.known)) == ([], [ID, OTHER])
    assert [isinstance(row, LetterRow) for row in batch.known] == [False, True]
    assert [decode_entry(entry)[0] for entry in batch.bad] == [[bad]]
    assert (batch.refusal, batch.requests()) == ("-1 is not a number of attempts", 1)


async def test_a_refused_row_is_set_aside_without_its_dead_letter() -> None:
    """And the other way round: either goes alone."""
    batch = await batch_of(ACCEPTED, EXPIRED, letter())
    row, dead = batch.known

    batch.refuse([RejectedRow(row, "no")])
    assert [decode_entry(entry)[0] for entry in batch.bad] == [[ACCEPTED, EXPIRED]]
    assert (batch.requests(), list(batch.key_uses())) == (0, [])
    batch.refuse([RejectedRow(dead, "no"), RejectedRow(row, "no, again")])
    assert [len(decode_entry(entry)[0]) for entry in batch.bad] == [2, 1]


async def test_rows_are_new_where_their_beginning_is_there() -> None:
    """Others may have met the table before; a second result goes behind all of them."""
    third = changed(COMPLETED, id="req_0199c0de00027000800000000000abcd")
    ended = changed(COMPLETED, id=OTHER)

    batch = await batch_of(ACCEPTED, ended, third, changed(third, mode="direct", delivered=True))

    assert ids_of(batch.new) == [ID]
    assert sorted(ids_of(batch.known)) == [OTHER, third.id]
    assert ids_of(batch.later) == [third.id]
    assert (batch.requests(), batch.bad) == (3, [])


async def test_the_last_use_of_a_key_is_its_newest_request() -> None:
    """In whichever order they come; what became no row is no use."""
    older, bad = changed(ACCEPTED, id=OTHER.replace("0001", "0000", 1)), changed(ACCEPTED, id="req_short")
    newer = changed(ACCEPTED, id=OTHER)

    batch = await batch_of(newer, older, bad, changed(ACCEPTED, id=OTHER[:-1] + "0", api_key_id=""))

    assert list(batch.key_uses()) == [("k1", created_at(OTHER))]
    assert [decode_entry(entry)[0] for entry in batch.bad] == [[bad]]
