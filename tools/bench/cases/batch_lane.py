"""Interactive requests with and without a batch of /v1/batches beside them, by turns, and how busy the GPUs are.

Interactive requests arrive at random at half of the rate of full batches. The batch has more lines than the rest of the GPUs
can run in one turn, so background work always waits. It is cancelled at the end of a turn.
"""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import median
from typing import Any

from cases.outcome import Check, Outcome, at_least, at_most, figure, none_of, over
from cases.stack import SHADOW, Stack, started
from openai import OpenAI

BATCH_MS, WORKERS, BATCH, GATEWAYS = 200, 8, 4, 2
CAPACITY_RPS = WORKERS * BATCH * 1000 / BATCH_MS
LOADS = {"half": 0.5, "tenth": 0.1}
"""Interactive load, as a part of the capacity."""
LINES = 50_000
MOST_P99, LEAST_BUSY = 1.05, 95.0
WARM_UP_S = 4.0
ENDED = ("completed", "failed", "expired", "cancelled")
# Seconds of GPU time of the batches that ended in a span, and the lines among their requests. Rows of a killed run have no GPU
# time.
BUSY = """
SELECT json_build_array(coalesce(sum(ms), 0) / 1000, coalesce(sum(lines), 0))::text FROM (
    SELECT max(gpu_ms) AS ms, count(*) FILTER (WHERE gateway_id = 'jobs') AS lines FROM requests
    WHERE completed_at >= to_timestamp({start}) AND completed_at < to_timestamp({end}) AND gpu_ms > 0 GROUP BY batch_id
) AS batches
"""
WRITTEN_S = 3.0
"""The time in which the audit has all requests of a turn."""


def run(*, quick: bool) -> Outcome:
    """Measure both loads, each with and without a batch by turns."""
    seconds, rounds = (8, 1) if quick else (30, 3)
    with started(workers=WORKERS, batch=BATCH, backend=f"simulated:{BATCH_MS}", gateways=GATEWAYS) as stack:
        stack.raise_limits(SHADOW)
        client = OpenAI(base_url=f"{stack.info.http_url}/v1", api_key=stack.info.keys["free"], max_retries=5)
        file = client.files.create(file=("lines.jsonl", input_lines(client.models.list().data[0].id)), purpose="batch")
        data = {}
        for name, load in LOADS.items():
            turns = [
                _turn(stack, client, file.id if beside else None, load * CAPACITY_RPS, seconds)
                for _ in range(rounds)
                for beside in (False, True)
            ]
            data[name] = {"without": _medians(turns[::2]), "beside": _medians(turns[1::2]), "turns": turns}
    return Outcome(judge(data), data, [])


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Judge the load at half of the capacity; the other is a figure."""
    half, tenth = data["half"], data["tenth"]
    return [
        figure("half of the capacity: p99 without a batch", f"{half['without']['p99_ms']:.1f} ms"),
        at_most(
            "half of the capacity: p99 beside a batch over that",
            over(half["beside"]["p99_ms"], half["without"]["p99_ms"]),
            MOST_P99,
            " x",
            2,
        ),
        at_least("half of the capacity: GPUs busy beside a batch", half["beside"]["busy"], LEAST_BUSY, " %", 1),
        figure(
            "half of the capacity: GPUs busy without a batch, lines/s beside",
            f"{half['without']['busy']:.1f} %, {half['beside']['lines_per_s']:.0f}",
        ),
        figure(
            "a tenth of the capacity: p99 beside a batch over that without",
            f"{tenth['beside']['p99_ms']:.1f} / {tenth['without']['p99_ms']:.1f} ms",
        ),
        figure(
            "a tenth of the capacity: GPUs busy without a batch, with, lines/s",
            f"{tenth['without']['busy']:.1f} %, {tenth['beside']['busy']:.1f} %, {tenth['beside']['lines_per_s']:.0f}",
        ),
        none_of("requests refused or failed", sum(turn["failed"] for name in data for turn in data[name]["turns"])),
    ]


def input_lines(model: str) -> bytes:
    """An input file."""
    body = {"model": model, "prompt": "Once upon a time"}
    lines = ({"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n in range(LINES))
    return "\n".join(map(json.dumps, lines)).encode()


def _turn(stack: Stack, client: OpenAI, file_id: str | None, rate: float, seconds: float) -> dict[str, float]:
    """One turn: beside a batch with this input file, or alone."""
    batch_id = ""
    if file_id is not None:
        batch_id = client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h").id
        _until(client, batch_id, "in_progress")
    found = stack.bench(rate=rate, duration=seconds, warmup=WARM_UP_S, echo="off", mix="enterprise=0.3,paid=0.7")
    start = datetime.fromisoformat(found["started_at"]).timestamp() + WARM_UP_S
    if batch_id:
        client.batches.cancel(batch_id)
        _until(client, batch_id, *ENDED)
    time.sleep(WRITTEN_S)
    busy_s, lines = json.loads(str(stack.value(BUSY.format(start=start, end=start + seconds))))
    return {
        "p50_ms": found["median_e2el_ms"],
        "p99_ms": found["p99_e2el_ms"],
        "late_p99_ms": found["lag_ms"]["p99"],
        "failed": found["failed"],
        "busy": 100 * busy_s / (WORKERS * seconds),
        "lines_per_s": lines / seconds,
    }


def _until(client: OpenAI, batch_id: str, *states: str) -> None:
    while client.batches.retrieve(batch_id).status not in states:
        time.sleep(0.2)


def _medians(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(turn[name] for turn in turns) for name in turns[0]}
