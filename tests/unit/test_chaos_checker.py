"""The checker is not vacuous: each invariant is broken by hand in a clean history, and found, alone."""

from pathlib import Path

import pytest

from chaos_story import OTHER, RequestTimeline, id_of, nonce_of, trace_of
from tierlane.chaos.checker.checker import LAWS


def test_a_clean_run_breaks_nothing() -> None:
    """Completed, failed, refused and retried requests that are as they should be."""
    story = RequestTimeline()
    story.whole(1, 1.0)
    story.sent(2, 1.0)
    story.answered(2, 3.0, 504, "queue_timeout")
    story.row(2, "failed", "queue_timeout", http_status=504)
    story.sent(3, 1.0)
    story.answered(3, 1.1, 429, "rate_limit_exceeded")
    story.sent(4, 1.0)
    story.answered(4, 1.1, 503, "no_capacity")
    story.whole(5, 1.0, key="k")

    assert story.broken() == {}
    assert story.judged().hold
    assert story.excused() == {}


def test_an_empty_run_breaks_nothing() -> None:
    """Neither does one that sent nothing at all."""
    story = RequestTimeline()
    story.events, story.rows, story.runs = [], [], []
    assert story.broken() == {}


@pytest.mark.parametrize("status", ["queued", "processing"])
def test_lost_a_row_that_never_ended(status: str) -> None:
    """Accepted, and its row is still open."""
    story = RequestTimeline()
    story.sent(1, 1.0)
    story.answered(1, 1.1, 504, "deadline_exceeded")
    story.row(1, status)
    assert story.broken() == {"lost": 1}


def test_lost_open_in_redis_without_a_row() -> None:
    """Accepted, as Redis knows, and never written to the audit."""
    story = RequestTimeline()
    story.left(open_requests=(id_of(7),))
    assert story.broken() == {"lost": 1, "conservation": 1}


def test_unanswered_the_connection_lived() -> None:
    """No answer in 6 s, and no fault at all."""
    story = RequestTimeline()
    story.sent(1, 1.0)
    story.silent(1, 7.0, "timeout")
    assert story.broken() == {"unanswered": 1}


def test_unanswered_without_any_end() -> None:
    """A try whose end is missing in the history counts, or a bug of the tool would hide one of the stack."""
    story = RequestTimeline()
    story.sent(1, 1.0)
    assert story.broken() == {"unanswered": 1}


@pytest.mark.parametrize("kind", ["reset", "refused"])
def test_unanswered_a_connection_lost_without_a_fault(kind: str) -> None:
    """A gateway that dies by itself is found."""
    story = RequestTimeline()
    if kind == "reset":
        story.sent(1, 1.0)
    story.silent(1, 1.2, kind)
    assert story.broken() == {"unanswered": 1}


def test_unexpected_bytes_answers_and_replays() -> None:
    """Bytes on an idle connection, an answer nobody asked for, a replay without a key."""
    story = RequestTimeline()
    story.stray(1.0)
    story.answered(33, 1.0, 503, "no_capacity")
    story.sent(1, 1.0)
    story.answered(1, 1.1, replayed=True)
    story.row(1)
    assert story.broken() == {"unexpected": 3}


def test_duplicated_an_id_answered_twice() -> None:
    """One result given to two clients: the second gets another's output, too."""
    story = RequestTimeline()
    story.whole(1, 1.0)
    story.sent(2, 1.0)
    story.answered(2, 1.1, id=id_of(1), owner=nonce_of(1))
    assert story.broken() == {"duplicated": 1, "crosstalk": 1, "missing rows": 1}


def test_duplicated_two_rows_of_one_id() -> None:
    """An id with two creation times would be two rows of a partitioned table."""
    story = RequestTimeline()
    story.whole(1, 1.0)
    story.row(1, created_ms=5.0)
    assert story.broken() == {"duplicated": 1}


