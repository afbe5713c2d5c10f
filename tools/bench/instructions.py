"""Instructions per request by role, counted by callgrind: other work of the machine does not change them.

The processes of one role at a time run under valgrind. Counted are the instructions while a known number of requests is
served and its audit is written, less those of an idle window of the same length. The kernel's instructions are not
counted. Runs of the model are so long that batches are full. Periodic loops run less often in a process that has no time
left, so the idle window counts in proportion to the pauses (`asyncio.sleep`) of both windows. On a busy machine repeat the
measurement: a scheduler's loops pause so irregularly that its figure varies by a third.

    .venv/bin/python tools/bench/instructions.py --roles redis gateway
    .venv/bin/python tools/bench/instructions.py --root ../another/checkout --keep /tmp/profile

`--root` is a checkout with its own .venv, whose stack is measured by the generator of this one. `--keep` keeps the
profiles for callgrind_annotate. Needs valgrind and Linux.
"""
# ruff: noqa: INP001 - a folder of scripts, not a package

import argparse
import asyncio
import os
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from cases.stack import SHADOW, Stack
from rich.console import Console

from tierlane_local.running import UpProcess, bare_environment

ROOT = Path(__file__).resolve().parents[2]
MEASURED: Mapping[str, Sequence[str]] = {
    "gateway": ("gateway",),
    "scheduler": ("scheduler",),
    "worker": ("worker", "model"),
    "redis": ("redis",),
}
"""Roles that are counted at once: a worker starts the process of its model."""
START_S, STOP_S, REQUEST_S = 300.0, 120.0, 120.0
SETTLE_S = 3.0
"""Start-up work ends in this time; so does the audit of the last requests."""
PROFILE, PAUSES = "callgrind", "pauses"
UP = ("--ephemeral", "--port", "0", "--gateways", "1", "--workers", "1", "--max-batch-size", "32")
BACKEND = "simulated:640"

show = Console(highlight=False, width=120).print


@contextmanager
def started(root: Path, role: str, home: Path) -> Iterator[Stack]:
    """Run a stack of a checkout with one role under valgrind, its limits raised."""
    prefix = "valgrind --tool=callgrind --instr-atstart=no --trace-children=yes"
    environment = bare_environment() | {
        "COUNTED_ROLE": role,
        "TIERLANE_TOTAL_REQUEST_MS": "60000",
        "COUNTED_PREFIX": f"{prefix} --callgrind-out-file={home}/{PROFILE}.%p",
        "COUNTED_PAUSES": f"{home}/{PAUSES}",
    }
    tierlane = root / ".venv/bin/tierlane"
    helped = subprocess.run([tierlane, "up", "--help"], capture_output=True, text=True, check=True).stdout
    schedulers = ["--schedulers", "1"] if "--schedulers" in helped else []  # Earlier versions always have one.
    command = [str(tierlane.with_name("python")), "-P", str(ROOT / "tools/bench/counted/up.py"), "up", *UP, *schedulers]
    command += ["--backend", BACKEND, "--data-dir", str(home / "data")]
    up = UpProcess(command, home / "data", home / "up.log", environment)
    try:
        up.wait_ready(START_S)
        stack = Stack(home)
        stack.raise_limits(SHADOW, "UPDATE tiers SET max_queue_ms = 60000")
        time.sleep(SETTLE_S)
        yield stack
    finally:
        up.stop(STOP_S)


def control(pids: Iterable[int], *options: str) -> None:
    """Send a command to the processes under valgrind."""
    for pid in pids:
        subprocess.run(["callgrind_control", *options, str(pid)], check=True, capture_output=True)


def pauses(home: Path, pids: Iterable[int]) -> int:
    """Pauses so far of these processes; of all roles if none of them counts, as in Redis."""
    files = [path for pid in pids if (path := home / f"{PAUSES}.{pid}").exists()]
    return sum(int.from_bytes(path.read_bytes(), "little") for path in files or home.glob(f"{PAUSES}.*"))


class Window(NamedTuple):
    """Instructions by role, and pauses, in one span of time."""

    instructions: dict[str, int]
    pauses: int


def counted(home: Path, pids: Mapping[int, str], work: Callable[[], None]) -> Window:
    """Count while `work` runs; each process writes a profile. `pids`: the role by process."""
    before = pauses(home, pids)
    control(pids, "--zero")
    control(pids, "--instr=on")
    work()
    control(pids, "--instr=off")
    paused = pauses(home, pids) - before
    control(pids, "--dump")
    found = defaultdict[str, int](int)
    for pid, role in pids.items():
        newest = max(home.glob(f"{PROFILE}.{pid}.*"), key=lambda path: int(path.suffix[1:]))
        lines = newest.read_text("utf-8", "replace").splitlines()
        found[role] += next(int(line.split()[1]) for line in lines if line.startswith("totals:"))
    return Window(found, paused)


async def serve(stack: Stack, requests: int, connections: int) -> None:
    """Send requests of 100 bytes in a closed loop. Raises RuntimeError for any response but 200."""
    url, keys, numbers = urlsplit(stack.info.http_url), list(stack.info.keys.values()), count()

    async def client(key: str) -> None:
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        with closing(writer):
            while (number := next(numbers)) < requests:
                body = b'{"input": "%086d"}' % number
                head = f"POST /v1/inference HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {key}\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                answer = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in answer.lower().splitlines() if line.startswith(b"content-length:"))
                text = await reader.readexactly(int(length.split(b":")[1]))
                if not answer.startswith(b"HTTP/1.1 200 "):
                    raise RuntimeError(f"{answer.decode()}{text.decode()}")

    async with asyncio.timeout(REQUEST_S + requests / 10), asyncio.TaskGroup() as group:
        for number in range(connections):
            group.create_task(client(keys[number % len(keys)]))


def measure(root: Path, role: str, requests: int, connections: int, home: Path) -> None:
    """Print a line for each kind of process."""
    with started(root, role, home) as stack:
        asyncio.run(serve(stack, requests // 4, connections))  # Caches and specialised bytecode are as in operation.
        time.sleep(SETTLE_S)
        pids = {process.pid: process.role for process in stack.info.processes if process.role in MEASURED[role]}

        def load() -> None:
            asyncio.run(serve(stack, requests, connections))
            time.sleep(SETTLE_S)

        began = time.monotonic()
        busy = counted(home, pids, load)
        seconds = time.monotonic() - began
        idle = counted(home, pids, lambda: time.sleep(seconds))
    share = min(1.0, busy.pauses / idle.pauses) if idle.pauses else 1.0
    for kind, total in busy.instructions.items():
        periodic = share * idle.instructions[kind]
        show(
            f"{kind:10} {(total - periodic) / requests:12,.0f} instructions per request; periodic {periodic / total:.0%} in"
            f" {seconds:.0f} s; pauses {busy.pauses} and {idle.pauses}"
        )


def main() -> None:
    """Measure a stack."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose stack is measured")
    parser.add_argument("--roles", nargs="+", choices=MEASURED, default=list(MEASURED))
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--keep", type=Path, help="a directory for the profiles")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    os.chdir(root)  # A worker imports from its working directory.
    for role in arguments.roles:
        with tempfile.TemporaryDirectory(prefix="tierlane-instructions-") as name:
            home = arguments.keep.resolve() / role if arguments.keep else Path(name)
            home.mkdir(parents=True, exist_ok=True)
            measure(root, role, arguments.requests, arguments.connections, home)


if __name__ == "__main__":
    main()
