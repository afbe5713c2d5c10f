"""Batches of similar length: tokens/s of `tiny` on batches in order of arrival, and as `form_batch` groups them.

The real script forms the batches from a queue in which four of five texts are short and one is long. Each batch then runs
on one core; only its CPU time counts. Waste is the share of positions that are padding.
"""
# ruff: noqa: INP001 - a folder of scripts, not a package

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from gpu_pool.backends.generation import GenerationParameters
from gpu_pool.backends.tiny.generate import TinyModel
from ratelimit.limits import REQUEST_BUCKET, Bucket, EffectiveLimits
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.admission import Admissions, ReplayLimits, Submission, SubmissionGroup, TierLimit
from scheduler.protocol.batches import Batches
from scheduler.protocol.pool_view import GatewayStats
from scheduler.protocol.presence import Presence
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from scheduler.request_id import new_request_id
from tierlane_local.embedded.redis import EmbeddedRedis

TIER, LONG_MS = "free", 600_000
AT_ONCE = 100  # Submissions of one call.
NO_BUDGET, ANY_BUDGET = (
    0,
    1_000_000,
)  # Without a budget batches have the order of arrival; with a wide one only lengths decide.


class BatchRun(NamedTuple):
    """The run of all batches: CPU seconds, real and padded positions."""

    cpu_s: float
    tokens: int
    positions: int

    @property
    def rate(self) -> float:
        return self.tokens / self.cpu_s

    @property
    def waste(self) -> float:
        return 1 - self.tokens / self.positions


def texts(count: int, chance: random.Random) -> list[str]:
    """Texts of 16 to 64 characters, one of five of 300 to 440."""
    lengths = [chance.randint(300, 440) if chance.random() < 0.2 else chance.randint(16, 64) for _ in range(count)]
    return ["".join(chance.choice("etaoin shrdlu") for _ in range(length)) for length in lengths]


async def formed(waiting: Sequence[str], size: int, budget: int) -> list[list[str]]:
    """The batches that the script of the scheduler forms of these texts, oldest first."""
    with tempfile.TemporaryDirectory() as home:
        server = EmbeddedRedis(Path(home), Path(home) / "socket", ephemeral=True)
        await server.start()
        client = command_client(server.url, 10.0)
        try:
            keys = Keys()
            await Presence(client, keys, gone_ms=LONG_MS).gateway_beat(GatewayStats("g1", 0.0, {}))
            batches, requests = Batches(client, keys, lease_ms=LONG_MS), [_submission(text) for text in waiting]
            limits = [TierLimit(TIER, 1e6, 1e6, len(waiting), (TIER,))]
            admissions = Admissions(client, keys, "g1", replays=ReplayLimits(0, 0, 0), pass_ms=LONG_MS)
            for first in range(0, len(requests), AT_ONCE):
                await admissions.admit(limits, 0.0, requests[first : first + AT_ONCE], 0)
            by_id = dict(zip((request.id for request in requests), waiting, strict=True))
            made = []
            while sum(map(len, made)) < len(waiting):
                name = f"b{len(made)}"
                await batches.form(name, [(TIER, size)], ANY_BUDGET, [TIER], max_tokens=budget, aged_ms=LONG_MS)
                ids = await client.lrange(keys.inflight(TIER, name), 0, -1)
                made.append([by_id[i.decode() if isinstance(i, bytes) else i] for i in ids])
            return made
        finally:
            await client.aclose()
            await server.stop()


def _submission(text: str) -> Submission:
    return Submission(
        id=new_request_id(),
        group=SubmissionGroup(TIER, "customer", "key", "tiny", EffectiveLimits((Bucket(REQUEST_BUCKET, 1e6, 1e6),))),
        nonce="0123456789abcdef",
        input_bytes=len(text),
        total_ms=LONG_MS,
        queue_ms=LONG_MS,
        body=encode_payload(Payload("tiny", text, {})),
    )


def run(batches: Sequence[Sequence[str]], job: Callable[[Sequence[str]], object], written: int) -> BatchRun:
    """Run the job on every batch; each text has a start token, and `written` tokens are generated for it."""
    began = time.process_time()
    for batch in batches:
        job(batch)
    cpu_s = time.process_time() - began
    lengths = [[len(text) + 1 for text in batch] for batch in batches]
    tokens = sum(map(sum, lengths)) + written * sum(map(len, batches))
    padded = sum(max(batch) * len(batch) for batch in lengths) + written * sum(map(len, batches))
    return BatchRun(cpu_s, tokens, padded)


def main() -> None:
    """Print the table."""
    options = _options()
    model = TinyModel.load("cpu", 1)
    parameters = GenerationParameters(max_tokens=options.max_tokens, temperature=1.0)
    jobs: list[tuple[str, Callable[[Sequence[str]], object], int]] = [
        ("vectors", model.embed, 0),
        (f"{options.max_tokens} tokens each", lambda b: model.generate(b, [parameters] * len(b)), options.max_tokens),
    ]
    waiting = texts(options.requests, random.Random(options.seed))
    as_they_come = asyncio.run(formed(waiting, options.batch, NO_BUDGET))
    grouped = asyncio.run(formed(waiting, options.batch, ANY_BUDGET))
    table = Table("job", "as they come: tokens/s", "waste", "grouped: tokens/s", "waste", "gain", box=None)
    for name, job, written in jobs:
        job(waiting[: options.batch])
        first, second = run(as_they_come, job, written), run(grouped, job, written)
        gain = second.rate / first.rate
        cells = (first.rate, first.waste), (second.rate, second.waste)
        table.add_row(
            name, *(text for rate, waste in cells for text in (f"{rate:,.0f}", f"{waste:.0%}")), f"{gain:.2f} x"
        )
    Console(width=110).print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=320)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
