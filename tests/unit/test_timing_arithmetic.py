"""The default timeouts fit together: each rule of the failure design, computed from the defaults of the product.

A rule is a pure function of `Timings`. It must hold for the defaults, and another value of a timing must violate it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from gateway import heartbeat
from gateway.inference import deadlines, responses
from gpu_pool.model_process import handle
from gpu_pool.worker.execution import make_plan
from gpu_pool.worker.service_time import SAMPLES_TRUSTED, ServiceTime, cap_ms
from ratelimit.request_limits import FUNCTION
from scheduler.batching import dispatcher
from scheduler.errors import ErrorCode
from scheduler.payload import Payload, encode_payload
from scheduler.protocol import admission, batches
from scheduler.protocol.batches import ClaimedRequest
from scheduler.redis_client import connections
from tierlane.settings.model import Settings

ANSWER_SLACK_MS = 100.0
SUPERVISED_CRASH_MS = 50.0


class Timings(NamedTuple):
    """The timings that the rules use, in milliseconds."""

    total: float
    queue_age: float
    lease: float
    renew: float
    reap: float
    gpu_timeout: float
    heartbeat: float
    gone: float
    gateway_gone: float
    gateway_beat: float
    command: float
    exit_seen: float
    sweep_tick: float
    sweep_grace: float
    sweep_lead: float
    catch_up: float
    stored: float
    cancels_kept: float
    batch_kept: float
    idle_look: float
    wake_holds: float


def setting(name: str) -> float:
    return float(Settings.model_fields[name].default)


DEFAULTS = Timings(
    total=FUNCTION.total_ms,
    queue_age=FUNCTION.queue_ms,
    lease=setting("lease_ms"),
    renew=setting("renew_ms"),
    reap=setting("reap_ms"),
    gpu_timeout=setting("gpu_timeout_ms"),
    heartbeat=setting("heartbeat_ms"),
    gone=setting("gone_ms"),
    gateway_gone=batches.GATEWAY_GONE_MS,
    gateway_beat=heartbeat.BEAT_S * 1000,
    command=connections.COMMAND_TIMEOUT_S * 1000,
    exit_seen=handle.LAST_FRAMES_S * 1000,
    sweep_tick=deadlines.TICK_S * 1000,
    sweep_grace=deadlines.GRACE_S * 1000,
    sweep_lead=deadlines.LEAD_S * 1000,
    catch_up=responses.CATCH_UP_EVERY_S * 1000,
    stored=admission.KEEP_MS,
    cancels_kept=deadlines.KEEP_S * 1000,
    batch_kept=batches.BATCH_KEEP_MS,
    idle_look=dispatcher.MAX_SLEEP_S * 1000,
    wake_holds=dispatcher.WAKE_VALID_MS,
)


def silent_crash_ms(t: Timings) -> tuple[float, float]:
    """The least and the most time from the crash of a worker to the retry of its batch."""
    return t.lease - t.renew, t.lease + t.reap


def longest_p95(t: Timings, crashes: int, waited: float) -> float:
    """The slowest batch that still ends in time after a first wait and a number of silent crashes."""
    return t.total - waited - crashes * (t.lease + t.reap)


def survives_hangs(t: Timings, hangs: int, p99: float, waited: float = 0.0) -> bool:
    """Whether a request is answered although its batch hung a number of times; its last run takes up to p99."""
    return hangs * (cap_ms(p99, t.gpu_timeout) + t.reap) + p99 <= t.total - waited


def slowest_surviving(t: Timings, hangs: int) -> int:
    """The largest p99 in whole ms up to which a number of hangs are survived."""
    return next(p99 for p99 in range(1, 4000) if not survives_hangs(t, hangs, p99)) - 1


def left_after_hard_cap(t: Timings) -> float:
    return t.total - t.gpu_timeout - t.reap


def latest_answer(t: Timings) -> float:
    """The sweep sees a deadline one tick late, Redis gets its grace period, and its end is seen one tick late."""
    return t.total - t.sweep_lead + 2 * t.sweep_tick + t.sweep_grace


RULES: dict[str, Callable[[Timings], bool]] = {
    "a crash seen by its worker is given back in 50 ms": lambda t: t.exit_seen <= SUPERVISED_CRASH_MS / 2,
    "a silent crash is over in 450 to 700 ms": lambda t: silent_crash_ms(t) == (450, 700),
    "a lease outlives one lost renewal": lambda t: 2 * t.renew + t.command <= t.lease,
    "two silent crashes fit behind the longest queue": lambda t: longest_p95(t, 2, t.queue_age) >= 600,
    "the third attempt fits": lambda t: longest_p95(t, 2, 0) >= 2600,
    "one silent crash is hidden": lambda t: longest_p95(t, 1, 0) >= 3300,
    "one hang is hidden": lambda t: all(survives_hangs(t, 1, p99) for p99 in range(1, 781)),
    "two hangs are hidden": lambda t: slowest_surviving(t, 2) >= 420,
    "the hard cap leaves time": lambda t: 0 < left_after_hard_cap(t) <= 900,
    "no answer is late": lambda t: latest_answer(t) <= t.total + ANSWER_SLACK_MS / 2,  # The rest is for a busy machine.
    "a lost message is found before the deadline": lambda t: t.queue_age + 2 * t.catch_up <= t.total,
    "an unanswered admission is rejected before the deadline": lambda t: 2 * t.command <= t.total / 8,
    "a live worker may miss two heartbeats": lambda t: 3 * t.heartbeat + t.command <= t.gone,
    "a dead worker is seen before the next lease": lambda t: t.gone <= 2 * t.lease,
    "a live gateway may miss two heartbeats": lambda t: 3 * (t.gateway_beat + 2 * t.command) <= t.gateway_gone + 250,
    "the queue of a dead gateway is dropped in time": lambda t: t.gateway_gone <= t.queue_age,
    "an answer is kept for longer than a request": lambda t: t.stored > t.total and t.cancels_kept > t.total,
    "a batch is kept for longer than its requests": lambda t: t.batch_kept > t.total + t.lease,
    "a sleeping dispatcher wakes before its request expires": lambda t: t.idle_look < t.wake_holds,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_defaults_obey(rule: str) -> None:
    """Every rule holds for the defaults."""
    assert RULES[rule](DEFAULTS)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("a crash seen by its worker is given back in 50 ms", {"exit_seen": 100}),
    ("a silent crash is over in 450 to 700 ms", {"lease": 1000}),
    ("a silent crash is over in 450 to 700 ms", {"reap": 500}),
    ("a silent crash is over in 450 to 700 ms", {"renew": 600}),
    ("a lease outlives one lost renewal", {"renew": 200}),
    ("a lease outlives one lost renewal", {"command": 500}),
    ("two silent crashes fit behind the longest queue", {"lease": 1000}),
    ("two silent crashes fit behind the longest queue", {"queue_age": 3000}),
    ("the third attempt fits", {"total": 3000}),
    ("one silent crash is hidden", {"reap": 1000}),
    ("one hang is hidden", {"total": 2000}),
    ("one hang is hidden", {"reap": 1000}),
    ("two hangs are hidden", {"reap": 200}),
    ("the hard cap leaves time", {"gpu_timeout": 4000}),
    ("no answer is late", {"sweep_tick": 60}),
    ("no answer is late", {"sweep_grace": 101}),
    ("no answer is late", {"sweep_lead": 0}),
    ("a lost message is found before the deadline", {"catch_up": 1500}),
    ("an unanswered admission is rejected before the deadline", {"command": 501}),
    ("a live worker may miss two heartbeats", {"heartbeat": 400}),
    ("a live worker may miss two heartbeats", {"gone": 500}),
    ("a dead worker is seen before the next lease", {"gone": 3000}),
    ("a live gateway may miss two heartbeats", {"gateway_beat": 1000}),
    ("the queue of a dead gateway is dropped in time", {"gateway_gone": 5000}),
    ("an answer is kept for longer than a request", {"stored": 3000}),
    ("an answer is kept for longer than a request", {"cancels_kept": 1000}),
    ("a batch is kept for longer than its requests", {"batch_kept": 4000}),
    ("a sleeping dispatcher wakes before its request expires", {"idle_look": 2000}),
]


@pytest.mark.parametrize(("rule", "changes"), WRONG)
def test_a_wrong_default_violates_its_rule(rule: str, changes: dict[str, Any]) -> None:
    """Another value of a timing that the rule uses violates it."""
    assert not RULES[rule](DEFAULTS._replace(**changes))


def test_every_rule_can_be_violated() -> None:
    """A new rule comes with a value that violates it."""
    assert {rule for rule, _ in WRONG} == set(RULES)


def test_a_hang_is_known_at_the_hard_cap() -> None:
    """From a p99 of 750 ms on the cap is 3000 ms, which leaves at most 900 ms for a second attempt."""
    assert cap_ms(749, DEFAULTS.gpu_timeout) < cap_ms(750, DEFAULTS.gpu_timeout) == DEFAULTS.gpu_timeout
    assert left_after_hard_cap(DEFAULTS) == 900


@pytest.mark.parametrize(("left_ms", "runs"), [(300, False), (301, True)])
def test_a_run_that_cannot_finish_is_not_started(left_ms: int, runs: bool) -> None:
    """With less time left than the p95 of a run the request is `deadline_exceeded` at once."""
    service = ServiceTime()
    for _ in range(SAMPLES_TRUSTED):
        service.record(1, 300.0)
    member = ClaimedRequest("r", left_ms, 2, encode_payload(Payload("m", "x", {})))

    plan = make_plan([member], service.needed_ms(1), 0.0)

    codes = [outcome.error_code for outcome in plan.early]
    assert (bool(plan.bodies), codes) == (runs, [] if runs else [ErrorCode.DEADLINE_EXCEEDED])
