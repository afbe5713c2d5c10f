"""CPU and memory by role, read from real processes."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tierlane.bench.resources import ProcessInfo, cpu_between, read_cpu, rss_by_role

BURNT_S = 0.3
# Waits for a line; then a child of it works and ends, and another one is there with the same memory.
PARENT = f"""
import os, sys, time
held = bytearray(50 << 20)
print("up", flush=True)
sys.stdin.readline()
child = os.fork()
if child == 0:
    while time.process_time() < {BURNT_S}:
        pass
    os._exit(0)
os.waitpid(child, 0)
child = os.fork()
if child == 0:
    held[:] = b"1" * len(held)
    print("burnt", flush=True)
    time.sleep(60)
    os._exit(0)
sys.stdin.readline()
os.kill(child, 9)
os.waitpid(child, 0)
"""


@contextmanager
def parent() -> Iterator["subprocess.Popen[str]"]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        try:
            yield process
        finally:
            process.communicate("\n")


def next_step(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "burnt\n"


@pytest.mark.parametrize(("role", "counts"), [("redis", True), ("postgres", True), ("worker", False)])
def test_work_of_children_counts_where_a_role_has_some(role: str, counts: bool) -> None:
    """Redis rewrites its file in a child, which is gone when it is done: its time is Redis' all the same."""
    with parent() as process:
        infos = [ProcessInfo(role, f"{role}-1", process.pid)]
        before = read_cpu(infos)
        next_step(process)
        used = cpu_between(before, read_cpu(infos)).by_role[role]

    assert (used > BURNT_S / 2) is counts


@pytest.mark.parametrize(("role", "counts"), [("redis", False), ("postgres", True)])
def test_memory_of_children_counts_where_it_is_their_own(role: str, counts: bool) -> None:
    """The child of Redis is a copy of it: counted, it would double what Redis holds."""
    with parent() as process:
        infos = [ProcessInfo(role, f"{role}-1", process.pid)]
        before = rss_by_role(read_cpu(infos))[role]
        next_step(process)
        after = rss_by_role(read_cpu(infos))[role]

    assert (after - before > 40 << 20) is counts
