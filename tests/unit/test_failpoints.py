"""Failpoints: every gap of the table is in the product exactly once, and nothing happens unless a test asks for it."""

import ast
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from scheduler import failpoints
from scheduler.failpoints import FAILPOINTS, armed_directory, failpoint

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("gateway", "ratelimit", "scheduler", "gpu_pool", "ledger", "tierlane")

PASSES = """
import sys
from pathlib import Path
from scheduler.failpoints import arm, failpoint
arm(Path(sys.argv[1]))
failpoint("reaped")
print("passed")
"""


def calls() -> list[str]:
    """The name in every call of `failpoint` in the product."""
    trees = [ast.parse(path.read_text("utf-8")) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    found = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        ast.literal_eval(call.args[0])
        for call in found
        if isinstance(call.func, ast.Name) and call.func.id == "failpoint"
    ]


def test_the_table_and_the_product_agree() -> None:
    """Every name of the table is passed at exactly one place, and no place has a name that the table does not know."""
    assert Counter(calls()) == Counter(list(FAILPOINTS))


def test_the_gaps_are_numbered() -> None:
    """From 1 on without a hole, and each says what has happened and what has not."""
    numbers = [int(text.partition(":")[0]) for text in FAILPOINTS.values()]
    assert numbers == list(range(1, len(FAILPOINTS) + 1))
    assert all(re.fullmatch(r"\d+: \S.{20,}", text) for text in FAILPOINTS.values())


def test_nothing_happens_while_nothing_is_armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a look at the disk: a file in the working directory is left alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reaped").touch()

    failpoint("reaped")

    assert armed_directory() == ""
    assert (tmp_path / "reaped").exists()


def run(directory: Path) -> tuple[int, str]:
    """A process of its own that arms the directory and passes the failpoint `reaped`."""
    done = subprocess.run(
        [sys.executable, "-c", PASSES, str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


def test_an_armed_one_kills_the_process_once(tmp_path: Path) -> None:
    """Its file is gone with the process, so that the next one passes; files of other gaps are left alone."""
    (tmp_path / "reaped").touch()
    (tmp_path / "wake_popped").touch()

    assert run(tmp_path) == (-signal.SIGKILL, "")
    assert [path.name for path in tmp_path.iterdir()] == ["wake_popped"]
    assert run(tmp_path) == (0, "passed\n")


def test_only_the_composition_root_arms_by_itself() -> None:
    """The variable is read in one place; a model process is told by its supervisor."""
    places = [
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        if re.search(r"\barm\(", path.read_text("utf-8")) and path.name != Path(failpoints.__file__).name
    ]
    assert places == ["gpu_pool/model_process/main.py", "tierlane/roles/process.py"]
