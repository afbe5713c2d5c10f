"""Gateways give way to the rest of a stack; whatever the system refuses stays as it was."""

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tierlane.child_process import ChildProcess
from tierlane.up.precedence import NICE, set_precedence


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    """A process as members of a stack are started: in a session of its own."""
    process = ChildProcess()
    with process.spawn_piped([sys.executable, "-c", "import time; time.sleep(60)"], {}):
        yield process
        process.kill()


def rights(pid: int) -> tuple[int, str]:
    """Its nice value, and that of its session where the system has such a thing."""
    group = Path(f"/proc/{pid}/autogroup")
    return psutil.Process(pid).nice(), group.read_text().split()[-1] if group.exists() else ""


def test_a_gateway_gives_way(child: ChildProcess) -> None:
    """Both for systems that weigh processes and for those that weigh sessions first."""
    before = rights(child.pid)
    set_precedence("gateway", child.pid)
    nice, group = rights(child.pid)

    assert nice == NICE["gateway"]
    assert group in {"", str(NICE["gateway"])}
    assert before[0] < nice


@pytest.mark.parametrize("role", ["redis", "postgres", "scheduler", "worker"])
def test_nobody_else_does(child: ChildProcess, role: str) -> None:
    """They have what they were started with."""
    before = rights(child.pid)
    set_precedence(role, child.pid)

    assert rights(child.pid) == before


def test_a_process_that_is_gone_is_no_fault(child: ChildProcess) -> None:
    """It may have ended between its start and this."""
    child.kill()
    set_precedence("gateway", child.pid)

    assert not child.alive
