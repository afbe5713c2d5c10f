"""What a fault excuses in the audit: outcomes that nobody could know, rows that both witnesses lost, forgotten keys."""

from dataclasses import replace

import pytest

from chaos_story import RequestTimeline


def told_timeout(story: RequestTimeline, sent: float = 1.0) -> None:
    """The client is told 504 4 s after sending, and the audit has it completed."""
    story.sent(1, sent)
    story.answered(1, sent + 4.0, 504, "deadline_exceeded")
    story.row(1)


@pytest.mark.parametrize(
    ("kind", "target", "begin", "end"),
    [
        ("stop-redis", "redis", 4.5, 6.0),
        ("stop-redis", "redis", 1.0, 2.0),  # Direct mode is left 5 s after.
        ("drop-replies", "gateway-1>redis", 4.5, 6.0),
        ("spool-full", "gateway-1", 4.5, 6.0),
        ("flushall", "redis", 2.0, 2.0),
        ("stop-gateway", "gateway-1", 2.0, 4.9),
    ],
)
def test_told_timeout_where_the_outcome_could_not_be_known(kind: str, target: str, begin: float, end: float) -> None:
    """Recorded beside the verdict, not counted."""
    story = RequestTimeline()
    story.fault(kind, target, begin, end)
    told_timeout(story)
    assert story.broken() == {}
    assert story.excused() == {"told timeout": 1}


@pytest.mark.parametrize(
    ("kind", "target", "begin", "end"),
    [
        ("drop-replies", "gateway-2>redis", 4.5, 6.0),
        ("drop-replies", "gateway-1>postgres", 4.5, 6.0),
        ("drop-replies", "worker-1>redis", 4.5, 6.0),
        ("kill-worker", "worker-1", 4.5, 4.5),
        ("script-flush", "redis", 4.5, 4.5),
        ("stop-redis", "redis", 5.5, 6.0),
        ("flushall", "redis", 0.5, 0.5),
    ],
)
def test_told_timeout_without_such_a_fault_is_a_mismatch(kind: str, target: str, begin: float, end: float) -> None:
    """The stored result is the truth, and it is read before a timeout is answered."""
    story = RequestTimeline()
    story.fault(kind, target, begin, end)
    told_timeout(story, 10.0 if kind == "flushall" else 1.0)
    assert story.broken() == {"mismatch": 1}


@pytest.mark.parametrize(
    ("status", "code", "row"), [(200, "", ("failed", "worker_lost")), (429, "rate_limit_exceeded", ("completed", ""))]
)
def test_only_a_timeout_may_be_told_in_doubt(status: int, code: str, row: tuple[str, str]) -> None:
    """A 200 says that it is done, and a refusal that it was never begun, whatever Redis does."""
    story = RequestTimeline()
    story.fault("stop-redis", "redis", 1.0, 3.0)
    story.sent(1, 1.0)
    story.answered(1, 2.0, status, code)
    story.row(1, *row)
    assert story.broken() == {"mismatch": 1}


def both_witnesses(story: RequestTimeline, flushed: float, killed: float, gateway: str = "gateway-1") -> None:
    """A 200 without a row; Redis is emptied and a gateway killed."""
    story.sent(1, 1.0)
    story.answered(1, 1.5)
    story.fault("flushall", "redis", flushed, flushed)
    story.fault("kill-gateway", gateway, killed, killed)


def test_both_witnesses_lost() -> None:
    """Redis loses the audit entry and the gateway dies before it sends it again: nobody knows it any more."""
    story = RequestTimeline()
    both_witnesses(story, 1.6, 2.0)
    assert story.broken() == {}
    assert sum(story.excused().values()) == 1


def test_both_witnesses_of_the_end_lost() -> None:
    """The row was begun before, and then nobody can say how it ended: the auditor closes it."""
    story = RequestTimeline()
    both_witnesses(story, 1.6, 2.0)
    story.row(1, "failed", "abandoned")
    assert story.broken() == {}
    story.rows[-1] = replace(story.rows[-1], code="queue_timeout")
    assert story.broken() == {"mismatch": 1}


@pytest.mark.parametrize(
    ("flushed", "killed", "gateway"),
    [
        (1.6, 2.0, "gateway-2"),  # Not the gateway that had it.
        (1.6, 6.0, "gateway-1"),  # It had time to send it again.
        (8.0, 8.1, "gateway-1"),  # The auditor had time to write it.
        (0.2, 2.0, "gateway-1"),  # Emptied before it was sent.
    ],
)
def test_one_witness_left(flushed: float, killed: float, gateway: str) -> None:
    """Then the row must be there."""
    story = RequestTimeline()
    both_witnesses(story, flushed, killed, gateway)
    assert story.broken() == {"missing rows": 1}


def test_a_backlog_keeps_the_audit_in_redis_for_longer() -> None:
    """While PostgreSQL is away the entry waits in Redis, so a later loss takes it, too."""
    story = RequestTimeline()
    both_witnesses(story, 8.0, 8.1)
    story.fault("stop-postgres", "postgres", 2.0, 6.0)
    assert story.broken() == {}


