"""The slots of an endpoint worker, in virtual time before simulated engines."""

from collections.abc import Callable

import pytest

from gpu_pool.backends.openai_endpoint.engine_load import EngineLoad
from gpu_pool.backends.openai_endpoint.slots import LONGEST_HOLD_S, MOST, START, SlotPolicy
from tests.slots_simulation import Engine, Simulation, longest_queue_s, rate, swing, time_to_rate

SEEDS = (1, 2)
METRICS = {"metrics": True, "streamed": 0.0}
STREAMS = {"metrics": False, "streamed": 1.0}
ANSWERS = {"metrics": False, "streamed": 0.0}
MIXED = {"metrics": False, "streamed": 0.5}


def _direct(clients: int, seed: int = 1, until: float = 40.0, **engine: float) -> float:
    """Tokens/s of clients that use the engine directly."""
    simulation = Simulation(Engine(**engine), clients=clients, workers=0, seed=seed)  # type: ignore[arg-type]
    return rate(simulation.run(until), 10, until)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clients", [64, 256])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("source", "learnt_s"), [(METRICS, 5), (STREAMS, 5), (MIXED, 5), (ANSWERS, 10)])
def test_a_cold_worker_learns_the_slots_of_an_engine(
    source: dict[str, float], learnt_s: float, workers: int, clients: int, seed: int
) -> None:
    """Then it has the throughput of the engine, without oscillation or a long queue in the engine."""
    simulation = Simulation(Engine(), clients=clients, workers=workers, seed=seed, **source).run(40)  # type: ignore[arg-type]
    direct = _direct(clients, seed)
    assert time_to_rate(simulation, 0.9 * direct) <= learnt_s
    assert rate(simulation, 20, 40) >= 0.98 * direct
    assert swing(simulation, 20, 40) <= 0.15
    assert longest_queue_s(simulation, 20, 40) <= (1.0 if source is METRICS else 2.0)
    if source is METRICS:
        assert longest_queue_s(simulation, 0, 20) <= 1.5


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("source", [METRICS, STREAMS])
def test_half_the_sequences_are_followed_within_five_seconds(source: dict[str, float], workers: int) -> None:
    """The slots fall to the new limit, and the excess is withdrawn from the engine's queue."""
    simulation = Simulation(Engine(), clients=256, workers=workers, **source)  # type: ignore[arg-type]
    simulation.at(20, lambda engine: setattr(engine, "limit", 32))
    simulation.run(40)
    assert all(sum(sample.counts) <= 1.15 * 32 + workers for sample in simulation.samples if sample.at >= 25)
    assert longest_queue_s(simulation, 20, 40) <= 3
    assert rate(simulation, 25, 40) >= 0.98 * _direct(256, limit=32)


@pytest.mark.parametrize("source", [METRICS, STREAMS, ANSWERS])
def test_a_slower_engine_keeps_its_sequences(source: dict[str, float]) -> None:
    """Four times longer steps are no reason for fewer slots. By answers alone the change looks like a queue at first."""
    simulation = Simulation(Engine(), clients=256, workers=1, **source)  # type: ignore[arg-type]
    simulation.at(20, lambda engine: setattr(engine, "slowness", 4.0))
    simulation.run(60)
    least = 0.9 if source is ANSWERS else 0.98
    assert rate(simulation, 25, 60) >= least * _direct(256, until=60, slowness=4.0)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("source", [METRICS, STREAMS, ANSWERS])
def test_refusals_lower_the_slots_to_what_was_accepted(source: dict[str, float], workers: int) -> None:
    """Each worker tries one more request every two seconds: the refused one goes back to the head of its queue."""
    simulation = Simulation(Engine(), clients=256, workers=workers, **source)  # type: ignore[arg-type]
    simulation.at(20, lambda engine: setattr(engine, "refuses_above", 32))
    simulation.run(25)
    before = simulation.refused
    simulation.run(60)
    totals = [sum(sample.counts) for sample in simulation.samples if sample.at >= 25]
    assert min(totals) >= 28
    assert max(totals) <= 34
    assert simulation.refused - before <= workers * 35 / LONGEST_HOLD_S
    assert rate(simulation, 30, 60) >= 0.97 * _direct(256, limit=32)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("refuses_above", "lasts_s"), [(32, 20.0), (0, 2.0), (0, 10.0), (8, 10.0)])