def test_duplicated_one_try_accepted_under_two_ids() -> None:
    """A gateway that submits again must do so under the same id."""
    story = RequestTimeline()
    story.whole(1, 1.0)
    story.row(1, "failed", "queue_timeout", id=id_of(77))
    assert story.broken() == {"duplicated": 1, "mismatch": 1}


def test_duplicated_one_key_completed_twice() -> None:
    """The second try of an Idempotency-Key runs again although the first is known to be done."""
    story = RequestTimeline()
    story.sent(1, 1.0, key="k")
    story.fault("kill-gateway", "gateway-1", 1.2)
    story.silent(1, 1.2, "reset")
    story.row(1)
    story.sent(1, 1.4, turn=1, gateway="gateway-2", key="k")
    story.answered(1, 1.5, turn=1)
    story.row(1, turn=1)
    assert story.broken() == {"duplicated": 1}


def test_alive_again_a_gateway_that_is_stuck() -> None:
    """15 s after the last fault it refuses everything, as a breaker would that never closes; the other one serves."""
    story = RequestTimeline()
    story.fault("stop-redis", "redis", 1.0, 2.0)
    story.whole(1, 3.0, gateway="gateway-2")
    for number, at in ((2, 3.0), (3, 16.0)):
        story.sent(number, at)
        story.answered(number, at + 0.1, 503, "no_capacity")
    assert story.broken() == {}
    story.sent(4, 17.5)
    story.answered(4, 17.6, 503, "no_capacity")
    assert story.broken() == {"alive again": 1}
    story.whole(5, 18.0)
    assert story.broken() == {}


@pytest.mark.parametrize("owner", [nonce_of(2), "f" * 16, "?", ""])
def test_crosstalk_the_output_of_another(owner: str) -> None:
    """Of a request of this run, of one that is unknown, of nobody: each is a breach."""
    story = RequestTimeline()
    story.whole(2, 1.0)
    story.sent(1, 1.0)
    story.answered(1, 1.1, owner=owner)
    story.row(1)
    assert story.broken() == {"crosstalk": 1}


def test_crosstalk_tells_another_customer_of_the_same_tier() -> None:
    """Two customers of one tier: whose output it was is told, and whether that was only another request of the same."""
    story = RequestTimeline()
    story.sent(2, 1.0, customer=OTHER)
    story.answered(2, 1.1)
    story.row(2, customer=OTHER)
    story.whole(3, 1.0)
    for number, owner in ((1, 2), (4, 3)):
        story.sent(number, 2.0)
        story.answered(number, 2.1, owner=nonce_of(owner))
        story.row(number)

    says = [example.says for example in story.verdict("crosstalk").examples]
    assert f"of a request of customer {OTHER}." in says[0]
    assert "of a request of the same customer." in says[1]


def test_crosstalk_a_row_of_another_customer() -> None:
    """The audit bills somebody else."""
    story = RequestTimeline()
    story.sent(1, 1.0)
    story.answered(1, 1.1)
    story.row(1, customer=OTHER)
    assert story.broken() == {"crosstalk": 1}


@pytest.mark.parametrize(
    ("status", "code", "row_status", "row_code"),
    [
        (200, "", "failed", "queue_timeout"),
        (504, "deadline_exceeded", "completed", ""),
        (503, "no_capacity", "completed", ""),
        (503, "worker_lost", "failed", "queue_timeout"),
        (504, "queue_timeout", "failed", "no_capacity"),
        (429, "rate_limit_exceeded", "failed", "queue_timeout"),
        (503, "queue_full", "completed", ""),
    ],
)
def test_mismatch_told_one_thing_noted_another(status: int, code: str, row_status: str, row_code: str) -> None:
    """In a run without a fault every answer is the outcome in the audit."""
    story = RequestTimeline()
    story.sent(1, 1.0)
    story.answered(1, 2.0, status, code)
    story.row(1, row_status, row_code)
    assert story.broken() == {"mismatch": 1}


