"""What a gateway serves, compared with its own description by thousands of made-up requests: all checks of Schemathesis.

It runs as a program beside the gateway, with a fixed seed, over the description that is served; valid requests, broken ones,
missing keys, other methods, and sequences of requests. The seed and the number of examples bound it to some seconds.
"""

import asyncio
import re
import sys
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gateway.openapi.endpoints import ENDPOINTS
from integration.gateway_fixtures import SERVICE_TOKEN, TIERS, Stack, model, reverse_or_vector, running_stack, tier
from integration.ledger_fixtures import database_url, postgres_server

__all__ = ["database_url", "postgres_server"]

EXAMPLES = 20  # Of each operation and phase.
SEED = 1
LONG_MS = 60_000
CONFIG = """
[auth.openapi.key]
bearer = "{key}"

[auth.openapi.service]
bearer = "{token}"

[warnings]
fail-on = ["missing_auth"]

# Two valid bodies may meet under one Idempotency-Key, which is 422; a body that is refused is 400.
[checks.negative_data_rejection]
expected-statuses = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429", "5xx"]

[checks.positive_data_acceptance]
expected-statuses = ["2xx", "3xx", "401", "403", "404", "409", "422", "429", "5xx"]
"""


@pytest.fixture
async def stack(client: Redis, redis_url: str, database_url: str) -> AsyncIterator[Stack]:
    """A ready gateway that bears many requests without a key, and a machine that has other work: no deadline is near."""
    async with running_stack(
        client, redis_url, database_url=database_url, auth_failures="off", total_ms=LONG_MS, gone_ms=LONG_MS
    ) as running:
        tiers = tuple(tier(name, at + 1, 0.1, max_queue_ms=LONG_MS) for at, name in enumerate(TIERS))
        running.worker.answerer = reverse_or_vector
        running.catalog.set(tiers=tiers, models=(model(), model("org/small")))
        yield running


async def schemathesis(stack: Stack, home: Path, *options: str) -> tuple[int, str]:
    """Exit code and what it printed; it works in `home`."""
    config = home / "schemathesis.toml"
    config.write_text(CONFIG.format(key=stack.catalog.keys["enterprise"].text, token=SERVICE_TOKEN))
    description = home / "openapi.json"  # By its address, the operation that serves it would be left out.
    async with stack.http.get(f"{stack.url}/openapi.json") as answer:
        description.write_bytes(await answer.read())
    program = Path(sysconfig.get_path("scripts")) / "schemathesis"
    command = [sys.executable, str(program), "--config-file", str(config), "run", str(description)]
    command += ["--url", stack.url, *options]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=home, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, said.decode()


@pytest.mark.timeout(300)  # Seven seconds where nothing else runs.
async def test_what_is_served_is_what_is_described(stack: Stack, tmp_path: Path) -> None:
    """All checks, every operation, no failure and no error; more than a few hundred requests, some of which were served."""
    code, said = await schemathesis(
        stack,
        tmp_path,
        *("--checks", "all", "--mode", "all", "--phases", "examples,coverage,fuzzing,stateful"),
        *("--seed", str(SEED), "--max-examples", str(EXAMPLES), "--generation-database", "none"),
        *("--continue-on-failure", "--suppress-health-check", "all", "--no-color", "--workers", "1"),
    )

    assert code == 0, said
    operations = sum(len(door.methods) for door in ENDPOINTS)
    assert f"Selected: {operations}/{operations}" in said
    assert f"Tested: {operations}" in said
    made = re.search(r"(\d+) generated, (\d+) passed", said)
    assert made is not None, said
    assert int(made[1]) == int(made[2]) > 500
    assert len(stack.worker.seen) > 50
