"""What a killed stack left is ended only when the user wants it, and only what is surely of that stack."""

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tierlane.connect import STACK_FILE
from tierlane.up.data_dir import DataDir, LogLines, StackError
from tierlane.up.leftovers import end_leftovers
from tierlane.up.orphan_guard import LEASH_FILE, MARK_VARIABLE

Sleeper = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    """Starts processes that carry a mark, and do nothing."""
    started: list[subprocess.Popen[bytes]] = []

    def start(mark: str) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)"]
        process = subprocess.Popen(program, env=os.environ | {MARK_VARIABLE: mark}, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()  # Its environment is in place.
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[DataDir]:
    """A directory whose stack of the mark `ours` was killed with its leash."""
    data_dir = DataDir(tmp_path / "data")
    data_dir.write_json(LEASH_FILE, {"mark": "ours", "lines": []})
    yield data_dir
    data_dir.release()


def end(data_dir: DataDir, *, replace: bool = False, answer: bool = False) -> str:
    """End what is left; returns what was asked, or said."""
    asked: list[str] = []
    stream = io.BytesIO()

    def ask(question: str) -> bool:
        asked.append(question)
        return answer

    end_leftovers(data_dir, LogLines(stream, coloured=False), replace=replace, ask=ask)
    return "".join(asked) + stream.getvalue().decode()


def listed(data_dir: DataDir, **pids: int) -> None:
    """What stack.json says of the killed stack."""
    entries = [{"role": "gateway", "name": name, "pid": pid} for name, pid in pids.items()]
    data_dir.write_json(STACK_FILE, {"processes": entries})


def test_who_has_only_the_pid_of_a_process_is_never_ended(data_dir: DataDir, sleeper: Sleeper) -> None:
    """The number was given anew, to a process of another stack for example."""
    other = sleeper("another")
    listed(data_dir, gateway=other.pid)

    assert end(data_dir, replace=True) == ""

    assert psutil.Process(other.pid).status() != psutil.STATUS_ZOMBIE


def test_the_processes_are_named_and_stay_until_the_user_says_so(data_dir: DataDir, sleeper: Sleeper) -> None:
    """With their names of stack.json; those that it does not name are counted."""
    known, unknown = sleeper("ours"), sleeper("ours")
    listed(data_dir, gateway=known.pid, scheduler=1)
    told = f"gateway (pid {known.pid}), 1 more of an earlier `tierlane up` on {data_dir.path} still run"

    with pytest.raises(StackError) as caught:
        end(data_dir)
    assert str(caught.value) == f"{told}: end them with `tierlane up --replace`, or choose another --data-dir."
    assert (known.poll(), unknown.poll()) == (None, None)

    assert f"{told}. End them? [y/N] " in end(data_dir, answer=True)
    assert (known.wait(5), unknown.wait(5)) == (-9, -9)


def test_with_replace_nobody_is_asked(data_dir: DataDir, sleeper: Sleeper) -> None:
    """It is told what is ended."""
    process = sleeper("ours")

    assert end(data_dir, replace=True).endswith(
        f"1 processes of an earlier `tierlane up` on {data_dir.path} still run; ending them\n"
    )

    assert process.wait(5) == -9


def test_a_directory_without_a_killed_stack_asks_nothing(tmp_path: Path, sleeper: Sleeper) -> None:
    """Nor does an empty mark mean every process without one."""
    process = sleeper("")
    data_dir = DataDir(tmp_path / "fresh")

    assert end(data_dir) == ""

    data_dir.release()
    assert process.poll() is None
