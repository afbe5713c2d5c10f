"""The estimate of a model's capacity, from a cold start with default limits: no rejections at half of it, full use at
twice as much, and a change of the model's speed is followed.

The load is an open loop of `tierlane bench`; the estimate is read from `/internal/health`.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from capacity_models import AT_ONCE, capacity_rps
from cases.outcome import Check, Outcome, at_least, at_most, figure, none_of
from cases.stack import SHADOW, Stack, started

BENCH = Path(__file__).resolve().parents[1]
WORKERS, BATCH = 4, 32
TRUE_RPS = capacity_rps(WORKERS, BATCH)
MIX = "enterprise=0.2,paid=0.5,free=0.3"
COLD_S = 5
SLOWER = 4.0
MOST_REFUSED, LEAST_GOODPUT, MOST_SWING, FOUND_S = 1.0, 95.0, 15.0, 10
SAMPLE_S = 0.5
TRUE_OVER_S = 5
"""The speed of a model on a CPU varies by the second: its true capacity is the mean over this time."""
RUNS = """SELECT json_agg(json_build_array(extract(epoch FROM ended), size, ms)) FROM (
    SELECT max(completed_at) AS ended, max(batch_size) AS size, max(gpu_ms) AS ms FROM requests
    WHERE status = 'completed' GROUP BY batch_id) AS runs WHERE size >= {fullest}"""


def run(*, quick: bool) -> Outcome:
    """Measure a function with a right, a low and a high prior, one that changes its speed, transformers, an endpoint."""
    seconds = 12 if quick else 20
    data = {
        "function": _loads(seconds),
        "prior too low": _loads(seconds, prior=TRUE_RPS / WORKERS / 10),
        "prior too high": _loads(seconds, prior=TRUE_RPS / WORKERS * 10),
        "transformers": _transformers(seconds),
        "endpoint": _endpoint(seconds),
        "steps": _steps(seconds),
    }
    return Outcome(judge(data), data, [])


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Judge rejections at half and goodput at twice the capacity, and the error of the estimate after a step."""
    checks: list[Check] = []
    for name in ("function", "prior too low", "prior too high", "transformers", "endpoint"):
        half, twice = data[name]["half"], data[name]["twice"]
        checks += [
            figure(
                f"{name}, half of the capacity: refused in the first {COLD_S} s, from cold", f"{half['cold']:.2f} %"
            ),
            at_most(f"{name}, half of the capacity: refused after that", half["later"], MOST_REFUSED, " %", 2),
            at_least(f"{name}, twice the capacity: goodput", twice["goodput"], LEAST_GOODPUT, " %", 1),
            none_of(f"{name}, twice the capacity: enterprise refused or failed", twice["enterprise_failed"]),
            none_of(f"{name}, twice the capacity: accepted, then failed", twice["failed_after_acceptance"]),
            at_most(f"{name}, twice the capacity: swing of the estimate", twice["swing"], MOST_SWING, " %", 1),
        ]
    for step in data["steps"]["steps"]:
        label = f"model {step['name']}, {FOUND_S} s later: estimate off by"
        checks.append(at_most(label, step["off"], MOST_SWING, " %", 1))
    return checks


def _loads(seconds: int, prior: float | None = None) -> dict[str, Any]:
    with _function() as stack:
        if prior is not None:
            stack.sql(f"UPDATE models SET rps_per_gpu = {prior}")  # noqa: S608 - a number
        return _half_and_twice(stack, seconds)


def _transformers(seconds: int) -> dict[str, Any]:
    """A small random network, whose capacity on this machine is measured first on a separate stack."""
    with tempfile.TemporaryDirectory(prefix="tierlane-capacity-") as name:
        make = "import sys; from pathlib import Path; from hf_models import make_causal; make_causal(Path(sys.argv[1]))"
        environment = os.environ | {"PYTHONPATH": str(BENCH.parents[1] / "tests")}
        subprocess.run([sys.executable, "-c", make, name], check=True, capture_output=True, env=environment)
        shape: dict[str, Any] = {"workers": 1, "batch": 16, "gateways": 1, "backend": f"hf:{name}", "torch_threads": 1}
        with started(**shape) as stack, _own_processor(stack):
            stack.raise_limits(SHADOW)
            options = {"mode": "closed", "connections": 64, "duration": seconds, "mix": "paid=1", "echo": "off"}
            true_rps = float(stack.bench(**options)["request_throughput"])
        with started(**shape) as stack, _own_processor(stack):
            return _half_and_twice(stack, seconds, true_rps, full=shape["batch"])


