"""Verification of a bench run: outputs against inputs, answers against audit rows, CPU and batches of a window."""

import json

import pytest

from tierlane_tools.bench.http_client import ResponseParser
from tierlane_tools.bench.measurement.batch_use import Ran, batch_use
from tierlane_tools.bench.measurement.resources import ProcessCpu, cpu_between
from tierlane_tools.bench.plan.inputs import Inputs
from tierlane_tools.bench.verification.answer_ids import AnswerIds, request_id_hex
from tierlane_tools.bench.verification.audit import compare
from tierlane_tools.bench.verification.fate import Fate, fate_of
from tierlane_tools.bench.verification.output_check import DECIDE_AFTER, OutputCheck, Verify

DIGITS = "0123456789abcdef" * 2
C, F, U, R = Fate.COMPLETED, Fate.FAILED, Fate.UNCLEAR, Fate.REFUSED


def body_for(inputs: Inputs, number: int, *, ascii_only: bool = False, reverse: bool = True) -> bytes:
    text = inputs.nonce(number).decode() + inputs.filler
    document = {"request_id": "req_" + DIGITS, "output": text[::-1] if reverse else "Once upon a time", "metadata": {}}
    return json.dumps(document, ensure_ascii=ascii_only, separators=(",", ":")).encode()


@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_reversed_input_is_verified_in_any_json_form(*, ascii_only: bool) -> None:
    """Escapes do not matter."""
    inputs = Inputs("abc123", ' "quoted" \\ ünï \n')
    check = OutputCheck(Verify.REVERSED, inputs)
    check.look(inputs.nonce(1), body_for(inputs, 1, ascii_only=ascii_only))

    assert (check.verified, check.crossed) == (1, 0)


@pytest.mark.parametrize(
    ("reverse", "expected"), [(True, (Verify.REVERSED, DECIDE_AFTER + 7, 3)), (False, (Verify.OFF, 0, 0))]
)
def test_auto_decides_by_majority(*, reverse: bool, expected: tuple[Verify, int, int]) -> None:
    """Crossed first answers do not switch the check off; a model that does not reverse does."""
    inputs = Inputs("abc123", " x")
    check = OutputCheck(Verify.AUTO, inputs)
    for number in range(DECIDE_AFTER + 10):
        check.look(inputs.nonce(number), body_for(inputs, number + (number < 3), reverse=reverse))

    assert (check.mode, check.verified, check.crossed) == expected


@pytest.mark.parametrize(
    ("status", "code", "fate"),
    [
        (200, "", C),
        (504, "queue_timeout", F),
        (422, "poison_request", F),
        (503, "worker_lost", F),
        (504, "deadline_exceeded", U),
        (503, "no_capacity", U),
        (502, "", U),
        (429, "rate_limit_exceeded", R),
        (503, "shed_for_priority", R),
        (401, "invalid_api_key", R),
    ],
)
def test_the_audit_row_that_an_answer_implies(status: int, code: str, fate: Fate) -> None:
    """Completed and failed requests need a row, rejected ones must have none, some codes leave it open."""
    assert fate_of(status, code) is fate


@pytest.mark.parametrize(
    ("head", "body", "found"),
    [
        ("", '{"request_id":"req_' + DIGITS + '","output":"x"}', DIGITS),
        ("X-Request-Id: req_" + DIGITS + "\r\n", '{"error":{}}', DIGITS),
        ("X-Request-Id: other\r\n", "{}", ""),
        ("", '{"request_id":"req_12', ""),
    ],
)
def test_the_request_id_of_an_answer(head: str, body: str, found: str) -> None:
    """From the body or the header: 32 hex digits, or nothing."""
    response = ResponseParser().feed(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{head}\r\n{body}".encode())

    assert response is not None
    assert request_id_hex(response) == found.encode()


def test_repeated_ids_are_counted() -> None:
    """An id in two answers is one result that was returned twice."""
    ids = AnswerIds()
    for fate, digit in [(C, "a"), (C, "b"), (F, "c"), (C, "a")]:
        ids.add(fate, digit.encode() * 32)
    ids.add(C, b"")

    assert ids.of(C) == ["req_" + digit * 32 for digit in "aba"]
    assert (ids.count(C), ids.count(R), ids.repeated(), ids.without_id) == (3, 0, 1, 1)


@pytest.mark.parametrize(
    ("fates", "rows", "fault"),
    [
        ({"a": C, "b": F, "c": R}, [("a", "completed"), ("b", "failed")], None),
        ({"a": U}, [], None),
        ({"a": U}, [("a", "failed")], None),
        ({"a": C}, [], "missing"),
        ({"a": C}, [("a", "completed"), ("a", "completed")], "duplicated"),
        ({"a": C}, [("a", "processing")], "wrong_status"),
        ({"a": F}, [("a", "completed")], "wrong_status"),
        ({"a": R}, [("a", "completed")], "refused"),
    ],
)
def test_answers_are_compared_with_rows(fates: dict[str, Fate], rows: list[tuple[str, str]], fault: str | None) -> None:
    """Exactly one row in the right state for each accepted request, none for a rejected one."""
    result = compare(fates, rows)
    counts = {name: getattr(result, name) for name in ("missing", "duplicated", "wrong_status", "refused")}

    assert counts == {name: int(name == fault) for name in counts}
    assert result.ok is (fault is None)


def cpu(name: str, pid: int, started: float, seconds: float, role: str = "gateway") -> ProcessCpu:
    return ProcessCpu(role, name, pid, started, seconds)


@pytest.mark.parametrize(
    ("before", "after", "by_role", "incomplete"),
    [
        ([cpu("g1", 1, 5, 1), cpu("g2", 2, 5, 1)], [cpu("g1", 1, 5, 2), cpu("g2", 2, 5, 3)], {"gateway": 3.0}, ()),
        ([cpu("g1", 1, 5, 10)], [cpu("g1", 1, 50, 3)], {"gateway": 3.0}, ("g1",)),
        ([cpu("g1", 1, 5, 10)], [], {}, ("g1",)),
        ([], [cpu("m1", 3, 50, 4, "model")], {"model": 4.0}, ("m1",)),
        ([cpu("g1", 1, 5, 10)], [cpu("g1", 1, 5, 9.99)], {"gateway": 0.0}, ()),
    ],
)
def test_cpu_of_a_window(
    before: list[ProcessCpu], after: list[ProcessCpu], by_role: dict[str, float], incomplete: tuple[str, ...]
) -> None:
    """Differences by role; a process that was restarted counts from its start and is named."""
    use = cpu_between(before, after)

    assert (use.by_role, use.incomplete) == (by_role, incomplete)


def test_batches_of_a_window() -> None:
    """Fill and busy share are those of whole batches; without batches there are no figures."""
    ran = [Ran(64, 50.0, "a", 64)] * 100 + [Ran(32, 50.0, "b", 31)] * 20
    use = batch_use(ran, 64, 2, 10.0)

    assert (use.batches, use.requests, use.workers, use.sizes) == (120, 64 * 100 + 31 * 20, 2, {32: 20, 64: 100})
    assert use.mean_size == pytest.approx((64 * 100 + 32 * 20) / 120)
    assert use.fill == pytest.approx(use.mean_size / 64)
    assert use.gpu_busy == pytest.approx((5.0 + 1.0) / 20.0)
    empty = batch_use([], 64, 0, 10.0)
    assert (empty.mean_size, empty.fill, empty.mean_gpu_ms, empty.gpu_busy) == (None, None, None, None)
