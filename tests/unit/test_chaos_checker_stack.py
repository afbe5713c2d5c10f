"""The checker is not vacuous, second part: what runs and ends too late, too often or for nobody, and what is left over."""

from dataclasses import replace

import pytest

from chaos_story import RequestTimeline
from scheduler.errors import http_status
from tierlane.chaos.checker.evidence import FileCount


def test_late_execution() -> None:
    """A run that begins after its deadline, and one in the last millisecond before it."""
    story = RequestTimeline()
    story.whole(1, 1.0)
    story.ran(1, 5.04)
    assert story.broken() == {}
    story.ran(1, 5.06)
    assert story.broken() == {"late execution": 1}


def test_late_execution_counts_from_the_last_try() -> None:
    """A client that tries again wants the answer for another 4 s."""
    story = RequestTimeline()
    story.sent(1, 1.0, key="k")
    story.fault("kill-gateway", "gateway-1", 1.2)
    story.silent(1, 1.2, "reset")
    story.row(1, "failed", "gateway_lost")
    story.sent(1, 1.4, turn=1, gateway="gateway-2", key="k")
    story.ran(1, 5.3)
    story.answered(1, 5.4, turn=1)
    story.row(1, turn=1)
    assert story.broken() == {}


def test_late_answers() -> None:
    """4.1 s and no more."""
    story = RequestTimeline()
    story.sent(1, 1.0)
    story.answered(1, 5.09, 504, "deadline_exceeded")
    assert story.broken() == {}
    story.sent(2, 1.0)
    story.answered(2, 5.11, 504, "deadline_exceeded")
    assert story.broken() == {"late answers": 1}


def test_attempts() -> None:
    """Three runs are the budget of one request."""
    story = RequestTimeline()
    story.sent(1, 1.0)
    story.answered(1, 1.1)
    story.row(1, attempts=3)
    assert story.broken() == {}
    story.rows[-1] = replace(story.rows[-1], attempts=4)
    assert story.broken() == {"attempts": 1}


def test_retries() -> None:
    """The global budget: 100 to begin with, 10 a second, a fifth of what was accepted."""
    story = RequestTimeline()
    for number in range(1, 90):
        story.sent(number, 1.0)
        story.answered(number, 1.1)
        story.row(number, attempts=2)
    assert story.broken() == {}
    for number in range(1, 50):
        story.rows[number] = replace(story.rows[number], attempts=3)
    assert story.broken() == {"retries": 1}


@pytest.mark.parametrize("key", ["batch_queue", "leases", "outbox", "inflight:free:b", "queue:free", "outbox:a"])
def test_conservation(key: str) -> None:
    """Nothing waits, runs or is unwritten when all is quiet."""
    story = RequestTimeline()
    story.left(lengths={key: 1})
    assert story.broken() == {"conservation": 1}


def test_leaked_keys() -> None:
    """A key that would stay for ever."""
    story = RequestTimeline()
    story.left(leaked_keys=("request:x",))
    assert story.broken() == {"leaked keys": 1}


def test_leaked_files() -> None:
    """A process that keeps its connections; a few more than before are not that."""
    story = RequestTimeline()
    story.evidence = replace(story.evidence, files=(FileCount("gateway-1 (5)", 20, 30),))
    assert story.broken() == {}
    story.evidence = replace(story.evidence, files=(FileCount("gateway-1 (5)", 20, 60),))
    assert story.broken() == {"leaked files": 1}


def test_evidence_that_could_not_be_read() -> None:
    """Without the audit nothing is proved, so nothing holds."""
    story = RequestTimeline()
    story.evidence = replace(story.evidence, errors=("The audit cannot be read: no.",))
    assert story.broken() == {"evidence": 1}


def test_fencing() -> None:
    """A worker that lost its batch ends it while the new owner has hardly begun."""
    story = RequestTimeline()
    for number, (process, worker) in enumerate((("m1", "worker-1"), ("m1", "worker-1"), ("m2", "worker-2")), 10):
        story.sent(number, 1.0)
        story.ran(number, 1.1, process)
        story.answered(number, 1.2)
        story.row(number, worker_id=worker, ended_ms=1150.0)
    assert story.broken() == {}
    story.sent(1, 1.0)
    story.ran(1, 1.05, "m1")
    story.ran(1, 2.0, "m2")
    story.answered(1, 2.2)
    story.row(1, worker_id="worker-2", ended_ms=2055.0)
    assert story.broken() == {}
    story.rows[-1] = replace(story.rows[-1], ended_ms=2010.0)
    assert story.broken() == {"fencing": 1}
    story.rows[-1] = replace(story.rows[-1], worker_id="", ended_ms=2055.0)
    assert story.broken() == {"fencing": 1}
    story.rows[-1] = replace(story.rows[-1], mode="direct", worker_id="worker-2", ended_ms=2010.0)
    assert story.broken() == {"fencing": 1}


@pytest.mark.parametrize(("ended_ms", "holds"), [(1385.0, True), (1250.0, False)])
def test_fencing_of_a_slow_batch(ended_ms: float, *, holds: bool) -> None:
    """A run of 300 ms is not over after 150, so nobody but its owner can have ended it then."""
    story = RequestTimeline()
    story.sent(1, 1.0)
    story.ran(1, 1.1, takes_s=0.3)
    story.answered(1, 1.4)
    story.row(1, ended_ms=ended_ms)
    assert story.broken() == ({} if holds else {"fencing": 1})


@pytest.mark.parametrize("code", ["deadline_exceeded", "worker_lost", "gpu_timeout"])
def test_needless_failures(code: str) -> None:
    """A worker is killed, and what it ran is not run again although there was time."""
    story = RequestTimeline()
    story.fault("kill-worker", "worker-1", 10.0, 10.0)
    story.sent(1, 9.9)
    story.answered(1, 13.9, http_status(code), code)
    story.row(1, "failed", code, attempts=1)
    assert story.broken() == {"needless failures": 1}
