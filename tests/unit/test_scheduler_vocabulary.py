"""Request ids, key names, error codes and encodings, which other modules and other versions rely on."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from scheduler.errors import HTTP, ErrorCode, http_status
from scheduler.payload import Payload, decode_payload, encode_payload
from scheduler.protocol.audit_records import AcceptedRecord, Closed, EndedRecord, Entered, decode_entry, encode_records
from scheduler.redis_client.keys import Keys
from scheduler.request_id import created_at, created_ms, new_request_id


def test_request_ids_carry_their_time() -> None:
    """The partition key of the audit is derived from the id."""
    fixed = "req_019a9b2c3d4e7abc8def0123456789ab"

    assert created_ms(fixed) == 0x019A9B2C3D4E
    assert created_at(fixed) == datetime.fromtimestamp(0x019A9B2C3D4E / 1000, tz=UTC)
    assert abs((datetime.now(UTC) - created_at(new_request_id())).total_seconds()) < 60


@pytest.mark.parametrize(
    "text", ["", "req_", "019a9b2c3d4e7abc8def0123456789ab", "req_" + "z" * 32, "req_019a9b2c3d4e4abc8def0123456789ab"]
)
def test_invalid_request_ids(text: str) -> None:
    """Without the prefix, of another length, not hexadecimal, or of another UUID version."""
    with pytest.raises(ValueError, match=r"request id|UUIDv7|invalid literal"):
        created_ms(text)


def test_request_ids_are_sorted_by_time() -> None:
    """Within one process."""
    ids = [new_request_id() for _ in range(1000)]

    assert ids == sorted(ids)
    assert len(set(ids)) == 1000


@pytest.mark.parametrize("prefix", ["", "{llm}:"])
def test_key_names(prefix: str) -> None:
    """Every pool except the default one has a prefix."""
    keys = Keys("llm" if prefix else "default")
    names = [
        keys.queue("free"),
        keys.inflight("free", "b"),
        keys.batch("b"),
        keys.request("r"),
        keys.gpu("w"),
        keys.responses("g"),
        keys.batch_queue,
    ]

    expected = ["queue:free", "inflight:free:b", "batch:b", "request:r", "gpu:w", "responses:g", "batch_queue"]
    assert names == [prefix + name for name in expected]


def test_permanent_keys() -> None:
    """All other keys need a TTL."""
    keys = Keys("llm")

    assert keys.is_permanent("{llm}:queue:free")
    assert keys.is_permanent("{llm}:leases")
    assert not keys.is_permanent("{llm}:request:r")
    assert not keys.is_permanent("{llm}:healthy_gpu_count")


def test_invalid_pool_names() -> None:
    """Braces would break the prefix."""
    with pytest.raises(ValueError, match="must consist of"):
        Keys("a}b")


def test_every_error_code_has_an_http_status() -> None:
    """And a message."""
    assert set(HTTP) == set(ErrorCode)
    assert all(row.message.endswith(".") for row in HTTP.values())


@pytest.mark.parametrize(("code", "status"), [("", 200), ("queue_timeout", 504), ("worker_lost", 503), ("newer", 500)])
def test_status_of_a_stored_code(code: str, status: int) -> None:
    """The audit derives the HTTP status from the code; a code of a newer version is a 500."""
    assert http_status(code) == status


def test_encodings_are_stable() -> None:
    """Data in Redis must stay readable during an upgrade."""
    assert encode_payload(Payload("m", "hi", {"t": 1})) == b"\x97\xa1m\xa2hi\x81\xa1t\x01\x00\xa0\x00\x00"
    assert decode_payload(b"\x95\xa1m\xa2hi\x81\xa1t\x01\x00\xa0") == Payload("m", "hi", {"t": 1})  # before priorities
    assert decode_payload(b"\x97\xa1m\xa2hi\x80\x00\xa0\x01\x05").priority == 1  # a newer version
    assert decode_payload(b"\x93\xa1m\xa2hi\x81\xa1t\x01") == Payload("m", "hi", {"t": 1})  # before tasks
    accepted = AcceptedRecord("r", "c", "k", "free", "m", "g", 2, "")
    fields = b"\xa1a\xa1r\xa1c\xa1k\xa4free\xa1m\xa1g\x02\xa0"
    assert encode_records([msgspec.structs.replace(accepted, endpoint="/e")]) == b"\x91\x9a" + fields + b"\xa2/e"
    assert decode_entry(b"\x91\x99" + fields) == ([accepted], [])  # before endpoints
    entered = b"\xa1c\xa1g\x91\x97\xa4free\xa1c\xa1k\xa1m\x00\x00\x90\x94\xa1r\x01\x02\xa0"
    assert decode_entry(b"\x91\x94" + entered) == ([accepted], [])
    entry = b"\x91\x95" + entered + b"\x91\xa2/e"
    assert decode_entry(entry) == ([msgspec.structs.replace(accepted, endpoint="/e")], [])


class FormerAccepted(msgspec.Struct, array_like=True, frozen=True, tag="a"):
    """`AcceptedRecord` before endpoints."""

    id: str
    customer_id: str
    api_key_id: str
    tier: str
    model: str
    gateway_id: str
    input_bytes: int
    trace_id: str


class FormerEntered(msgspec.Struct, array_like=True, frozen=True, tag="c"):
    """`Entered` before endpoints."""

    gateway_id: str
    groups: list[tuple[str, str, str, str, Any, Any, Any]]
    each: list[Any]


def test_an_auditor_of_the_former_version_reads_new_records() -> None:
    """It skips the endpoint; in the groups, which it reads as tuples of seven, it would reject the record."""
    group = ("free", "c", "k", "m", 0, 0, [])
    accepted = AcceptedRecord("r", "c", "k", "free", "m", "g", 2, "", "/e")
    entry = encode_records([accepted, Entered("g", [group], ["r", 1, 2, ""], ["/e"])])
    former = msgspec.msgpack.Decoder(list[FormerAccepted | FormerEntered])

    assert former.decode(entry) == [
        FormerAccepted("r", "c", "k", "free", "m", "g", 2, ""),
        FormerEntered("g", [group], ["r", 1, 2, ""]),
    ]
    with pytest.raises(msgspec.ValidationError, match="length 7"):
        former.decode(encode_records([("c", "g", [(*group, "/e")], ["r", 1, 2, ""])]))


class FormerClosed(msgspec.Struct, array_like=True, frozen=True, tag="f"):
    """`Closed` before costs."""

    state: str
    error_code: str
    ended_at_ms: int
    batch_id: str
    batch_size: int
    worker_id: str
    attempts: int
    each: list[Any]
    served_from: str = ""


def test_costs_are_skipped_by_and_unknown_from_the_former_version() -> None:
    """Its auditor reads new records, and its records have no costs."""
    former = FormerClosed("completed", "", 1, "b", 2, "w", 1, ["r", 1.0, 2.0, 3.0, 4, 5, "s", 1.0, 2.0, 3.0, 4, 5])
    costs = [0.5, -1.0]
    new = encode_records([Closed(*msgspec.structs.astuple(former), costs)])  # type: ignore[list-item]  # expanded by readers

    assert msgspec.msgpack.decode(new, type=list[FormerClosed]) == [former]
    for entry, known in ((new, costs), (msgspec.msgpack.encode([former]), [-1.0, -1.0])):
        assert [record.cost_ms for record in decode_entry(entry)[0] if isinstance(record, EndedRecord)] == known


@pytest.mark.parametrize("body", [b"", b"\xff", b"\x93\x01\x02\x03", msgspec.msgpack.encode({"model": "m"})])
def test_an_invalid_payload(body: bytes) -> None:
    """A ValueError, so that the worker fails only this request."""
    with pytest.raises(ValueError, match="not a payload"):
        decode_payload(body)


def test_a_bad_audit_record_does_not_affect_others() -> None:
    """The other records of the entry are read, and its bytes are returned."""
    good = EndedRecord("r", "completed", "", 1, 2.0, 3.0, 4.0, "b", 5, "w", 6, 7, 8)
    entry = encode_records([good, ["x", 1], good])

    records, bad = decode_entry(entry)

    assert records == [good, good]
    assert bad == [encode_records(["x", 1])]
    assert decode_entry(b"\xc1") == ([], [b"\xc1"])