@pytest.mark.parametrize("source", [METRICS, STREAMS, ANSWERS])
def test_the_slots_return_when_refusals_end(
    source: dict[str, float], refuses_above: int, lasts_s: float, workers: int
) -> None:
    """Within five seconds, also after the engine refused every request for a while."""
    simulation = Simulation(Engine(), clients=256, workers=workers, **source)  # type: ignore[arg-type]
    simulation.at(20, lambda engine: setattr(engine, "refuses_above", refuses_above))
    simulation.at(20 + lasts_s, lambda engine: setattr(engine, "refuses_above", 1 << 30))
    simulation.run(60)
    assert time_to_rate(simulation, 0.9 * _direct(256), since=20 + lasts_s) <= 5.0


@pytest.mark.parametrize("source", [METRICS, STREAMS, ANSWERS])
def test_more_sequences_are_found(source: dict[str, float]) -> None:
    """An engine that gets twice the sequences has more work a little later."""
    simulation = Simulation(Engine(), clients=256, workers=1, **source)  # type: ignore[arg-type]
    simulation.at(20, lambda engine: setattr(engine, "limit", 128))
    simulation.run(50)
    assert rate(simulation, 40, 50) >= 0.95 * _direct(256, limit=128)


@pytest.mark.parametrize("source", [METRICS, STREAMS])
def test_workers_before_one_engine_share_it(source: dict[str, float]) -> None:
    """From 50 and 15 slots to shares that differ by less than a half."""
    simulation = Simulation(Engine(), clients=256, workers=2, **source)  # type: ignore[arg-type]
    for worker, count in zip(simulation.workers, (50, 15), strict=True):
        worker.policy.resume(count)
    simulation.run(90)
    counts = simulation.samples[-1].counts
    assert max(counts) <= 1.5 * min(counts)


def test_metrics_that_are_updated_seldom_cause_no_oscillation() -> None:
    """As in an engine that updates them every 40 steps."""
    simulation = Simulation(Engine(metrics_every=40), clients=256, workers=2).run(40)
    assert swing(simulation, 15, 40) <= 0.15
    assert rate(simulation, 15, 40) >= 0.98 * _direct(256)


@pytest.mark.parametrize("source", [METRICS, STREAMS, ANSWERS])
def test_the_objective_for_the_time_between_tokens_limits_the_slots(source: dict[str, float]) -> None:
    """A step of 16 ms has 26 sequences."""
    simulation = Simulation(Engine(), clients=256, workers=1, tpot_ms=16, **source).run(60)  # type: ignore[arg-type]
    assert all(18 <= sum(sample.counts) <= 28 for sample in simulation.samples if sample.at >= 40)


@pytest.mark.parametrize("length", [5, 64])
@pytest.mark.parametrize("source", [METRICS, STREAMS, ANSWERS])
def test_answers_of_equal_length(source: dict[str, float], length: int) -> None:
    """They end in the same step; without metrics and streams the throughput decides."""
    lengths: Callable[[object], int] = lambda _: length  # noqa: E731
    simulation = Simulation(Engine(), clients=256, workers=1, lengths=lengths, **source).run(60)  # type: ignore[arg-type]
    assert rate(simulation, 20, 60) >= 0.95 * _direct(256)


@pytest.mark.parametrize("length", [1, 64])
def test_without_token_counts_the_throughput_is_in_answers(length: int) -> None:
    """As for vectors, and for servers that report no usage."""
    simulation = Simulation(
        Engine(), clients=256, workers=1, lengths=lambda _: length, metrics=False, reports_tokens=False
    ).run(40)
    assert rate(simulation, 20, 40) >= 0.95 * _direct(256)


