"""The timeouts fit together: each law of the failure design, computed from the defaults that the product really has.

A law is a pure function of `Timings`. The first tests hold each of them, with its numbers, for the defaults; the last
one breaks one default after the other and sees that the law in question notices.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway import heartbeat
from gateway.inference import deadlines, responses
from gpu_pool.model_process import handle
from gpu_pool.worker.execution import make_plan
from gpu_pool.worker.service_time import SAMPLES_TRUSTED, ServiceTime, cap_ms
from scheduler.batching import dispatcher
from scheduler.errors import ErrorCode
from scheduler.payload import Payload, encode_payload
from scheduler.protocol import admission, batches
from scheduler.protocol.batches import ClaimedRequest
from scheduler.redis_client import connections, scripts
from tierlane.settings.model import Settings

ROOT = Path(__file__).resolve().parents[2]
ANSWER_SLACK_MS = 100.0
SUPERVISED_CRASH_MS = 50.0


class Timings(NamedTuple):
    """Everything that the laws speak of, in milliseconds."""

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


def default_queue_age() -> float:
    """The longest wait in a queue that the tiers are created with."""
    text = (ROOT / "migrations/versions/0006_pre_default_tiers.sql").read_text("utf-8")
    columns, _, rows = text.partition("VALUES")
    names = re.findall(r"\w+", columns[columns.index("(") :])
    ages = [row.split(",")[names.index("max_queue_ms")] for row in re.findall(r"\((.+)\)", rows)]
    return float(max(map(int, ages)))


def setting(name: str) -> float:
    return float(Settings.model_fields[name].default)


DEFAULTS = Timings(
    total=setting("total_request_ms"),
    queue_age=default_queue_age(),
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
    """The least and the most time from the death of a supervisor to the retry of its batch."""
    return t.lease - t.renew, t.lease + t.reap


def longest_p95(t: Timings, crashes: int, waited: float) -> float:
    """The slowest batch that still ends in time after so many silent crashes and a first wait."""
    return t.total - waited - crashes * (t.lease + t.reap)


def survives_hangs(t: Timings, hangs: int, p99: float, waited: float = 0.0) -> bool:
    """Whether a request whose batch hung so often is still answered; its last run takes up to p99."""
    return hangs * (cap_ms(p99, t.gpu_timeout) + t.reap) + p99 <= t.total - waited


def slowest_surviving(t: Timings, hangs: int) -> int:
    """The largest p99 in whole ms up to which so many hangs are survived, beginning at the floor of the cap."""
    return next(p99 for p99 in range(1, 4000) if not survives_hangs(t, hangs, p99)) - 1


def left_after_hard_cap(t: Timings) -> float:
    return t.total - t.gpu_timeout - t.reap


def latest_answer(t: Timings) -> float:
    """What is nearly overdue is seen one tick late, Redis has its grace, and the end of that is seen one tick late."""
    return t.total - t.sweep_lead + 2 * t.sweep_tick + t.sweep_grace


LAWS: dict[str, Callable[[Timings], bool]] = {
    "a crash seen by its supervisor is given back in 50 ms": lambda t: t.exit_seen <= SUPERVISED_CRASH_MS / 2,
    "a silent crash is over in 450 to 700 ms": lambda t: silent_crash_ms(t)[0] > 0 and silent_crash_ms(t)[1] <= 700,
    "a lease outlives one lost renewal": lambda t: 2 * t.renew + t.command <= t.lease,
    "two silent crashes fit behind the longest queue": lambda t: longest_p95(t, 2, t.queue_age) >= 600,
    "the third attempt fits": lambda t: longest_p95(t, 2, 0) >= 2600,
    "one silent crash is hidden": lambda t: longest_p95(t, 1, 0) >= 3300,
    "one hang is hidden": lambda t: slowest_surviving(t, 1) >= 780,
    "two hangs are hidden": lambda t: slowest_surviving(t, 2) >= 420,
    "the hard cap leaves time": lambda t: 0 < left_after_hard_cap(t) <= 900,
    "no answer is late": lambda t: latest_answer(t) <= t.total + ANSWER_SLACK_MS / 2,  # The rest is for a busy machine.
    "a lost message is found before the deadline": lambda t: t.queue_age + 2 * t.catch_up <= t.total,
    "a live worker misses two beats unharmed": lambda t: 3 * t.heartbeat + t.command <= t.gone,
    "a dead worker is seen before the next lease": lambda t: t.gone <= 2 * t.lease,
    "a live gateway misses two looks unharmed": lambda t: 3 * (t.gateway_beat + 2 * t.command) <= t.gateway_gone + 250,
    "a dead gateway's queue is dropped in its time": lambda t: t.gateway_gone <= t.queue_age,
    "an answer outlives everybody who may ask": lambda t: t.stored > t.total and t.cancels_kept > t.total,
    "a batch outlives its requests": lambda t: t.batch_kept > t.total + t.lease,
    "a sleeping dispatcher looks while its wish stands": lambda t: t.idle_look < t.wake_holds,
}


def test_a_crash_seen_by_the_supervisor_is_given_back_within_50_ms() -> None:
    """Nothing is polled; the only wait on the way, for the last frames, leaves more than half of it for the call."""
    assert DEFAULTS.exit_seen == 20


def test_a_crash_of_supervisor_and_model_is_over_in_450_to_700_ms() -> None:
    """From the rest of the lease at worst just renewed, to a whole lease and a pass of the reaper."""
    assert silent_crash_ms(DEFAULTS) == (450, 700)


def test_retries_are_exempt_from_the_queue_age() -> None:
    """A lost batch is never asked for its queue age and never enters a tier queue again: only the total binds it.

    Those who ride on a member's run never ran, and are another matter.
    """
    for verb in ("fail", "reap"):
        text = scripts.source(verb)
        text = text[text.index("-- batch: ") : text.index("-- coalescing_keys: ")] + text[text.index(f"-- {verb}: ") :]
        assert "QUEUE_DEADLINE" not in text
        assert not re.search(r"PUSH', (P \.\. )?'?queue", text)


def test_two_silent_crashes_fit_behind_the_longest_queue() -> None:
    """1400 + p95 <= 4000 - wait: within the queue age always reachable for a p95 up to 600 ms."""
    assert 2 * silent_crash_ms(DEFAULTS)[1] == 1400
    assert longest_p95(DEFAULTS, 2, DEFAULTS.queue_age) == 600


def test_the_third_attempt_finishes() -> None:
    """p95 <= 2600 ms - first wait."""
    assert longest_p95(DEFAULTS, 2, 0) == 2600


def test_one_crash_is_hidden_from_the_client() -> None:
    """Killed before about 4000 - 700 - p95 ms, a request is answered all the same."""
    assert longest_p95(DEFAULTS, 1, 0) == 3300


def test_one_hang_is_survived_up_to_a_p99_of_780_ms() -> None:
    """Cap + reap + p95 <= total: 5 x p99 <= 3900, and every faster model too, whatever the floor of its cap."""
    assert all(survives_hangs(DEFAULTS, 1, p99) for p99 in range(1, 781))
    assert 4 * 781 + DEFAULTS.reap + 781 > DEFAULTS.total  # Where the hard cap did not help out.


def test_two_hangs_are_survived_up_to_a_p99_of_420_ms() -> None:
    """2 x (cap + reap) + p95 <= total."""
    assert slowest_surviving(DEFAULTS, 2) == 422


def test_a_hang_at_the_hard_cap_leaves_900_ms() -> None:
    """From a p99 of 750 ms on a hang is known at 3000 ms, and a second attempt has 900 ms at most."""
    assert cap_ms(749, DEFAULTS.gpu_timeout) < cap_ms(750, DEFAULTS.gpu_timeout) == DEFAULTS.gpu_timeout
    assert left_after_hard_cap(DEFAULTS) == 900


@pytest.mark.parametrize(("left_ms", "runs"), [(300, False), (301, True)])
def test_nothing_starts_that_cannot_finish(left_ms: int, runs: bool) -> None:
    """With less time left than the p95 of a run it is `deadline_exceeded` at once."""
    service = ServiceTime()
    for _ in range(SAMPLES_TRUSTED):
        service.record(1, 300.0)
    member = ClaimedRequest("r", left_ms, 2, encode_payload(Payload("m", "x", {})))

    plan = make_plan([member], service.needed_ms(1), 0.0)

    codes = [outcome.error_code for outcome in plan.early]
    assert (bool(plan.bodies), codes) == (runs, [] if runs else [ErrorCode.DEADLINE_EXCEEDED])


def test_no_answer_is_later_than_100_ms_after_the_deadline() -> None:
    """Response <= 4.0 s + 100 ms, always: it is the gateway's own clock that ends a request, whatever Redis does."""
    assert latest_answer(DEFAULTS) == 4050