@contextmanager
def _own_processor(stack: Stack) -> Iterator[None]:
    """Give the model its own processor, as a GPU would be: otherwise the load changes its speed.

    Where processes cannot be bound to processors (macOS), nothing changes.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    processors = sorted(os.sched_getaffinity(0))
    others = processors[:-1] or processors
    _pin(os.getpid(), others)
    try:
        for each in sorted(
            stack.info.processes, key=lambda each: each.role == "model"
        ):  # After its parent, the worker.
            _pin(each.pid, processors[-1:] if each.role == "model" else others)
        yield
    finally:
        _pin(os.getpid(), processors)


def _pin(pid: int, processors: list[int]) -> None:
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(ProcessLookupError, psutil.NoSuchProcess):  # Processes of PostgreSQL may end.
            for thread in process.threads():
                os.sched_setaffinity(thread.id, processors)


def _endpoint(seconds: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(BENCH / "capacity_models.py"), str(port)])
    try:
        with started(workers=1, batch=BATCH, backend=f"openai:http://127.0.0.1:{port}/v1") as stack:
            return _half_and_twice(stack, seconds, capacity_rps(AT_ONCE, BATCH))
    finally:
        server.terminate()
        server.wait()


def _half_and_twice(stack: Stack, seconds: int, true_rps: float = TRUE_RPS, full: int | None = None) -> dict[str, Any]:
    """`full`: the size of a full batch of a model whose speed varies; its true capacity is measured at the same time."""
    with _watched(stack) as samples:
        half = _offered(stack, 0.5 * true_rps, seconds)
        twice = _offered(stack, 2 * true_rps, seconds)
    settled = _settled(samples, twice, seconds)
    runs = _full_runs(stack, full) if full else []
    truth = [_true_rps(runs, each["at"], TRUE_OVER_S) if full else true_rps for each in settled]
    possible = _true_rps(runs, _began(twice) + seconds, seconds - COLD_S) if full else true_rps
    estimates = [each["capacity_rps"] / true for each, true in zip(settled, truth, strict=True)]
    return {
        "half": {"cold": _refused(half, 0, COLD_S), "later": _refused(half, COLD_S, seconds)},
        "twice": {
            "goodput": 100 * _completed(twice, COLD_S, seconds) / possible,
            "enterprise_failed": twice["tiers"]["enterprise"]["failed"],
            "failed_after_acceptance": twice["audit"]["expected"] - twice["audit"]["completed_answers"],
            "swing": 100 * (max(estimates) / min(estimates) - 1),
            "errors": twice["errors"],
        },
        "true_rps": true_rps,
        "true_meanwhile": " ".join(f"{true:.0f}" for true in truth),
        **_series(samples, half, twice),
    }


def _full_runs(stack: Stack, full: int) -> list[list[float]]:
    """The end (seconds since the epoch), size and duration (ms) of each full batch."""
    return list(json.loads(stack.value(RUNS.format(fullest=full))))


def _true_rps(runs: list[list[float]], until: float, over_s: float) -> float:
    """Requests/s of the model while it ran, over an interval. Raises RuntimeError without a full batch in it."""
    within = [(size, ms) for ended, size, ms in runs if until - over_s <= ended <= until]
    if not within:
        raise RuntimeError(f"No full batch ended within {over_s} s: the true capacity is not known.")
    return 1000 * sum(size for size, _ in within) / sum(ms for _, ms in within)


def _steps(seconds: int) -> dict[str, Any]:
    """At twice the capacity of the fast model: four times slower, and back."""
    steps = []
    with _function() as stack, _watched(stack) as samples:
        factor = Path(os.environ["CAPACITY_FACTOR"])
        runs = [_offered(stack, 2 * TRUE_RPS, seconds)]
        for name, times in (("slower by four times", SLOWER), ("faster by four times", 1.0)):
            factor.write_text(str(times), "utf-8")
            runs.append(_offered(stack, 2 * TRUE_RPS, seconds))
            true = stack.value("SELECT target_utilization FROM models WHERE enabled") * TRUE_RPS / times
            found = [each["capacity_rps"] for each in _settled(samples, runs[-1], seconds)]
            steps.append({"name": name, "off": max(abs(each / true - 1) for each in found) * 100})
    return {"steps": steps, "true_rps": TRUE_RPS, **_series(samples, *runs)}


@contextmanager
def _function() -> Iterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="tierlane-capacity-") as name:
        factor = Path(name) / "factor"
        factor.write_text("1.0", "utf-8")
        os.environ["CAPACITY_FACTOR"] = str(factor)
        os.environ["PYTHONPATH"] = str(BENCH)
        try:
            with started(workers=WORKERS, batch=BATCH, backend="capacity_models:timed") as stack:
                yield stack
        finally:
            del os.environ["CAPACITY_FACTOR"], os.environ["PYTHONPATH"]


def _offered(stack: Stack, rate: float, seconds: int) -> dict[str, Any]:
    return stack.bench(
        rate=rate, mix=MIX, duration=seconds, warmup=0, connections=3000, echo="off", arrivals="constant"
    )


@contextmanager
def _watched(stack: Stack) -> Iterator[list[dict[str, Any]]]:
    """Record the capacity of health twice a second."""
    samples: list[dict[str, Any]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(SAMPLE_S):
            found = stack.operator_get("/internal/health")
            samples.append(
                {
                    "at": time.time(),  # The clock of the load generator.
                    "capacity_rps": found["capacity_rps"],
                    "evidence": found["capacity_evidence"],
                    "waiting": found["queue_depth"],
                }
            )

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield samples
    finally:
        stop.set()
        watcher.join()


def _began(found: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(found["started_at"]).timestamp()


def _settled(samples: list[dict[str, Any]], found: Mapping[str, Any], seconds: int) -> list[dict[str, Any]]:
    """The samples of a run after its first ten seconds."""
    began = _began(found)
    return [each for each in samples if began + FOUND_S <= each["at"] <= began + seconds]


def _series(samples: list[dict[str, Any]], *runs: Mapping[str, Any]) -> dict[str, str]:
    """The series of the plot, as `second:requests/s` separated by blanks."""
    begin = _began(runs[0])
    rows = [(_began(run) - begin + i, row) for run in runs for i, row in enumerate(_seconds(run))]
    known = [each for each in samples if each["evidence"] != "prior"]
    return {
        "served": " ".join(f"{at:.1f}:{completed}" for at, (completed, _) in rows),
        "refused": " ".join(f"{at:.1f}:{failed}" for at, (_, failed) in rows),
        "estimate": " ".join(f"{each['at'] - begin:.1f}:{each['capacity_rps']:.0f}" for each in known),
    }


def _points(series: str) -> tuple[list[float], list[float]]:
    pairs = [point.split(":") for point in series.split()]
    return [float(at) for at, _ in pairs], [float(value) for _, value in pairs]


def _seconds(found: Mapping[str, Any]) -> list[list[int]]:
    """Completed and failed requests of each second."""
    return [
        [sum(tier[which] for tier in second["tiers"].values()) for which in ("completed", "failed")]
        for second in found["timeline"]
    ]


def _refused(found: Mapping[str, Any], first: int, last: int) -> float:
    """The rejected requests in per cent, between two seconds."""
    rows = _seconds(found)[first:last]
    failed = sum(failed for _, failed in rows)
    return 100 * failed / max(1, failed + sum(completed for completed, _ in rows))


def _completed(found: Mapping[str, Any], first: int, last: int) -> float:
    """Completed requests per second, between two seconds."""
    rows = _seconds(found)[first:last]
    return sum(completed for completed, _ in rows) / max(1, len(rows))


def draw(path: Path, data: Mapping[str, Any]) -> None:
    """Draw estimate, true capacity, served and rejected requests over time, for each run."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # only where a plot is drawn

    figure = Figure(figsize=(9, 3 * len(data)), dpi=100, layout="constrained")
    for axes, (name, found) in zip(figure.subplots(len(data), 1), data.items(), strict=True):
        axes.step(*_points(found["served"]), where="post", label="served")
        axes.step(*_points(found["refused"]), where="post", label="refused")
        axes.plot(*_points(found["estimate"]), label="estimate x target_utilization")
        axes.axhline(found["true_rps"], color="#888888", linestyle="--", label="true capacity")
        axes.set_title(name, loc="left")
        axes.set_ylabel("requests/s")
        axes.set_ylim(0, 2.2 * found["true_rps"])
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("seconds; the load changes at the middle of a run, in the last one the model at each third")
    figure.axes[0].legend(frameon=False, ncols=4, loc="upper right")
    figure.savefig(path, metadata={"Software": None})
