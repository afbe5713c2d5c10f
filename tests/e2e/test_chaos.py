"""`tierlane chaos` as a user runs it: short runs with every fault enabled must lose nothing, and leave nothing behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from eventually import eventually
from tierlane.chaos.echo import RUNS_VARIABLE
from up_harness import running, working_in

REPOSITORY = Path(__file__).parent.parent.parent
ENDS_WITHIN_S = 100
READY_WITHIN_S = 60.0


class RunningChaos:
    """One run as a process of its own; what it printed is `text`."""

    def __init__(self, home: Path, *options: str) -> None:
        self._output = home / "out.txt"
        self.json = home / "result.json"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TIERLANE_")}
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tierlane", "chaos", "--json", str(self.json), *options],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                cwd=REPOSITORY,
                env=clean,
            )

    @property
    def text(self) -> str:
        return self._output.read_text()

    def ended(self) -> int:
        """The exit code, when it has ended."""
        try:
            return self.process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it does not end; it printed:\n{self.text}") from None

    async def under_load(self) -> None:
        """Wait until the load has begun."""
        await eventually(lambda: "postgresql" in self.text or self.process.poll() is not None, "load", READY_WITHIN_S)
        assert self.process.poll() is None, self.text


@pytest.mark.timeout(150)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_twelve_seconds_of_chaos_lose_nothing(tmp_path: Path, seed: int) -> None:
    """Every fault is enabled; all invariants hold, faults were done, and the schedule is that of the seed."""
    run = RunningChaos(tmp_path, "--seed", str(seed), "--duration", "12")

    assert run.ended() == 0, run.text
    result = json.loads(run.json.read_text())
    assert result["passed"]
    assert result["seed"] == seed
    assert [verdict["name"] for verdict in result["verdicts"] if not verdict["holds"]] == []
    assert sum(fault["what"] == "start" and not fault["error"] for fault in result["faults"]) >= 1
    assert result["requests"] > 3000
    assert result["audit"]["rows"] > 1000


@pytest.mark.timeout(150)
async def test_ctrl_c_heals_and_still_reports(tmp_path: Path) -> None:
    """An interrupted run is judged like a whole one, of what it was."""
    run = RunningChaos(tmp_path, "--seed", "1", "--duration", "60", "--faults", "stop-worker,pg-lock")
    await run.under_load()
    await eventually(lambda: "  start  " in run.text, "the first fault", 15.0)
    run.process.send_signal(signal.SIGINT)

    assert run.ended() == 0, run.text
    result = json.loads(run.json.read_text())
    healed = [fault["what"] for fault in result["faults"] if not fault["error"]]
    assert result["interrupted"]
    assert healed.count("start") == healed.count("heal") >= 1
    assert "lost" in run.text


@pytest.mark.timeout(150)
async def test_a_killed_run_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    """SIGKILL of the tool in the middle of a fault: stopped processes, servers and the directory are gone soon."""
    run = RunningChaos(tmp_path, "--seed", "1", "--faults", "stop-postgres,stop-worker,stop-gateway")
    await run.under_load()
    await eventually(lambda: "  start  " in run.text, "the first fault", 15.0)
    home = _home_of(run.process.pid)
    processes = psutil.Process(run.process.pid).children(recursive=True)
    assert len(processes) > 15
    run.process.kill()
    run.process.wait()

    await eventually(
        lambda: not running(processes) and not working_in(home) and not home.exists(), "nothing is left", 10.0
    )


def _home_of(pid: int) -> Path:
    """Where a run keeps its things, as its roles are told."""
    environments = [child.environ() for child in psutil.Process(pid).children()]
    return next(Path(one[RUNS_VARIABLE]).parent for one in environments if RUNS_VARIABLE in one)