@pytest.mark.parametrize(("status", "code"), [(503, "no_capacity"), (504, "deadline_exceeded")])
def test_what_ran_has_a_row_also_where_the_spool_is_full(status: int, code: str) -> None:
    """The row is on the disk before a worker is called, so what the disk did not take must not have run."""
    story = RequestTimeline()
    story.fault("spool-full", "gateway-1", 1.0, 2.0)
    story.sent(1, 1.1)
    story.ran(1, 1.2)
    story.answered(1, 1.3, status, code)
    assert story.broken() == {"missing rows": 1}


@pytest.mark.parametrize(
    ("mode", "row", "holds"),
    [
        ("direct", ("failed", "shed_for_priority"), True),
        ("queue", ("failed", "shed_for_priority"), False),
        ("direct", ("failed", "queue_full"), False),
        ("direct", ("completed", ""), False),
    ],
)
def test_a_refusal_after_the_row_was_written_ahead(mode: str, row: tuple[str, str], *, holds: bool) -> None:
    """Past Redis the row comes before the worker; who is shed in between has a row that says just that."""
    story = RequestTimeline()
    story.sent(1, 1.0)
    story.answered(1, 1.1, 503, "shed_for_priority")
    story.row(1, *row, mode=mode)
    assert story.broken() == ({} if holds else {"mismatch": 1})


def killed_in_direct_mode(story: RequestTimeline) -> None:
    """Redis is stopped, the request runs past it, and its gateway is killed before it answers."""
    story.fault("stop-redis", "redis", 1.0, 4.0)
    story.fault("kill-gateway", "gateway-1", 2.5, 2.5)
    story.sent(1, 2.4)
    story.ran(1, 2.45)
    story.silent(1, 2.5, "reset")


def test_a_gateway_killed_in_direct_mode_leaves_a_row() -> None:
    """What ran has a row, whoever died; that nobody was told anything is no excuse."""
    story = RequestTimeline()
    killed_in_direct_mode(story)
    assert story.broken() == {"missing rows": 1}
    story.row(1, "failed", "abandoned", mode="direct")
    assert story.broken() == {}
    story.rows[-1] = replace(story.rows[-1], status="queued", code="")
    assert story.broken() == {"lost": 1}


def test_an_answer_is_not_abandoned() -> None:
    """Only a client without an answer may have an abandoned row; a 200 says that the end was noted."""
    story = RequestTimeline()
    story.fault("stop-redis", "redis", 1.0, 4.0)
    story.fault("kill-gateway", "gateway-1", 2.5, 2.5)
    story.sent(1, 2.0)
    story.ran(1, 2.05)
    story.answered(1, 2.1)
    story.row(1, "failed", "abandoned", mode="direct")
    assert story.broken() == {"mismatch": 1}


def test_a_spool_that_came_to_redis_and_was_lost_there() -> None:
    """It is merged when Redis is back; lost there, and the gateway that remembers it killed, nobody knows it."""
    story = RequestTimeline()
    story.fault("stop-redis", "redis", 1.0, 6.0)
    both_witnesses(story, 7.0, 7.5)
    assert story.broken() == {}
    late = RequestTimeline()
    late.fault("stop-redis", "redis", 1.0, 6.0)
    both_witnesses(late, 13.0, 13.5)
    assert late.broken() == {"missing rows": 1}


def completed_twice(story: RequestTimeline) -> None:
    """Both tries of one Idempotency-Key are completed."""
    story.sent(1, 1.0, key="k")
    story.fault("kill-gateway", "gateway-1", 1.2, 1.2)
    story.silent(1, 1.2, "reset")
    story.row(1)
    story.sent(1, 1.4, turn=1, gateway="gateway-2", key="k")
    story.answered(1, 1.5, turn=1)
    story.row(1, turn=1)


@pytest.mark.parametrize(
    ("kind", "target", "excused"),
    [
        ("flushall", "redis", True),
        ("kill-redis", "redis", True),
        ("refuse", "gateway-2>redis", True),
        ("refuse", "worker-1>redis", False),
        ("script-flush", "redis", False),
        ("stop-postgres", "postgres", False),
    ],
)
def test_a_key_that_nobody_could_know(kind: str, target: str, *, excused: bool) -> None:
    """Redis knows the keys: only its loss, or a gateway without it, lets one run twice."""
    story = RequestTimeline()
    story.fault(kind, target, 1.3, 1.35)
    completed_twice(story)
    assert story.broken() == ({} if excused else {"duplicated": 1})


def test_told_timeout_is_no_excuse_for_a_lost_subscription() -> None:
    """The stored result is read before a timeout is told, so that nobody misses a lost message."""
    story = RequestTimeline()
    story.fault("client-kill-pubsub", "redis", 1.5, 1.5)
    told_timeout(story)
    assert story.broken() == {"mismatch": 1}
