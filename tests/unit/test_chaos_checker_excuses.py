"""What a fault excuses, and what it does not: each rule beside its nearest neighbours, which stay breaches."""

import pytest

from chaos_story import RequestTimeline

KILLED = {"gateway killed": 1}


def reset(story: RequestTimeline, at: float, gateway: str = "gateway-1") -> None:
    """A request whose connection is lost at `at`, 0.5 s after it was sent."""
    story.sent(1, at - 0.5, gateway=gateway)
    story.silent(1, at, "reset", gateway=gateway)


def test_a_killed_gateway_resets_its_connections() -> None:
    """Indeterminate: there may be a row of any kind, or none."""
    story = RequestTimeline()
    story.fault("kill-gateway", "gateway-1", 2.0, 2.0)
    reset(story, 2.0)
    assert story.broken() == {}
    assert story.excused() == KILLED
    story.row(1, "failed", "gateway_lost")
    assert story.broken() == {}


def test_another_gateway_is_not_excused_by_it() -> None:
    """Gateway 1 was killed; gateway 2 has no reason to break connections."""
    story = RequestTimeline()
    story.fault("kill-gateway", "gateway-1", 2.0, 2.0)
    reset(story, 2.0, "gateway-2")
    assert story.broken() == {"unanswered": 1}


def test_a_kill_that_could_not_be_done_excuses_nothing() -> None:
    """An event with an error is no fault."""
    story = RequestTimeline()
    story.fault("kill-gateway", "gateway-1", 2.0, error="It is down already.")
    reset(story, 2.0)
    assert story.broken() == {"unanswered": 1}


def test_a_killed_gateway_is_excused_until_it_answers_again() -> None:
    """It refuses while it starts; once it has answered, it has no excuse any more."""
    story = RequestTimeline()
    story.fault("kill-gateway", "gateway-1", 2.0, 2.0)
    story.silent(5, 3.5, "refused")
    assert story.broken() == {}
    story.whole(2, 4.0)
    assert story.broken() == {}
    story.silent(6, 5.0, "refused")
    assert story.broken() == {"unanswered": 1}


def test_a_killed_gateway_is_not_excused_for_ever() -> None:
    """It does not come back at all: after 20 s that is no longer the kill's doing."""
    story = RequestTimeline()
    story.fault("kill-gateway", "gateway-1", 2.0, 2.0)
    story.silent(5, 21.0, "refused")
    assert story.broken() == {}
    story.silent(6, 24.0, "refused")
    assert story.broken() == {"unanswered": 1}


@pytest.mark.parametrize(
    ("kind", "row", "holds"), [("refused", False, True), ("reset", False, True), ("reset", True, False)]
)
def test_a_gateway_that_was_told_to_end(kind: str, row: bool, holds: bool) -> None:
    """It takes nothing new, and may close a connection under a request, but not under one that it has accepted."""
    story = RequestTimeline()
    story.fault("term-gateway", "gateway-1", 2.0, 2.0)
    if kind == "reset":
        story.sent(1, 2.5)
    story.silent(1, 3.0, kind)
    if row:
        story.row(1)
    story.whole(2, 5.0)
    assert story.broken() == ({} if holds else {"unanswered": 1})


def test_a_gateway_that_takes_long_to_come_back() -> None:
    """It still answers while it ends, so what counts is the first answer after those; then it has no excuse."""
    story = RequestTimeline()
    story.fault("term-gateway", "gateway-1", 2.0, 2.0)
    story.whole(1, 2.5)
    story.silent(5, 13.0, "refused")
    assert story.broken() == {}
    story.whole(2, 14.0)
    story.silent(6, 15.0, "refused")
    assert story.broken() == {"unanswered": 1}


def test_behind_one_address_any_gateway_may_have_had_it() -> None:
    """With a single URL nobody knows which gateway took a request."""
    story = RequestTimeline()
    story.events, story.rows, story.runs = [], [], []
    story.fault("kill-gateway", "gateway-2", 2.0, 2.0)
    reset(story, 2.0)
    assert story.broken() == {}


@pytest.mark.parametrize(
    "kind", ["flushall", "kill-redis", "kill-worker", "stop-scheduler", "pg-lock", "redis-disk-full", "hostile-client"]
)
def test_no_other_fault_excuses_a_lost_connection(kind: str) -> None:
    """Redis, workers, schedulers and PostgreSQL may die as they like: the client's connection lives."""
    story = RequestTimeline()
    story.fault(kind, "any", 1.0, 9.0)
    reset(story, 2.0)
    story.sent(2, 1.0)
    story.silent(2, 7.0, "timeout")
    assert story.broken() == {"unanswered": 2}


def test_a_stopped_gateway_answers_when_it_goes_on() -> None:
    """Stopped when its time was over: at once after. Stopped when it was asked: 4.1 s from when it could read."""
    story = RequestTimeline()
    story.fault("stop-gateway", "gateway-1", 4.0, 6.0)
    story.sent(1, 1.0)
    story.answered(1, 6.2, 504, "deadline_exceeded")
    story.sent(2, 4.5)
    story.answered(2, 10.0, 504, "deadline_exceeded")
    assert story.broken() == {}
    assert story.excused() == {"gateway stopped": 2}
    story.sent(3, 1.0)
    story.answered(3, 6.3, 504, "deadline_exceeded")
    story.sent(4, 4.5)
    story.answered(4, 10.2, 504, "deadline_exceeded")
    assert story.broken() == {"late answers": 2}


