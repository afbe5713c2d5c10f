"""Failpoints: each one is in the product exactly once, and none has an effect unless it is armed."""

import ast
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from distributions import FOLDERS, ROOT
from scheduler import failpoints
from scheduler.failpoints import FAILPOINTS, armed_directory, failpoint

SCRIPT = """
import sys
from pathlib import Path
from scheduler.failpoints import arm, failpoint
arm(Path(sys.argv[1]))
failpoint("reaped")
print("passed")
"""


def calls() -> list[str]:
    """The names in all calls of `failpoint` in the product."""
    trees = [ast.parse(path.read_text("utf-8")) for folder in FOLDERS.values() for path in sorted(folder.rglob("*.py"))]
    found = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        ast.literal_eval(call.args[0])
        for call in found
        if isinstance(call.func, ast.Name) and call.func.id == "failpoint"
    ]


def test_the_table_and_the_product_agree() -> None:
    """Each failpoint is called in exactly one place."""
    assert Counter(calls()) == Counter(list(FAILPOINTS))


def test_an_unarmed_failpoint_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of that name in the working directory is not used."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reaped").touch()

    failpoint("reaped")

    assert armed_directory() == ""
    assert (tmp_path / "reaped").exists()


def run(directory: Path) -> tuple[int, str]:
    """Run a process that arms the directory and reaches the failpoint `reaped`."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


def test_an_armed_failpoint_kills_the_process_once(tmp_path: Path) -> None:
    """Its file is removed, so that the next process continues; files of other failpoints stay."""
    (tmp_path / "reaped").touch()
    (tmp_path / "wake_popped").touch()

    assert run(tmp_path) == (-signal.SIGKILL, "")
    assert [path.name for path in tmp_path.iterdir()] == ["wake_popped"]
    assert run(tmp_path) == (0, "passed\n")


def test_failpoints_are_armed_in_two_places() -> None:
    """By the start of a role, and by a model process on behalf of its supervisor."""
    places = [
        str(path.relative_to(ROOT))
        for folder in FOLDERS.values()
        for path in sorted(folder.rglob("*.py"))
        if re.search(r"\barm\(", path.read_text("utf-8")) and path.name != Path(failpoints.__file__).name
    ]
    assert places == ["gpu_pool/model_process/main.py", "tierlane/roles/process.py"]