def test_an_admission_that_hears_nothing_is_refused_well_before_the_deadline() -> None:
    """Two calls of a quarter of a second: what an idle gateway spends before it says `no_capacity`."""
    assert 2 * DEFAULTS.command <= DEFAULTS.total / 8


@pytest.mark.parametrize("law", LAWS)
def test_the_defaults_obey(law: str) -> None:
    """Every law holds for what the product is delivered with."""
    assert LAWS[law](DEFAULTS)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("a crash seen by its supervisor is given back in 50 ms", {"exit_seen": 100}),
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
    ("a live worker misses two beats unharmed", {"heartbeat": 400}),
    ("a live worker misses two beats unharmed", {"gone": 500}),
    ("a dead worker is seen before the next lease", {"gone": 3000}),
    ("a live gateway misses two looks unharmed", {"gateway_beat": 1000}),
    ("a dead gateway's queue is dropped in its time", {"gateway_gone": 5000}),
    ("an answer outlives everybody who may ask", {"stored": 3000}),
    ("an answer outlives everybody who may ask", {"cancels_kept": 1000}),
    ("a batch outlives its requests", {"batch_kept": 4000}),
    ("a sleeping dispatcher looks while its wish stands", {"idle_look": 2000}),
]


@pytest.mark.parametrize(("law", "changes"), WRONG)
def test_a_wrong_default_breaks_its_law(law: str, changes: dict[str, Any]) -> None:
    """None of the laws is empty: another value of a timing that it speaks of breaks it."""
    assert not LAWS[law](DEFAULTS._replace(**changes))


def test_every_law_is_seen_broken() -> None:
    """A new law comes with the value that breaks it."""
    assert {law for law, _ in WRONG} == set(LAWS)
