"""Makes a small trace in each format, of drawn requests: `python -m tierlane_tools.traces.samples FOLDER`.

The files have the forms, line ends and resolutions of the published ones, and nothing of their content.
"""

import csv
import math
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

BLOCK_TOKENS = 512
_FAILED_SHARE = 0.05
_SESSION_SHARE = 1 / 3
_TURNS = 8
_MODELS = ("ChatGPT", "GPT-4")
_BEGIN = datetime(2026, 11, 20, 10, tzinfo=UTC)


class SampleRequest(NamedTuple):
    """A drawn request. `session`: 0 for a request of its own; the turns of a session have growing prompts."""

    at_s: float
    read: int
    written: int
    session: int
    failed: bool


def sample_requests(seconds: float, rate: float, seed: int = 1) -> list[SampleRequest]:
    """Requests at random times; a third of them are turns of sessions of about _TURNS, a twentieth has failed."""
    random, found, at_s = Random(f"{seed}/sample"), list[SampleRequest](), 0.0
    sessions: dict[int, int] = {}
    most_sessions = max(1, round(seconds * rate * _SESSION_SHARE / _TURNS))
    while (at_s := at_s + random.expovariate(rate)) < seconds:
        read = max(1, round(random.lognormvariate(math.log(300), 1.0)))
        written = max(1, round(random.lognormvariate(math.log(60), 0.8)))
        session = random.randint(1, most_sessions) if random.random() < _SESSION_SHARE else 0
        if session:
            read = sessions[session] = sessions.get(session, 0) + read
        found.append(SampleRequest(at_s, read, written, session, random.random() < _FAILED_SHARE))
    return found


def write_samples(folder: Path, requests: Sequence[SampleRequest]) -> dict[str, Path]:
    """A file of each format, by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    answered = [each for each in requests if not each.failed]
    paths = {name: folder / f"{name}.csv" for name in ("burstgpt", "azure", "audit", "arrivals")}
    _write_csv(
        paths["burstgpt"],
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
        [
            (
                f"{int(each.at_s)}.0",
                f"session-{each.session}" if each.session else "",
                1,
                _MODELS[number % 4 == 0],
                each.read,
                0 if each.failed else each.written,
                each.read + (0 if each.failed else each.written),
                "Conversation log" if each.session else "API log",
            )
            for number, each in enumerate(requests)
        ],
    )
    _write_csv(
        paths["azure"],
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        [(f"{_time(each):%Y-%m-%d %H:%M:%S.%f}0", each.read, each.written) for each in answered],
        ends="\r\n",
    )
    _write_csv(
        paths["audit"],
        "created_at,tier,customer_id,model,tokens_used,input_bytes",
        [
            (
                f"{_time(each):%Y-%m-%d %H:%M:%S.%f}+00",
                "paid" if each.session else "free",
                f"customer-{each.session}",
                "tiny",
                "" if each.failed else each.read + each.written,
                4 * each.read,
            )
            for each in requests
        ],
    )
    rows = [(f"{each.at_s:.6f}", f"customer-{each.session}", each.written) for each in answered]
    _write_csv(paths["arrivals"], "at_s,customer,words", rows)
    paths["mooncake"], paths["vllm"] = folder / "mooncake.jsonl", folder / "vllm.json"
    paths["mooncake"].write_bytes(b"".join(msgspec.json.encode(_mooncake(each)) + b"\n" for each in answered))
    paths["vllm"].write_bytes(msgspec.json.encode(_vllm(requests)))
    return paths


def _time(request: SampleRequest) -> datetime:
    return _BEGIN + timedelta(seconds=request.at_s)


def _write_csv(path: Path, header: str, rows: Sequence[Sequence[object]], ends: str = "\n") -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator=ends)
        writer.writerow(header.split(","))
        writer.writerows(rows)


def _mooncake(request: SampleRequest) -> dict[str, Any]:
    count = -(-request.read // BLOCK_TOKENS)
    # Block 0 is common to all prompts; the blocks of a session are those of its last turn, and more.
    own = (request.session or round(request.at_s * 1e6)) * 10_000
    return {
        "timestamp": round(request.at_s * 1000),
        "input_length": request.read,
        "output_length": request.written,
        "hash_ids": [0, *(own + number for number in range(1, count))],
    }


def _vllm(requests: Sequence[SampleRequest]) -> dict[str, Any]:
    return {
        "date": "20261120-100000",
        "num_prompts": len(requests),
        "request_rate": "inf",
        "completed": sum(not each.failed for each in requests),
        "input_lens": [each.read for each in requests],
        "output_lens": [0 if each.failed else each.written for each in requests],
        "ttfts": [0.0 if each.failed else 0.05 for each in requests],
        "start_times": [1000 + each.at_s for each in requests],
        "queue_times": [0.0 for _ in requests],
        "errors": ["Service Unavailable" if each.failed else "" for each in requests],
    }


if __name__ == "__main__":
    for made in write_samples(Path(sys.argv[1]), sample_requests(60.0, 5.0)).values():
        sys.stdout.write(f"{made}\n")
