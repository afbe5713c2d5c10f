"""`tierlane up` as a process of its own, for tests and benches: started, awaited, stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tierlane.connect import STACK_FILE
from tierlane.settings.declaration import PREFIX
from tierlane_local.up.data_dir import StackError

POLL_S = 0.05
TAIL_CHARACTERS = 3000


def up_command(data_dir: Path, *options: object) -> list[str]:
    """The command line of `tierlane up` with these options."""
    return [sys.executable, "-m", "tierlane", "up", "--data-dir", str(data_dir), *map(str, options)]


def bare_environment() -> dict[str, str]:
    """The environment of this process, without settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}


class UpProcess:
    """A process that runs the stack in `data_dir`; its output is appended to `log`."""

    def __init__(self, command: Sequence[str], data_dir: Path, log: Path, environment: Mapping[str, str]) -> None:
        self.data_dir = data_dir
        self.file = data_dir / STACK_FILE
        self._log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )

    @property
    def text(self) -> str:
        """Everything printed so far."""
        return self._log.read_text("utf-8")

    def wait_ready(self, within_s: float) -> None:
        """Return when the stack is ready. Raises StackError with the end of the output, without JSON log lines of roles."""
        deadline = time.monotonic() + within_s
        while not self.file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                messages = "\n".join(line for line in self.text.splitlines() if "| {" not in line)
                raise StackError(f"The stack does not start: {messages[-TAIL_CHARACTERS:]}")
            time.sleep(POLL_S)

    def stop(self, within_s: float) -> int:
        """Ctrl-C; the process is killed after `within_s`. Returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextmanager
def running_up(
    home: Path, *options: object, environment: Mapping[str, str], start_s: float, stop_s: float
) -> Iterator[UpProcess]:
    """Run `tierlane up` until the block ends, in `<home>/data` and with the output in `<home>/up.log`.

    `environment`: of the process, complete. `start_s`, `stop_s`: time limits. Raises StackError if it does not start.
    """
    up = UpProcess(up_command(home / "data", *options), home / "data", home / "up.log", environment)
    try:
        up.wait_ready(start_s)
        yield up
    finally:
        up.stop(stop_s)
