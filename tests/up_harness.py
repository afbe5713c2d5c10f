"""Runs `tierlane up` with stand-in roles as a process of its own, and observes it from outside."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import psutil

from eventually import eventually
from tierlane_local.running import UpProcess, bare_environment

STAND_INS = Path(__file__).with_name("up_stand_ins.py")
READY_S = 30.0


class RunningUp(UpProcess):
    """One `up` process."""

    def __init__(self, data_dir: Path, port: int, *flags: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, str(STAND_INS), "up", str(data_dir), str(port), *flags]
        super().__init__(command, data_dir, data_dir.with_suffix(".out"), bare_environment() | (env or {}))

    def stack(self) -> dict[str, Any] | None:
        """The content of stack.json, None before it exists."""
        return json.loads(self.file.read_text()) if self.file.exists() else None

    def pids(self) -> dict[str, int]:
        """The pids in stack.json by name."""
        return {entry["name"]: entry["pid"] for entry in (self.stack() or {"processes": []})["processes"]}

    async def ready(self) -> dict[str, Any]:
        """Wait for stack.json and return it."""
        try:
            return await eventually(lambda: self.process.poll() is None and self.stack(), "stack.json", READY_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; its output:\n{self.text}") from None

    def all_processes(self) -> list[psutil.Process]:
        """The process and all of its descendants."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    async def ended(self, within_s: float) -> int:
        """Wait for the exit code."""
        await eventually(lambda: self.process.poll() is not None, "the end of up", within_s)
        return self.process.returncode

    async def interrupt(self, within_s: float = 5.0) -> int:
        """Ctrl-C; return the exit code."""
        self.process.send_signal(signal.SIGINT)
        return await self.ended(within_s)


def running(processes: list[psutil.Process]) -> list[str]:
    """The processes that still run; a zombie has ended."""
    left = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"{process.pid} {process.name()}")
        except psutil.Error:
            continue
    return left


def working_in(directory: Path) -> list[int]:
    """The pids of all processes whose working directory is in `directory`."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(directory):
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found
