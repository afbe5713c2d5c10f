"""The comparison with other systems: figures are read or refused with a reason, and nothing that was started stays."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PEERS = Path(__file__).resolve().parents[2] / "bench" / "peers"
FIGURES = (
    'FIGURES {{"answered":{answered},"microseconds":2000000,"bad_status":1,"connect":2,"read":3,"write":4,"timeout":5,'
    '"p50_us":6,"p99_us":7,"max_us":8}}'
)
DAEMON = """
import subprocess, sys
from descendants import adopt_orphans, descendants, stop_all
import psutil
adopt_orphans()
# The shell ends at once and leaves behind a process that does not listen to SIGTERM.
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
root = psutil.Popen(["sh", "-c", 'setsid "$0" -c "$1" & ', sys.executable, child], stdout=subprocess.PIPE)
root.stdout.readline()
root.wait()
import descendants as module
module.POLITE_S = module.FORCED_S = 0.2
left = descendants()
print(*[process.pid for process in left], "killed", stop_all([root]), "left", len(descendants()))
"""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts import each other by name."""
    monkeypatch.syspath_prepend(str(PEERS))


@pytest.mark.usefixtures("alone")
def test_figures_are_read() -> None:
    """The line of post.lua becomes a rate, and every kind of error counts."""
    from wrk import read_figures  # noqa: PLC0415

    figures = read_figures(["Running 2s test", FIGURES.format(answered=500)])

    assert figures.rate == 250.0
    assert figures.errors == 15


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "wrk printed nothing"),
        (["unable to connect to 127.0.0.1:1"], "unable to connect"),
        ([FIGURES.format(answered=0)], "No request was answered"),
    ],
)
def test_no_figures_are_made_up(lines: list[str], why: str) -> None:
    """Without figures there is a reason."""
    from wrk import WrkError, read_figures  # noqa: PLC0415

    with pytest.raises(WrkError, match=why):
        read_figures(lines)


@pytest.mark.usefixtures("alone")
def test_a_row_without_figures_says_why() -> None:
    """In every form of the table."""
    from table import Row, document, markdown  # noqa: PLC0415

    row = Row("ray_serve", "Ray Serve 1.0", 512, failed="cannot be installed: no space")

    assert "cannot be installed: no space" in markdown([row])
    assert document([row], {})["rows"][0]["failed"] == "cannot be installed: no space"


if sys.platform == "linux":  # Elsewhere a process cannot adopt orphans.

    def test_daemons_do_not_stay() -> None:
        """A process that left its parent and ignores SIGTERM is found, and killed."""
        done = subprocess.run(
            [sys.executable, "-c", DAEMON], cwd=PEERS, capture_output=True, text=True, timeout=60, check=True
        )
        pid, _, killed, _, left = done.stdout.split()

        assert not psutil.pid_exists(int(pid))
        assert (killed, left) == ("1", "0")


@pytest.mark.usefixtures("alone")
def test_what_others_do_is_told_apart() -> None:
    """Of two busy cores, one by the system and half a one by the load, half a one is of others."""
    from machine import Reading, others_cores  # noqa: PLC0415

    before, after = Reading(10.0, 100.0, 5.0), Reading(20.0, 120.0, 10.0)

    assert others_cores(before, after, own_s=10.0) == 0.5