@pytest.mark.parametrize("source", [METRICS, STREAMS])
def test_a_long_prefill_is_no_queue(source: dict[str, float]) -> None:
    """All prompts need 40 steps before their first token from a moment on: fewer slots would not make them earlier."""
    simulation = Simulation(Engine(), clients=256, workers=1, **source)  # type: ignore[arg-type]
    simulation.at(20, lambda engine: setattr(engine, "prefill_steps", 40))
    simulation.run(60)
    assert rate(simulation, 35, 60) >= 0.95 * _direct(256, until=60, prefill_steps=40)


class Bare:
    """A policy whose calls never end."""

    def __init__(self, **options: float) -> None:
        self.policy = SlotPolicy(**options)  # type: ignore[arg-type]
        self.now = 0.0

    def fill(self) -> None:
        """Use all slots."""
        while self.policy.in_flight < self.policy.count:
            self.policy.start(self.now, streamed=False)

    def tick(self, load: EngineLoad | None) -> int:
        """The slots after the next tick."""
        self.now += 0.25
        self.policy.tick(self.now, load)
        return self.policy.count


def test_slots_that_are_not_used_are_not_raised() -> None:
    """The number stays as it is without load."""
    bare = Bare()
    assert [bare.tick(EngineLoad(0, 0)) for _ in range(4)] == [START] * 4


def test_slots_double_while_nothing_waits() -> None:
    """Until the engine has a queue in two readings; what is too much there is then to be withdrawn."""
    bare = Bare()
    seen = []
    for running, waiting in ((8, 0), (16, 0), (32, 0), (40, 24), (40, 24)):
        bare.fill()
        seen.append(bare.tick(EngineLoad(running, waiting, source="vLLM")))
    assert seen == [16, 32, 64, 64, 41]
    assert bare.policy.excess == 23
    assert bare.policy.source == "vLLM: 40 running, 24 waiting"


def test_the_slots_of_the_engine_are_exact() -> None:
    """As llama.cpp reports them."""
    bare = Bare()
    for _ in range(3):
        bare.fill()
        assert bare.tick(EngineLoad(min(4, bare.policy.in_flight), None, 4, source="llama.cpp")) == 4
    assert bare.policy.source == "llama.cpp: 4 slots"


def test_a_full_cache_ends_the_doubling() -> None:
    """More sequences would make the engine interrupt some."""
    bare = Bare()
    bare.fill()
    assert bare.tick(EngineLoad(8, 0, cache_share=0.97)) == START


def test_figures_of_another_engine_are_ignored() -> None:
    """Nothing runs there although many calls are in flight here."""
    bare = Bare()
    bare.fill()
    assert bare.tick(EngineLoad(0, 0)) == START


def test_a_failed_reading_changes_nothing() -> None:
    """Estimates replace the metrics only after a while."""
    bare = Bare()
    bare.fill()
    assert bare.tick(EngineLoad(8, 0)) == 16
    bare.fill()
    assert bare.tick(None) == 16
    bare.fill()
    assert bare.tick(EngineLoad(16, 0)) == 32


def test_refusals_leave_at_least_one_slot() -> None:
    """Even if none was accepted; a second later more are tried, and soon as many as before."""
    bare = Bare()
    call = bare.policy.start(0.0, streamed=False)
    bare.policy.refuse(call, 0.1)
    assert (bare.policy.count, bare.policy.source) == (1, "all refused")
    for _ in range(12):
        bare.fill()
        bare.tick(EngineLoad(bare.policy.in_flight, 0))
    assert bare.policy.count >= START


@pytest.mark.parametrize(("count", "resumed"), [(50, 50), (0, 1), (10**9, MOST)])
def test_a_new_process_resumes_within_the_limits(count: int, resumed: int) -> None:
    """The worker keeps the number of the process before."""
    policy = SlotPolicy()
    policy.resume(count)
    assert policy.count == resumed
