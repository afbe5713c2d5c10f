"""Lines of batch files: splitting, faults with their line numbers, and which errors end a line."""

import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batch_api.calls import member_id
from gateway.batch_api.documents import read_batch
from gateway.batch_api.lines import MAYBE_ITS_OWN, FileCheck, FileLine, LineSplitter, is_final
from scheduler.errors import ErrorCode, RequestError
from scheduler.request_id import created_ms, new_request_id

ENDPOINT = "/v1/completions"


@given(st.lists(st.text("ab \r", max_size=9).map(str.encode)), st.integers(1, 7), st.booleans())
def test_chunks_make_no_difference(lines: list[bytes], size: int, end: bool) -> None:
    """The lines and their numbers are those of the whole file, however it is cut, without blank lines."""
    raw = b"\n".join(lines) + (b"\n" if end else b"")
    splitter = LineSplitter(6)
    found = [line for at in range(0, len(raw), size) for line in splitter.feed(raw[at : at + size])]
    found += splitter.end()

    expected = [
        FileLine(number, b"" if len(line) > 6 else line.strip())
        for number, line in enumerate(raw.split(b"\n"), 1)
        if len(line) > 6 or line.strip()
    ]
    assert found == expected


def fault_of(**fields: Any) -> tuple[str, str | None] | None:
    """Code and parameter of the fault of a line with these fields changed."""
    document = {"custom_id": "a", "method": "POST", "url": ENDPOINT, "body": {}} | fields
    check = FileCheck(ENDPOINT, 10, 1000)
    check.add(FileLine(1, json.dumps({name: value for name, value in document.items() if value is not None}).encode()))
    faults = check.end()
    return (faults[0].code, faults[0].param) if faults else None


URLS = (
    "/v1/completions/",
    "/v1/completions?api-version=2025-01-01",
    "https://api.example.com/v1/completions",
    "http://127.0.0.1:8080//v1/completions/",
    "/completions",  # Azure's.
    "/openai/v1/completions",
)
OTHER_URLS = (
    "",
    "/",
    "v1/completions",
    "/v2/completions",
    "/v1/v1/completions",
    "/v1/completions#a",
    "/v1/COMPLETIONS",
    "https://api.example.com",
    "ftp://api.example.com/v1/completions",
    "/openai/deployments/tiny/completions",
    "/v1/chat/completions",
    "/v1/completions\0",
)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({}, None),
        ({"method": None}, None),
        ({"custom_id": ""}, ("invalid_custom_id", "custom_id")),
        ({"custom_id": "a" * 513}, ("invalid_custom_id", "custom_id")),
        ({"custom_id": 7}, ("invalid_line", "custom_id")),
        ({"method": "GET"}, ("invalid_method", "method")),
        ({"url": "/v1/embeddings"}, ("mismatched_url", "url")),
        ({"body": "text"}, ("invalid_body", "body")),
        ({"body": None}, ("invalid_line", "body")),
        ({"method": "post", "metadata": {}}, None),
        *(({"url": url}, None) for url in URLS),
        *(({"url": url}, ("mismatched_url", "url")) for url in OTHER_URLS),
    ],
)
def test_faults(fields: dict[str, Any], fault: tuple[str, str | None] | None) -> None:
    """Each fault has its code, and names the field."""
    assert fault_of(**fields) == fault


def faults_of(raw: bytes) -> tuple[int, list[str]]:
    """The number of lines of a file, and the codes of its faults."""
    check, splitter = FileCheck(ENDPOINT, 10, 1000), LineSplitter(1000)
    for line in [*splitter.feed(raw), *splitter.end()]:
        check.add(line)
    return check.total, [fault.code for fault in check.end()]


LINE = json.dumps({"custom_id": "a", "url": ENDPOINT, "body": {}})
OTHER = LINE.replace('"a"', '"b"')


