"""`tierlane check`: how a model's answers and the state of the servers are judged, and the settings that it suggests."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gpu_pool.backends.backend import ItemResult
from ledger.catalog.snapshot import Model, Tier
from scheduler.protocol.pool_view import Observation, WorkerView
from tierlane.check import judgements, system
from tierlane.check.batch_times import measure
from tierlane.check.model_probe import Probe, ProbeAnswer
from tierlane.check.model_report import Timed, fails, suggest
from tierlane.check.system import CheckItem

POISON = ItemResult("The model cannot process this input.", 0, "poison_request")
NO_STRING = ItemResult("The model's answer is not a string.", 0, "invalid_output")
LATE = ItemResult("The time limit was reached.", 0, "gpu_timeout")
LOST = ProbeAnswer(lost="The model process was ended by signal 9.")
WRONG_LENGTH = "The model returned 1 answers for 2 inputs."


def answer(*outputs: str, fault: str = "") -> ProbeAnswer:
    return ProbeAnswer(10.0, [ItemResult(output) for output in outputs], fault)


@pytest.mark.parametrize(
    ("together", "alone", "ok", "text"),
    [
        ("a b c", "a b c", True, ""),
        ("a c b", "a b c", False, "input 2 got the answer of input 3"),
        ("c b a", "a b c", False, "input 1 got the answer of input 3"),
        ("x x x", "x x x", None, "all answers are equal"),
        ("a y c", "a b c", None, "1 of 3 answers differ"),
    ],
)
def test_order(together: str, alone: str, ok: bool | None, text: str) -> None:
    """Answers are mixed up only if one is that of another input."""
    finding = judgements.judge_order(answer(*together.split()), [answer(one) for one in alone.split()])

    assert finding.ok is ok
    assert text in finding.said


@pytest.mark.parametrize(("second", "ok"), [(answer("a", "b"), True), (answer("a", "x"), False), (LOST, False)])
def test_determinism(second: ProbeAnswer, ok: bool) -> None:
    """Equal inputs must give equal answers."""
    assert judgements.judge_determinism(answer("a", "b"), second).ok is ok


def test_length_and_kind_of_answers() -> None:
    """A wrong number of answers and an answer that is no string are separate faults, as are exceptions."""
    raised = answer("a", fault="The model raised KeyError.")

    assert judgements.judge_length([answer("a", "b"), answer("a")]).ok is True
    assert judgements.judge_length([answer("a", "b", fault=WRONG_LENGTH)]) == fails(
        "length", WRONG_LENGTH, judgements.LENGTH
    )
    assert judgements.judge_length([answer("a", "b"), LOST]).ok is False
    assert (judgements.judge_length([raised]).ok, judgements.judge_answered(raised).ok) == (True, False)
    assert judgements.judge_kind(answer("a", "b")).ok is True
    found = judgements.judge_kind(ProbeAnswer(1.0, [ItemResult("a"), NO_STRING]))
    assert (found.ok, found.advice) == (False, judgements.KIND)
    assert "invalid_output" in found.said


@pytest.mark.parametrize(
    ("alone", "ok", "text"),
    [
        (ProbeAnswer(20.0), True, "a batch of one takes 20 ms; a batch may take 3,000 ms"),
        (ProbeAnswer(3500.0), False, "takes 3,500 ms for a batch of one request, over TIERLANE_GPU_TIMEOUT_MS = 3,000"),
        (ProbeAnswer(lost="It hung.", hung=True), False, "no result in 30 s, stopped"),
        (ProbeAnswer(29_900.0, [LATE]), False, "takes 29,900 ms"),
        (LOST, None, "not known"),
    ],
)
def test_time(alone: ProbeAnswer, ok: bool | None, text: str) -> None:
    """A batch of one must end within the cap of a batch and the deadline of a request."""
    finding = judgements.judge_time(alone, 3000.0, 4000.0)

    assert finding.ok is ok
    assert text in finding.said
    assert bool(finding.advice) == (ok is False)


@pytest.mark.parametrize(
    ("result", "ok"),
    [
        (answer("yes"), True),
        (ProbeAnswer(1.0, [ItemResult("Too long.", 0, "invalid_request")]), True),
        (ProbeAnswer(1.0, [POISON], "The model raised ValueError."), False),
        (ProbeAnswer(3000.0, [LATE]), False),
        (LOST, False),
    ],
)
def test_odd_inputs(result: ProbeAnswer, ok: bool) -> None:
    """A model may reject an input with an error code, but not raise an exception or die."""
    assert judgements.judge_odd("empty", result).ok is ok


class SlowProbe(Probe):
    """A model that finishes only the first inputs of a batch in time."""

    def __init__(self, in_time: int) -> None:
        self.in_time = in_time

    async def ask(self, texts: Sequence[str], *, caps: float = 1.0) -> ProbeAnswer:
        late = len(texts) - self.in_time
        return ProbeAnswer(500.0, [ItemResult("a")] * min(len(texts), self.in_time) + [LATE] * late)


@pytest.mark.parametrize(
    ("in_time", "timed", "ok", "text", "advice"),
    [
        (2, [(1, 500.0), (2, 500.0)], True, "batches of 4 run for too long", ""),
        (0, [], False, "a batch of 1: gpu_timeout", judgements.LONGER),
    ],
)
async def test_batches_with_late_inputs_are_too_slow(
    in_time: int, timed: list[Timed], ok: bool, text: str, advice: str
) -> None:
    """Inputs that end in gpu_timeout need a longer time limit, not more memory."""
    found = await measure(SlowProbe(in_time), [1, 2, 4], ["a"])

    assert (found.timed, found.finding.ok, found.finding.advice) == (timed, ok, advice)
    assert text in found.finding.said
    answers = judgements.judge_answered(ProbeAnswer(3000.0, [ItemResult("a"), LATE]))
    assert (answers.ok, answers.advice) == (False, judgements.LONGER)


@pytest.mark.parametrize(
    ("outputs", "steady", "ok"),
    [
        (("a", None, "b"), True, True),
        (("a", None, None), True, False),
        (("a", None, "other"), True, False),
        (("a", None, "other"), False, True),
        (("a", "fine", "b"), True, None),
        (None, True, False),
    ],
)
def test_isolation(outputs: tuple[str | None, ...] | None, steady: bool, ok: bool | None) -> None:
    """Only the bad input fails; answers are compared only if they are deterministic; a lost process isolates nothing."""
    mixed = LOST
    if outputs:
        mixed = ProbeAnswer(1.0, [POISON if output is None else ItemResult(output) for output in outputs])

    assert judgements.judge_isolation(1, mixed, {0: "a", 2: "b"}, steady=steady).ok is ok


@pytest.mark.parametrize(
    ("timed", "size", "wait_ms", "rps"),
    [
        # A GPU whose time does not depend on the size: the largest that was tried, and the longest wait.
        ([(1, 50.0), (8, 50.0), (64, 50.0)], 64, 40, 1280.0),
        # Nothing gained by batches: one by one, and no wait.
        ([(1, 10.0), (2, 20.0), (4, 40.0), (8, 80.0)], 1, 0, 100.0),
        # 8 ms + 1 ms an item: 64 gives 889/s, 32 gives 800/s, which is exactly nine tenths of it.
        ([(1, 9.0), (8, 16.0), (16, 24.0), (32, 40.0), (64, 72.0)], 32, 8, 800.0),
        # Slower beyond 16.
        ([(1, 5.0), (16, 8.0), (32, 40.0)], 16, 0, 2000.0),
        # Larger batches take more than a second, which leaves no time for a retry.
        ([(1, 400.0), (2, 500.0), (4, 1100.0)], 2, 40, 4.0),
        # All batches do: at most one and a half times the time of the smallest.
        ([(8, 6000.0), (4, 3000.0), (2, 2000.0)], 4, 40, 1.33),
        # A single size.
        ([(8, 20.0)], 8, 20, 400.0),
    ],
)
def test_the_suggested_batch_is_the_smallest_of_nearly_full_throughput(
    timed: list[tuple[int, float]], size: int, wait_ms: int, rps: float
) -> None:
    """The smallest size with 90 % of the best throughput, a wait of at most the fixed cost of a batch, and its rate."""
    found = suggest([Timed(*one) for one in timed])

    assert found is not None
    assert (found.max_batch_size, found.max_wait_ms, found.rps_per_gpu) == (size, wait_ms, rps)


def test_the_fit_of_batch_times() -> None:
    """12 ms + 0.5 ms an item; no division by zero; nothing without times."""
    found, instant = suggest([Timed(size, 12 + 0.5 * size) for size in (1, 2, 4, 8, 16)]), suggest([Timed(1, 0.0)])

    assert found is not None
    assert (found.base_ms, found.item_ms) == (pytest.approx(12, abs=0.001), pytest.approx(0.5, abs=0.0001))
    assert instant is not None
    assert instant.rps_per_gpu == 1e6
    assert suggest([]) is None


FREE = Tier("free", 3, 0.1, (10.0, 20.0, 8, None), 500, 2000, None, None)
TINY = Model("tiny", "default", 8, None, 40, 100.0, 0.8, 0, True)


def levels(items: list[CheckItem]) -> list[str]:
    return [item.level for item in items]


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"redis_version": "7.0.15", "maxmemory_policy": "noeviction"}, ["pass", "pass", "pass"]),
        ({"redis_version": "7.2.0-rc1", "maxmemory_policy": "noeviction"}, ["pass", "pass", "pass"]),
        ({"redis_version": "6.2.0", "maxmemory_policy": "allkeys-lru"}, ["fail", "pass", "fail"]),
        ({"redis_version": "7.2.4", "maxmemory_policy": "noeviction", "cluster_enabled": 1}, ["pass", "pass", "pass"]),
        ({}, ["fail", "pass", "fail"]),
    ],
)
def test_redis(info: dict[str, object], expected: list[str]) -> None:
    """The version, the mode, and no eviction."""
    assert levels(system.judge_redis(info)) == expected


@pytest.mark.parametrize(
    ("skew_ms", "round_trip_ms", "level"),
    [(0.0, 1.0, "pass"), (-99.0, 0.0, "pass"), (101.0, 0.0, "fail"), (-140.0, 20.0, "fail"), (105.0, 20.0, "pass")],
)
def test_clocks(skew_ms: float, round_trip_ms: float, level: str) -> None:
    """At most 100 ms, less the uncertainty of the round trip."""
    assert system.judge_clock("redis", skew_ms, round_trip_ms).level == level


@pytest.mark.parametrize(
    ("revision", "behind", "level"),
    [("2", False, "pass"), ("1", True, "fail"), (None, True, "fail"), ("3", False, "warn")],
)
def test_migrations(revision: str | None, behind: bool, level: str) -> None:
    """An old schema fails; a newer one than that of this installation is a warning."""
    assert system.judge_migrations(revision, "2", behind=behind).level == level


def test_the_catalog_and_dead_letters() -> None:
    """A paused tier and dead letters are warnings, a catalog without an enabled model fails."""
    assert levels(system.judge_tiers([FREE])) == ["pass"]
    assert levels(system.judge_tiers([replace(FREE, paused=True)]))[1] == "warn"
    catalogs = ([TINY], [replace(TINY, enabled=False)], [])
    assert [system.judge_models(models).level for models in catalogs] == ["pass", "fail", "fail"]
    assert [system.judge_dead_letters(count).level for count in (0, 3)] == ["pass", "warn"]
    assert levels(system.judge_callbacks(2, can_sign=False)) == ["warn"]
    assert system.judge_callbacks(2, can_sign=True) == system.judge_callbacks(0, can_sign=False) == []


def test_each_pool_of_an_enabled_model_needs_a_healthy_worker() -> None:
    """Cordoned workers are named."""

    def observation(*workers: tuple[str, bool, str]) -> Observation:
        views = [
            WorkerView(n, status, 0.5, 0, 100.0, 50.0, "tiny", "v1", age_ms=120.0, healthy=well)
            for n, well, status in workers
        ]
        return Observation(0, {}, views, [], 0, 0, 0, 0)

    models = [TINY, replace(TINY, name="other", pool="other"), replace(TINY, name="off", pool="off", enabled=False)]
    seen = {
        "default": observation(("w1", True, "ready"), ("w2", False, "cordoned")),
        "other": observation(("w3", False, "ready")),
        "off": observation(),
    }
    items = system.judge_pools(models, seen)

    assert [(item.name, item.level) for item in items] == [("pool default", "warn"), ("pool other", "fail")]
    assert "w2" in items[0].advice


CHECKS = {"b": [{"output": "B.", "action": "Do it.", "runbook": "docs/runbooks/B.md"}], "c": [5], "d": 6}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"status": "healthy", "reasons": [], "audit_lag_ms": 12}, ["pass", "pass"]),
        ({"status": "degraded", "reasons": ["A.", "B."], "audit_lag_ms": 10_001, "checks": CHECKS}, ["warn", "fail"]),
        ({"status": "down", "reasons": ["A."], "audit_lag_ms": None}, ["fail", "warn"]),
        ({}, ["fail", "warn"]),
    ],
)
def test_a_gateway(document: dict[str, Any], expected: list[str]) -> None:
    """`degraded` is a warning with its reasons, their actions and runbooks; any status other than `healthy` fails."""
    items = system.judge_gateway(document)

    assert levels(items) == expected
    advice = {0: "", 1: "A.", 2: "A.\nB. Do it. docs/runbooks/B.md"}
    assert items[0].advice == advice[len(document.get("reasons", []))]


def test_the_report_of_a_system() -> None:
    """Grouped in a fixed order, without control characters; only a failure fails the command."""
    items = [
        CheckItem("audit", "lag", "warn", "not known"),
        CheckItem("redis", "version", "fail", "6.0\x1b[2J", "Upgrade it."),
        CheckItem("settings", "readable", "pass", "here"),
    ]
    lines = [line.split()[:2] for line in system.lines_of(items) if line]
    document = system.document(items)

    assert [words[0] for words in lines] == ["settings", "✓", "redis", "✗", "Upgrade", "audit", "!", "Status"]
    assert "6.0\\x1b[2J" in "\n".join(system.lines_of(items))
    assert (document["ok"], len(document["checks"])) == (False, 3)
    assert [system.passes(items), system.passes([items[0], items[2]])] == [False, True]