def test_a_stop_that_ended_in_time_moves_nothing() -> None:
    """It was stopped for a while in the middle: the deadline stays where it is."""
    story = RequestTimeline()
    story.fault("stop-gateway", "gateway-1", 2.0, 4.0)
    story.sent(1, 1.0)
    story.answered(1, 5.2, 504, "deadline_exceeded")
    assert story.broken() == {"late answers": 1}


def test_a_client_gives_up_on_a_stopped_gateway() -> None:
    """The client waits for 6 s, and the gateway had longer; not so the other gateway."""
    story = RequestTimeline()
    story.fault("stop-gateway", "gateway-1", 1.0, 5.0)
    story.sent(1, 2.0)
    story.silent(1, 8.0, "timeout")
    assert story.broken() == {}
    story.sent(2, 2.0, gateway="gateway-2")
    story.silent(2, 8.0, "timeout", gateway="gateway-2")
    assert story.broken() == {"unanswered": 1}


def test_a_run_may_begin_later_where_the_gateway_was_stopped() -> None:
    """4 s from when the gateway could read it, not from when it was sent."""
    story = RequestTimeline()
    story.fault("stop-gateway", "gateway-1", 1.0, 3.0)
    story.sent(1, 1.5)
    story.ran(1, 6.9)
    story.answered(1, 7.0)
    story.row(1)
    assert story.broken() == {}
    story.ran(1, 7.2)
    assert story.broken() == {"late execution": 1}


@pytest.mark.parametrize(
    "kind", ["stop-redis", "stop-worker", "stop-model", "flushall", "redis-disk-full", "hostile-client"]
)
def test_nothing_else_excuses_a_late_answer_or_run(kind: str) -> None:
    """That is what deadlines are for."""
    story = RequestTimeline()
    story.fault(kind, "any", 1.0, 6.0)
    story.sent(1, 1.0)
    story.ran(1, 5.2)
    story.answered(1, 5.3)
    story.row(1)
    assert story.broken() == {"late execution": 1, "late answers": 1}


def test_the_tool_itself_stood_still() -> None:
    """An answer that was read late may have come early; one that was read after that stall may not."""
    story = RequestTimeline()
    story.stall(5.0, 5.3)
    story.sent(1, 1.0)
    story.answered(1, 5.3)
    story.row(1)
    assert story.broken() == {}
    story.sent(2, 1.0)
    story.answered(2, 5.35)
    story.row(2)
    assert story.broken() == {"late answers": 1}


@pytest.mark.parametrize(("seconds", "holds"), [(0.3, True), (0.2, False)])
def test_a_tool_that_stood_still_had_cut_everybody_off_from_redis(seconds: float, *, holds: bool) -> None:
    """Its proxies stood still with it, for longer than a call may take: a gateway could not learn what became of a request."""
    story = RequestTimeline()
    story.stall(1.2, 1.2 + seconds)
    story.sent(1, 1.0)
    story.answered(1, 1.8, 503, "no_capacity")
    story.row(1, "failed", "queue_timeout")
    assert story.broken() == ({} if holds else {"mismatch": 1})


def test_an_interrupted_run_is_judged_by_what_it_did() -> None:
    """What was under way when it was stopped is neither answered nor not."""
    story = RequestTimeline()
    story.sent(1, 1.0)
    story.silent(1, 1.5, "stopped")
    assert story.broken() == {}
    assert story.excused() == {"stopped": 1}


@pytest.mark.parametrize(
    ("kind", "target", "felt"),
    [
        ("kill-model", "model-1", False),
        ("kill-scheduler", "scheduler-1", False),
        ("stop-postgres", "postgres", False),
        ("drop-requests", "gateway-1>postgres", False),
        ("client-kill-pubsub", "redis", False),
        ("hostile-client", "gateway-1", False),
        ("redis-disk-full", "redis", True),
        ("stop-gateway", "gateway-2", False),
        ("stop-gateway", "gateway-1", True),
        ("stop-worker", "worker-1", True),
        ("stop-redis", "redis", True),
        ("flushall", "redis", True),
        ("delay", "worker-1>redis", True),
    ],
)
def test_what_a_request_may_feel(kind: str, target: str, *, felt: bool) -> None:
    """A failure for want of a worker or of time needs one of these faults; killed workers are hidden."""
    story = RequestTimeline()
    story.fault(kind, target, 10.0, 11.0)
    story.sent(1, 9.9)
    story.answered(1, 13.9, 504, "deadline_exceeded")
    story.row(1, "failed", "deadline_exceeded")
    assert story.broken() == ({} if felt else {"needless failures": 1})


@pytest.mark.parametrize(("failed", "holds"), [(1, True), (2, False)])
def test_one_victim_in_a_hundred_may_fail(failed: int, *, holds: bool) -> None:
    """Of those that a killed worker had; more is a breach."""
    story = RequestTimeline()
    for number in range(1, 101):
        story.sent(number, 10.0)
        if number <= failed:
            story.answered(number, 14.0, 504, "deadline_exceeded")
            story.row(number, "failed", "deadline_exceeded")
        else:
            story.answered(number, 11.0)
            story.row(number, attempts=2)
    assert story.verdict("needless failures").holds is holds