@pytest.mark.parametrize(
    ("raw", "lines", "faults"),
    [
        (f"{LINE}\n\x1a".encode(), 1, []),  # Ctrl-Z is no line.
        (f"\ufeff{LINE}\r\n\r\n\ufeff{OTHER}\r\n".encode(), 2, []),  # Two files with byte order marks, joined.
        (LINE.replace('"url"', '"method": null, "url"').encode(), 1, []),
        (LINE.replace('"url"', '"custom_id": "b", "url"').encode(), 1, ["invalid_line"]),
        (LINE.replace("{}", '{"a": 1, "a": 2}').encode(), 1, ["invalid_line"]),
        (LINE.replace('"a"', '"\\ud800"').encode(), 1, ["invalid_json_line"]),
        (LINE.replace('"a"', '"\xe9"').encode("latin-1"), 1, ["invalid_json_line"]),
        (LINE.replace("{}", '{"input": "\xe9"}').encode("latin-1"), 1, ["invalid_line"]),
        (f"{LINE}\n\0\0\0\n".encode(), 2, ["invalid_json_line"]),
        (f"{LINE}{OTHER}\n".encode(), 1, ["invalid_json_line"]),
        (f"{LINE}\r{OTHER}\r".encode(), 1, ["invalid_json_line"]),
        ("\n".join([LINE] * 3).encode("utf-16"), 3, ["invalid_encoding"]),
        ("\n".join([LINE] * 3).encode("utf-16-le"), 3, ["invalid_encoding"]),
        ("\n".join([LINE] * 3).encode("utf-16-be"), 3, ["invalid_encoding"]),
        (gzip.compress(LINE.encode(), mtime=0), None, ["invalid_encoding"]),
        (f"[\n{LINE},\n{OTHER}\n]\n".encode(), 4, ["invalid_json_line"]),
        (b"\xef\xbb\xbf\r\n \n\x1a", 0, ["empty_file"]),
    ],
)
def test_files_of_other_systems(raw: bytes, lines: int | None, faults: list[str]) -> None:
    """What other tools write around lines is no line. A fault of the whole file is reported once."""
    total, found = faults_of(raw)

    assert found == faults
    assert lines in (None, total)  # Of compressed data the number depends on the library.


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/completions", "/v1/completions/"])
def test_the_endpoint_of_a_batch_is_written_as_those_of_its_lines(endpoint: str) -> None:
    """Azure's clients send it without the version."""
    body = {"input_file_id": "f", "endpoint": endpoint, "completion_window": "24h"}

    assert read_batch(json.dumps(body).encode()).endpoint == ENDPOINT


def test_files_with_many_faults() -> None:
    """At most a hundred are reported; too many lines, and none, are faults of the file."""
    check, large, empty = FileCheck(ENDPOINT, 1000, 10), FileCheck(ENDPOINT, 2, 1000), FileCheck(ENDPOINT, 2, 1000)
    for number in range(300):
        check.add(FileLine(number + 1, b"{"))
        large.add(FileLine(number + 1, b""))

    assert [fault.line for fault in check.end()] == list(range(1, 101))
    assert [[fault.code for fault in each.end()] for each in (large, empty)] == [["too_many_lines"], ["empty_file"]]


@pytest.mark.parametrize("code", list(ErrorCode))
def test_which_errors_end_a_line(code: ErrorCode) -> None:
    """Those of its input do. Limits, lost capacity and a cancellation do not; what may be its input's does after five runs."""
    error = RequestError(code)
    passing = code.value in {
        "rate_limit_exceeded", "quota_exceeded", "backpressure", "catalog_unavailable", "reduced_capacity", "shed_for_priority",
        "too_many_connections",
        "queue_full", "no_capacity", "draining", "queue_timeout", "deadline_exceeded", "gpu_timeout", "model_too_slow",
        "invalid_output", "worker_lost", "gateway_lost", "abandoned", "internal_error", "identity_provider_unavailable",
    }  # fmt: skip

    assert is_final(error, 0) == (not passing and code is not ErrorCode.CANCELLED)
    assert is_final(error, 5) == (is_final(error, 0) or code in MAYBE_ITS_OWN)


def test_ids_of_the_inputs_of_a_line() -> None:
    """They follow from the line's id, differ, and have its time."""
    first = new_request_id()
    ids = [member_id(first, index) for index in range(100)]

    assert ids == [member_id(first, index) for index in range(100)]
    assert ids[0] == first
    assert len(set(ids)) == 100
    assert {created_ms(each) for each in ids} == {created_ms(first)}
