"""Ids, keys, error codes and audit records: the words that everybody else relies on."""

from datetime import UTC, datetime

import msgspec
import pytest

from scheduler.errors import HTTP, ErrorCode, http_status
from scheduler.payload import Payload, decode_payload, encode_payload
from scheduler.protocol.audit_outbox import AcceptedRecord, EndedRecord, decode_entry, encode_records
from scheduler.redis_client.keys import Keys
from scheduler.request_id import created_at, created_ms, new_request_id


def test_request_ids_carry_their_time() -> None:
    """The audit's partition key comes from the id alone."""
    fixed = "req_019a9b2c3d4e7abc8def0123456789ab"

    assert created_ms(fixed) == 0x019A9B2C3D4E
    assert created_at(fixed) == datetime.fromtimestamp(0x019A9B2C3D4E / 1000, tz=UTC)
    assert abs((datetime.now(UTC) - created_at(new_request_id())).total_seconds()) < 60


@pytest.mark.parametrize(
    "text", ["", "req_", "019a9b2c3d4e7abc8def0123456789ab", "req_" + "z" * 32, "req_019a9b2c3d4e4abc8def0123456789ab"]
)
def test_other_texts_are_not_request_ids(text: str) -> None:
    """A text without the prefix, of another length, not hex or of another UUID version is refused."""
    with pytest.raises(ValueError, match=r"request id|UUIDv7|invalid literal"):
        created_ms(text)


def test_ids_made_later_sort_later() -> None:
    """Ids of one process are ordered."""
    ids = [new_request_id() for _ in range(1000)]

    assert ids == sorted(ids)
    assert len(set(ids)) == 1000


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        ("default", ["queue:free", "inflight:free:b", "batch:b", "request:r", "gpu:w", "responses:g", "batch_queue"]),
        (
            "llm",
            [
                "{llm}:queue:free",
                "{llm}:inflight:free:b",
                "{llm}:batch:b",
                "{llm}:request:r",
                "{llm}:gpu:w",
                "{llm}:responses:g",
                "{llm}:batch_queue",
            ],
        ),
    ],
)
def test_key_names(pool: str, expected: list[str]) -> None:
    """The names that the contract fixes; every pool but the default one carries its prefix."""
    keys = Keys(pool)

    assert [
        keys.queue("free"),
        keys.inflight("free", "b"),
        keys.batch("b"),
        keys.request("r"),
        keys.gpu("w"),
        keys.responses("g"),
        keys.batch_queue,
    ] == expected


def test_only_listed_keys_may_live_for_ever() -> None:
    """The leak check asks this."""
    keys = Keys("llm")

    assert keys.is_permanent("{llm}:queue:free")
    assert keys.is_permanent("{llm}:leases")
    assert not keys.is_permanent("{llm}:request:r")
    assert not keys.is_permanent("{llm}:healthy_gpu_count")


def test_a_pool_name_cannot_break_the_prefix() -> None:
    """Braces or blanks in a pool's name are refused."""
    with pytest.raises(ValueError, match="must consist of"):
        Keys("a}b")


def test_every_error_code_has_its_row() -> None:
    """No code can be raised that HTTP cannot say."""
    assert set(HTTP) == set(ErrorCode)
    assert all(row.message.endswith(".") for row in HTTP.values())


@pytest.mark.parametrize(("code", "status"), [("", 200), ("queue_timeout", 504), ("worker_lost", 503), ("newer", 500)])
def test_status_of_a_stored_code(code: str, status: int) -> None:
    """The audit derives the HTTP status from the code, also from one that a newer version wrote."""
    assert http_status(code) == status


def test_golden_bytes_of_the_codec() -> None:
    """What is in Redis during an upgrade must stay readable."""
    assert encode_payload(Payload("m", "hi", {"t": 1})) == b"\x96\xa1m\xa2hi\x81\xa1t\x01\x00\xa0\x00"
    assert decode_payload(b"\x95\xa1m\xa2hi\x81\xa1t\x01\x00\xa0") == Payload("m", "hi", {"t": 1})  # Nor priorities.
    assert decode_payload(b"\x97\xa1m\xa2hi\x80\x00\xa0\x01\x05").priority == 1  # Written by a newer version.
    assert decode_payload(b"\x93\xa1m\xa2hi\x81\xa1t\x01") == Payload("m", "hi", {"t": 1})  # Before there were tasks.
    assert encode_records([AcceptedRecord("r", "c", "k", "free", "m", "g", 2, "")]) == (
        b"\x91\x99\xa1a\xa1r\xa1c\xa1k\xa4free\xa1m\xa1g\x02\xa0"
    )


@pytest.mark.parametrize("body", [b"", b"\xff", b"\x93\x01\x02\x03", msgspec.msgpack.encode({"model": "m"})])
def test_other_bytes_are_not_a_payload(body: bytes) -> None:
    """A worker fails such a request alone, so it must be told by a plain error."""
    with pytest.raises(ValueError, match="not a payload"):
        decode_payload(body)


def test_a_bad_audit_record_costs_only_itself() -> None:
    """Records around it are read; its bytes are returned to be set aside."""
    good = EndedRecord("r", "completed", "", 1, 2.0, 3.0, 4.0, "b", 5, "w", 6, 7, 8)
    entry = encode_records([good, ["x", 1], good])

    records, bad = decode_entry(entry)

    assert records == [good, good]
    assert bad == [encode_records(["x", 1])]
    assert decode_entry(b"\xc1") == ([], [b"\xc1"])
