"""Whether an answer belongs to its request, and what an answer says about the audit."""

import json

import pytest

from tierlane.bench.http_client import ResponseParser
from tierlane.bench.plan import DECIDE_AFTER, Inputs, OutputCheck, Verify
from tierlane.bench.verification import AnswerIds, Fate, fate_of, request_id_hex

DIGITS = "0123456789abcdef" * 2


def body_for(inputs: Inputs, number: int, *, ascii_only: bool = False, reverse: bool = True) -> bytes:
    text = inputs.nonce(number).decode() + inputs.filler
    document = {"request_id": "req_" + DIGITS, "output": text[::-1] if reverse else "Once upon a time", "metadata": {}}
    return json.dumps(document, ensure_ascii=ascii_only, separators=(",", ":")).encode()


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("filler", [" plain", ' "quoted" \\ ünï \n'])
def test_a_reversed_input_is_recognised_however_it_is_escaped(filler: str, ascii_only: bool) -> None:
    """What counts is the text, not its JSON form."""
    inputs = Inputs("abc123", filler)
    check = OutputCheck(Verify.REVERSED, inputs)
    check.look(inputs.nonce(1), body_for(inputs, 1, ascii_only=ascii_only))

    assert (check.verified, check.crossed) == (1, 0)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"output":1}', b"\xff"])
def test_an_answer_without_the_output_counts_as_crossed(body: bytes) -> None:
    """Nothing that cannot be read passes for the right output."""
    inputs = Inputs("abc123", "")
    check = OutputCheck(Verify.REVERSED, inputs)
    check.look(inputs.nonce(1), body)

    assert (check.verified, check.crossed) == (0, 1)


def test_crossed_answers_are_counted_from_the_first_one() -> None:
    """Auto decides by majority, so a system that crosses its first answers does not switch the check off."""
    inputs = Inputs("abc123", " x")
    check = OutputCheck(Verify.AUTO, inputs)
    for number in range(DECIDE_AFTER + 10):
        check.look(inputs.nonce(number), body_for(inputs, number + (number < 3)))

    assert (check.mode, check.verified, check.crossed) == (Verify.REVERSED, DECIDE_AFTER + 7, 3)


def test_a_model_that_does_not_reverse_switches_auto_off() -> None:
    """A language model's text proves nothing, and is no fault."""
    inputs = Inputs("abc123", " x")
    check = OutputCheck(Verify.AUTO, inputs)
    for number in range(DECIDE_AFTER + 10):
        check.look(inputs.nonce(number), body_for(inputs, number, reverse=False))

    assert (check.mode, check.active, check.verified, check.crossed) == (Verify.OFF, False, 0, 0)


def test_the_nonce_differs_between_requests_and_runs() -> None:
    """Same length always; another number or another run's tag gives another text."""
    nonces = [Inputs("abc123", "").nonce(number) for number in (0, 1, 2**32 - 1)] + [Inputs("abc124", "").nonce(0)]

    assert len(set(nonces)) == 4
    assert {len(nonce) for nonce in nonces} == {14}


@pytest.mark.parametrize(
    ("status", "code", "fate"),
    [
        (200, "", Fate.COMPLETED),
        (504, "queue_timeout", Fate.FAILED),
        (422, "poison_request", Fate.FAILED),
        (502, "invalid_output", Fate.FAILED),
        (503, "worker_lost", Fate.FAILED),
        (504, "deadline_exceeded", Fate.UNCLEAR),
        (503, "no_capacity", Fate.UNCLEAR),
        (502, "", Fate.UNCLEAR),
        (429, "rate_limit_exceeded", Fate.REFUSED),
        (503, "shed_for_priority", Fate.REFUSED),
        (401, "invalid_api_key", Fate.REFUSED),
    ],
)
def test_what_an_answer_says_about_its_audit_row(status: int, code: str, fate: Fate) -> None:
    """Completed and failed need a row, refused must have none, and some codes do not tell."""
    assert fate_of(status, code) is fate


@pytest.mark.parametrize(
    ("head", "body", "found"),
    [
        ("", '{"request_id":"req_' + DIGITS + '","output":"x"}', DIGITS),
        ("X-Request-Id: req_" + DIGITS + "\r\n", '{"error":{}}', DIGITS),
        ("", '{"output":"x"}', ""),
        ("X-Request-Id: other\r\n", "{}", ""),
        ("", '{"request_id":"req_12', ""),
    ],
)
def test_the_request_id_is_read_from_body_or_header(head: str, body: str, found: str) -> None:
    """32 hex digits, or nothing."""
    response = ResponseParser().feed(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{head}\r\n{body}".encode())

    assert response is not None
    assert request_id_hex(response) == found.encode()


def test_ids_are_kept_by_fate_and_repeats_are_counted() -> None:
    """An id that two answers carry is one result given out twice."""
    ids = AnswerIds()
    for fate, digit in [(Fate.COMPLETED, "a"), (Fate.COMPLETED, "b"), (Fate.FAILED, "c"), (Fate.COMPLETED, "a")]:
        ids.add(fate, digit.encode() * 32)
    ids.add(Fate.COMPLETED, b"")

    assert ids.of(Fate.COMPLETED) == ["req_" + digit * 32 for digit in "aba"]
    assert ids.of(Fate.FAILED) == ["req_" + "c" * 32]
    assert (ids.count(Fate.COMPLETED), ids.count(Fate.REFUSED), ids.repeated(), ids.without_id) == (3, 0, 1, 1)
