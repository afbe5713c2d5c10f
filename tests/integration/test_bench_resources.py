"""CPU, memory and padding that `tierlane bench` reads of real processes and of the health endpoint."""

import subprocess
import sys

import pytest
from aiohttp import web

from tierlane_local.stack_file import ProcessInfo
from tierlane_tools.bench.measurement.padding import read_padding
from tierlane_tools.bench.measurement.resources import cpu_between, read_cpu, rss_by_role

CPU_S = 0.3
# After a line on stdin one child works and ends, and another one has a changed copy of the parent's memory.
PARENT = f"""
import os, sys, time
held = bytearray(50 << 20)
print("up", flush=True)
sys.stdin.readline()
child = os.fork()
if child == 0:
    while time.process_time() < {CPU_S}:
        pass
    os._exit(0)
os.waitpid(child, 0)
child = os.fork()
if child == 0:
    held[:] = b"1" * len(held)
    print("done", flush=True)
    time.sleep(60)
    os._exit(0)
sys.stdin.readline()
os.kill(child, 9)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize(
    ("role", "cpu", "memory"), [("redis", True, False), ("postgres", True, True), ("worker", False, None)]
)
def test_children_of_a_role(role: str, *, cpu: bool, memory: bool | None) -> None:
    """CPU of ended children counts for Redis and PostgreSQL; memory only for PostgreSQL: Redis forks share pages."""
    pipe = subprocess.PIPE
    infos = []
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        infos = [ProcessInfo(role, f"{role}-1", process.pid)]
        before = read_cpu(infos)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
        after = read_cpu(infos)
        process.communicate("\n")

    assert (cpu_between(before, after).by_role[role] > CPU_S / 2) is cpu
    if memory is not None:
        assert (rss_by_role(after)[role] - rss_by_role(before)[role] > 40 << 20) is memory


async def test_padding_is_read_from_health() -> None:
    """Whatever the status of the stack; without a readable health document it is None."""

    async def health(request: web.Request) -> web.Response:
        authorized = request.headers.get("Authorization") == "Bearer token"
        return web.json_response({"padding_waste": 0.25} if authorized else {}, status=503)

    app = web.Application()
    app.add_routes([web.get("/internal/health", health)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    found = [
        await read_padding(*target) for target in ((url, "token"), (url, "other"), ("http://127.0.0.1:1", "token"))
    ]
    await runner.cleanup()

    assert found == [0.25, None, None]
