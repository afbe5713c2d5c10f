"""PostgreSQL is away for half a minute under load: no client notices, and the audit is whole soon after its return."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from chaos.conftest import FOUR_GPUS
from load import ALL_WELL, load, unwell, verdict
from stack import start_stack
from tierlane.embedded import EmbeddedPostgres

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

AWAY_S = 30.0


@pytest.fixture
async def postgres(tmp_path: Path) -> AsyncIterator[EmbeddedPostgres]:
    """A server of the test's own, which nobody starts again behind its back."""
    server = EmbeddedPostgres(tmp_path, tmp_path / "run", ephemeral=True)
    await server.start()
    yield server
    await server.stop()


async def stopped(server: EmbeddedPostgres) -> None:
    """Shut down, and started again."""
    await server.stop()
    await asyncio.sleep(AWAY_S)
    await server.start()


async def frozen(server: EmbeddedPostgres) -> None:
    """Every process of it stands still: connections stay open and nobody answers."""
    parent = psutil.Process(server.pid)
    processes = [parent, *parent.children(recursive=True)]
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    await asyncio.sleep(AWAY_S)
    for process in processes:
        os.kill(process.pid, signal.SIGCONT)


@pytest.mark.parametrize("away", [stopped, frozen])
async def test_half_a_minute_without_postgres(postgres: EmbeddedPostgres, tmp_path: Path, away: object) -> None:
    """At 500 requests/s no client sees an error, health names the lag, and all rows are there 10 s after its return."""
    assert callable(away)
    with start_stack(tmp_path / "stack", *FOUR_GPUS, environment={"TIERLANE_DATABASE_URL": postgres.url}) as stack:
        loading = asyncio.create_task(load(stack, 500, AWAY_S + 8.0, ("enterprise", "paid", "free")))
        await asyncio.sleep(3.0)
        leaving = asyncio.create_task(away(postgres))
        await asyncio.sleep(AWAY_S - 5.0)
        reasons = str((await stack.health())["reasons"])
        await leaving
        back = time.monotonic()
        answers = await loading

        assert verdict(answers) == ALL_WELL, unwell(answers)[:5]
        assert "audit" in reasons
        assert "catalog" in reasons
        rows = await stack.audited([a.request_id for a in answers if a.request_id])
        assert {row["status"] for row in rows.values()} == {"completed"}
        assert time.monotonic() - back < 10.0