def test_mismatch_the_status_in_the_row() -> None:
    """The same code with another HTTP status."""
    story = RequestTimeline()
    story.sent(1, 1.0)
    story.answered(1, 2.0, 504, "queue_timeout")
    story.row(1, "failed", "queue_timeout", http_status=503)
    assert story.broken() == {"mismatch": 1}


def test_mismatch_a_replay_of_another_request() -> None:
    """An Idempotency-Key answers with what was said to another key."""
    story = RequestTimeline()
    story.whole(1, 1.0, key="a")
    story.sent(2, 2.0, key="b")
    story.answered(2, 2.1, id=id_of(1), owner=nonce_of(2), replayed=True)
    assert story.broken() == {"mismatch": 1}


@pytest.mark.parametrize(("status", "code"), [(200, ""), (503, "worker_lost"), (504, "queue_timeout")])
def test_missing_rows_an_answer_that_implies_one(status: int, code: str) -> None:
    """Only an accepted request gets these."""
    story = RequestTimeline()
    story.sent(1, 1.0)
    story.answered(1, 2.0, status, code)
    assert story.broken() == {"missing rows": 1}


def test_missing_rows_it_ran() -> None:
    """What ran was accepted, whatever its client was told."""
    story = RequestTimeline()
    story.sent(1, 1.0)
    story.ran(1, 1.1)
    story.answered(1, 2.0, 503, "no_capacity")
    assert story.broken() == {"missing rows": 1}


def test_missing_rows_a_replay_of_nothing() -> None:
    """What is replayed must have been noted."""
    story = RequestTimeline()
    story.sent(1, 1.0, key="k")
    story.answered(1, 1.1, id=id_of(55), replayed=True)
    assert story.broken() == {"missing rows": 1}


def test_missing_rows_the_accepted_half() -> None:
    """A row that does not say whose it is lost its first half."""
    story = RequestTimeline()
    story.sent(1, 1.0)
    story.answered(1, 1.1)
    story.row(1, customer="", tier="", trace="")
    assert story.broken() == {"missing rows": 1}


def test_rows_without_request() -> None:
    """A row that nobody asked for, and a run of an input that nobody sent."""
    story = RequestTimeline()
    story.row(5, trace=trace_of(99))
    story.ran(6, 1.0)
    assert story.broken() == {"rows without request": 2}


@pytest.mark.parametrize(
    ("status", "code"), [(401, "invalid_api_key"), (422, "idempotency_key_reused"), (500, "internal_error"), (502, "")]
)
def test_wrong_answers(status: int, code: str) -> None:
    """What no well-formed request of a known customer may be told."""
    story = RequestTimeline()
    story.sent(1, 1.0, key="k")
    story.answered(1, 1.1, status, code)
    assert story.broken() == {"wrong answers": 1}


def test_every_law_has_a_test() -> None:
    """A law that nothing here breaks would be a law that nobody has seen work."""
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_chaos_checker*.py"))
    for law in LAWS:
        assert not law.binds or f"def test_{law.name.replace(' ', '_')}" in tests, law.name


def test_an_example_tells_the_story() -> None:
    """What happened to the request, in order of time, with the faults around it."""
    story = RequestTimeline()
    story.fault("flushall", "redis", 1.1)
    story.sent(1, 1.0)
    story.ran(1, 1.2)
    story.silent(1, 7.0, "timeout")
    story.row(1, ended_ms=6000.0)

    example = story.verdict("unanswered").examples[0]
    assert example.request == nonce_of(1)
    told = [line.split(" s  ", 1)[1].split(",")[0] for line in example.timeline]
    assert told == [
        f"row {id_of(1)} made",
        "try 0: sent to gateway-1",
        "fault flushall on redis begins",
        "fault flushall on redis is over",
        "run began in model",
        f"row {id_of(1)} ended: completed",
        "try 0: timeout",
    ]
