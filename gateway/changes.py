"""What became different between two documents of state, as sentences for the list of events. Pure."""

from collections.abc import Iterator

from gateway.losses import ON_PURPOSE, SILENT
from gateway.operations.state import Event, State, TierState, WorkerState

LEAST_STEP = 0.1  # A tier's limits move all the time under load: told is where they begin and end to be lowered.


def changes(before: State, now: State) -> list[Event]:
    """The events, none where nothing is different. Workers and gateways are compared only where Redis told of both."""
    events = [*_status(before, now), *_redis(before, now), *_limits(before, now), *_letters(before, now)]
    if before.redis_problem is None and now.redis_problem is None:
        events += [*_workers(before, now), *_gateways(before, now)]
    return events


def _status(before: State, now: State) -> Iterator[Event]:
    if before.status == now.status:
        return
    why = f": {now.reasons[0]}" if now.reasons else "."
    yield Event(now.at_ms, "good" if now.status == "healthy" else "bad", f"Status is {now.status}{why}")


def _redis(before: State, now: State) -> Iterator[Event]:
    if before.redis_problem is None and now.redis_problem is not None:
        yield Event(now.at_ms, "bad", f"Redis is away: {now.redis_problem.rstrip('.')}.")
    elif before.redis_problem is not None and now.redis_problem is None:
        yield Event(now.at_ms, "good", "Redis is back.")


def _limits(before: State, now: State) -> Iterator[Event]:
    earlier = {tier.name: tier for tier in before.tiers}
    for tier in now.tiers:
        was = earlier.get(tier.name)
        if was is not None and _is_lowered(was) != _is_lowered(tier):
            lowered = _is_lowered(tier)
            said = f"lowered to {tier.limit_ratio:.0%}" if lowered else "nearly whole again"
            yield Event(now.at_ms, "bad" if lowered else "good", f"Limits of {tier.name} are {said}.")


def _is_lowered(tier: TierState) -> bool:
    return tier.limit_ratio < 1 - LEAST_STEP


def _letters(before: State, now: State) -> Iterator[Event]:
    if now.dlq > before.dlq:
        yield Event(now.at_ms, "bad", f"{now.dlq - before.dlq} more dead letters: {now.dlq} in all.")
    elif now.dlq < before.dlq:
        yield Event(now.at_ms, "news", f"{before.dlq - now.dlq} dead letters fewer: {now.dlq} are left.")


def _workers(before: State, now: State) -> Iterator[Event]:
    earlier = {(worker.pool, worker.id): worker for worker in before.workers}
    later = {(worker.pool, worker.id): worker for worker in now.workers}
    for key, worker in later.items():
        yield from _worker(earlier.get(key), worker, now.at_ms)
    for key, worker in earlier.items():
        if key not in later:
            yield Event(now.at_ms, "news", f"{worker.id} {'left' if _serves(worker) else 'is forgotten'}.")


def _worker(was: WorkerState | None, worker: WorkerState, at_ms: int) -> Iterator[Event]:
    if was is None:
        yield Event(at_ms, "news", f"{worker.id} is here: {worker.status}.")
    elif _serves(was) and not _serves(worker) and worker.status in SILENT:
        yield Event(at_ms - worker.age_ms, "bad", f"{worker.id} was lost: its last heartbeat.")
    elif _serves(was) and not _serves(worker):
        fault = f", {worker.gpu.fault}" if worker.gpu is not None and worker.gpu.fault else ""
        yield Event(at_ms, "news" if worker.status in ON_PURPOSE else "bad", f"{worker.id} is {worker.status}{fault}.")
    elif _serves(worker) and not _serves(was):
        yield Event(at_ms, "good", f"{worker.id} serves.")
    elif worker.healthy and was.model_pid and worker.model_pid not in (0, was.model_pid):
        yield Event(at_ms, "bad", f"{worker.id} has another model process: the one before was lost.")


def _serves(worker: WorkerState) -> bool:
    """A pause of a moment is no news: an endpoint at its limit asks for several a minute."""
    return worker.healthy or worker.pausing


def _gateways(before: State, now: State) -> Iterator[Event]:
    for gateway in sorted(set(now.gateways) - set(before.gateways)):
        yield Event(now.at_ms, "news", f"Gateway {gateway} is here.")
    for gateway in sorted(set(before.gateways) - set(now.gateways)):
        yield Event(now.at_ms, "news", f"Gateway {gateway} is gone.")
