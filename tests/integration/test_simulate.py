"""`tierlane simulate`: its command line, and recorded requests from the audit with changed limits and GPUs."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from integration.admin_fixtures import Admin, customer
from integration.ledger_fixtures import database_url, db, postgres_server

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
BEGIN = datetime(2026, 11, 20, 10, tzinfo=UTC)
PERIOD = ("--from", "2026-11-20T10:00", "--to", "2026-11-20T10:01")
SCENARIO = """
gpus: 2
duration_s: 2
warmup_s: 0.5
customers:
  acme: {tier: enterprise, rate: 20}
  crowd: {tier: free, count: 3, rate: 10}
"""


async def audit(db: Connection) -> None:
    """A minute of 10 requests/s of a free customer and 2 requests/s of an enterprise one, on two GPUs; 40 + 5 n ms per batch."""
    await db.execute("INSERT INTO models (name, rps_per_gpu, target_utilization) VALUES ('tiny', 50, 0.8)")
    owners = {"free": await customer(db, "flood", "free"), "enterprise": await customer(db, "acme", "enterprise")}
    for n in range(720):
        tier = "enterprise" if n % 6 == 0 else "free"
        size = n % 4 + 1
        await db.execute(
            "INSERT INTO requests (id, created_at, customer_id, tier, model, status, latency_ms, queue_ms, gpu_ms, "
            "batch_id, batch_size, worker_id, tokens_used, mode) "
            "VALUES ($1, $2, $3, $4, 'tiny', 'completed', $5, 3, $6, $7, $8, $9, 20, 'queue')",
            f"req_{n:032x}", BEGIN + timedelta(seconds=n / 12), owners[tier], tier, 3 + 40 + 5 * size + 2.0,
            40.0 + 5 * size, f"batch-{n}", size, f"worker-{n % 2}",
        )  # fmt: skip


async def simulated(admin: Admin, path: Path, *arguments: str) -> dict[str, Any]:
    await admin.done("simulate", *arguments, "--json", str(path))
    return document(path)


def document(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_bytes())
    return result


async def test_recorded_requests_with_their_own_limits(database_url: str, db: Connection, tmp_path: Path) -> None:
    """Tiers, customers, GPUs and costs are those of the record; none of the requests, which were all accepted, is rejected."""
    await audit(db)

    result = await simulated(Admin(database_url), tmp_path / "result.json", *PERIOD)

    assert {name: (tier["arrivals"], tier["completed"]) for name, tier in result["tiers"].items()} == {
        "enterprise": (120, 120),
        "free": (600, 600),
    }
    assert result["notes"]["measured costs"].startswith(
        "40.0 ms per batch, 5.00 ms per request, 2.0 ms overhead; 2 GPUs"
    )
    assert result["recorded"]["free"]["completed"] == 600
    assert result["tiers"]["free"]["p50_ms"] == pytest.approx(47, rel=0.05)


async def test_recorded_requests_with_other_limits(database_url: str, db: Connection, tmp_path: Path) -> None:
    """Half of the rate for free, by an option and by a file: half of its requests are rejected, enterprise is as before."""
    await audit(db)
    limits = "{requests_per_second: 5, burst: 5}"
    file = tmp_path / "limits.yaml"
    file.write_text(f"tiers: {{free: {{limits: {limits}}}}}", "utf-8")
    admin = Admin(database_url)

    by_option = await simulated(admin, tmp_path / "1.json", *PERIOD, "--set", f"tiers.free.limits={limits}")
    by_file = await simulated(admin, tmp_path / "2.json", str(file), *PERIOD)

    assert by_option == by_file
    assert by_option["tiers"]["free"]["refused_by_code"] == {"rate_limit_exceeded": pytest.approx(300, abs=6)}
    assert by_option["tiers"]["enterprise"]["completed"] == 120


async def test_a_scenario_needs_no_server(tmp_path: Path) -> None:
    """Tables, JSON and plots; an equal seed gives equal files, another one does not."""
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO, "utf-8")
    admin = Admin("")

    shown = await admin.done("simulate", str(path), "--plots", str(tmp_path / "plots"))
    one = await simulated(admin, tmp_path / "1.json", str(path), "--seed", "7")
    same = await simulated(admin, tmp_path / "2.json", str(path), "--seed", "7")

    assert "enterprise  acme" in shown
    assert "GPUs busy" in shown
    plots = sorted((tmp_path / "plots").iterdir())
    assert [each.name for each in plots] == ["busy.svg", "p99.svg", "rates.svg", "refused.svg"]
    assert all(each.read_text("utf-8").startswith("<?xml") for each in plots)
    assert one == same


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "SCENARIO: is missing; name a file, a trace with --trace, or recorded requests with --from and --to."),
        (("--from", "2026-11-20"), "--to: is missing; recorded requests need both --from and --to."),
        (("nothing.yaml",), "nothing.yaml cannot be read: No such file or directory; name a scenario file in YAML."),
        (("--from", "2026-11-20", "--to", "soon"), "--to: must be a day or a time in UTC"),
        (("--from", "2026-11-21", "--to", "2026-11-20"), "--to: must be after --from (2026-11-21 00:00), got 2026-11-20."),
    ],
)  # fmt: skip
async def test_wrong_usage(arguments: tuple[str, ...], sentence: str) -> None:
    """One sentence that names the option, and exit code 2."""
    assert sentence in await Admin("postgresql+asyncpg://nowhere/none").fault(2, "simulate", *arguments)
