"""`tierlane chaos` as a user runs it: short runs with every fault lose nothing and leave nothing behind."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from eventually import eventually
from tierlane_local.running import bare_environment
from tierlane_tools.chaos.echo import RUNS_VARIABLE
from up_harness import running, working_in

REPOSITORY = Path(__file__).parent.parent.parent


class RunningChaos:
    """One run as a process of its own; `text` is its output."""

    def __init__(self, home: Path, *options: str) -> None:
        self._output = home / "out.txt"
        self.json = home / "result.json"
        command = [sys.executable, "-m", "tierlane", "chaos", "--json", str(self.json), *options]
        env = bare_environment()
        with self._output.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=REPOSITORY, env=env
            )

    @property
    def text(self) -> str:
        return self._output.read_text()

    def exit_code(self) -> int:
        try:
            return self.process.wait(150)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it does not end; its output:\n{self.text}") from None

    async def first_fault(self) -> None:
        await eventually(lambda: "  start  " in self.text or self.process.poll() is not None, "the first fault", 75.0)
        assert self.process.poll() is None, self.text


CLUSTER = ("--cluster", "3", "--faults", "kill-redis,stop-redis,failover,migrate-slot")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (1, ()),
        *(pytest.param(seed, (), marks=pytest.mark.chaos) for seed in (2, 3)),
        pytest.param(1, CLUSTER, marks=pytest.mark.chaos),
    ],
)
def test_twelve_seconds_of_chaos_lose_nothing(tmp_path: Path, seed: int, options: tuple[str, ...]) -> None:
    """All invariants hold, also for batches and shares; at least one fault was injected. On a cluster: faults of its servers."""
    run = RunningChaos(tmp_path, "--seed", str(seed), "--duration", "12", *options)

    assert run.exit_code() == 0, run.text
    result = json.loads(run.json.read_text())
    assert (result["passed"], result["seed"]) == (True, seed)
    assert [verdict["name"] for verdict in result["verdicts"] if not verdict["holds"]] == []
    assert {verdict["name"] for verdict in result["verdicts"] if verdict["measured"]} >= {"batches", "fairness"}
    assert sum(fault["what"] == "start" and not fault["error"] for fault in result["faults"]) >= 1
    assert result["requests"] > 3000
    assert result["audit"]["rows"] > 1000


@pytest.mark.timeout(200)
async def test_an_interrupted_run_heals_and_reports(tmp_path: Path) -> None:
    """Ctrl-C ends every fault; the invariants are checked for the part that ran."""
    run = RunningChaos(tmp_path, "--seed", "1", "--duration", "60", "--faults", "stop-worker,pg-lock")
    await run.first_fault()
    run.process.send_signal(signal.SIGINT)

    assert run.exit_code() == 0, run.text
    result = json.loads(run.json.read_text())
    healed = [fault["what"] for fault in result["faults"] if not fault["error"]]
    assert result["interrupted"]
    assert healed.count("start") == healed.count("heal") >= 1


@pytest.mark.timeout(200)
async def test_a_killed_run_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    """SIGKILL during a fault: stopped processes, servers and the directory are removed."""
    run = RunningChaos(tmp_path, "--seed", "1", "--faults", "stop-postgres,stop-worker,stop-gateway")
    await run.first_fault()
    chaos = psutil.Process(run.process.pid)
    environments = [child.environ() for child in chaos.children()]
    home = next(Path(each[RUNS_VARIABLE]).parent for each in environments if RUNS_VARIABLE in each)
    processes = chaos.children(recursive=True)
    assert len(processes) > 15
    run.process.kill()
    run.process.wait()

    await eventually(
        lambda: not running(processes) and not working_in(home) and not home.exists(), "nothing is left", 10.0
    )
