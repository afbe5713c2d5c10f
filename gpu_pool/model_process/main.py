"""The model process, `python -m gpu_pool.model_process.main`: loads one backend, runs batches until its worker goes.

It talks over one inherited socket (gpu_pool/model_process/messages.py), never over stdout, holds no Redis connection
and no secret, and can be killed at any moment: its worker gives the batch to another one. Exit codes: 0 the worker
went, 70 the device or the model is lost, 78 only a change of settings can help, 1 the model did not load.

It must not outlive its worker: the kernel ends it, even inside a kernel launch or a C call, by PR_SET_PDEATHSIG (Linux
only, prctl(2)); everywhere, end-of-file on the socket does the same for any process whose interpreter still runs.
"""

import argparse
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from gpu_pool.backends.backend import Backend, ServingBackend
from gpu_pool.model_process.backend_registry import select_backend
from gpu_pool.model_process.batch_runner import BatchRunner, DeviceLost
from gpu_pool.model_process.inputs import Listeners, deadlines, run_readable, stream_deadlines
from gpu_pool.model_process.messages import (
    Done,
    Fatal,
    FrameTooLarge,
    ModelLink,
    ProgressCounter,
    Ready,
    Run,
    too_large,
)
from scheduler.errors import StartError
from scheduler.failpoints import arm, failpoint

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have this process killed when `parent` (the process that started it) ends; at once if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # It died before the line above.
        os._exit(0)


EXIT_NOT_LOADED, EXIT_DEVICE_LOST, EXIT_CONFIG = 1, 70, 78  # The last two as in sysexits.h.

LOOK_EVERY_S = 0.02  # For who left; a lease tells it far less often.


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until the supervisor goes. Never returns: every path ends in `os._exit`, past hooks that could hang."""
    options = _parse(arguments)
    # The socket must not reach what the model may start itself, or its end would not be seen.
    os.set_inheritable(options.fd, False)  # noqa: FBT003 - the standard library's signature
    die_with_parent(options.parent)
    if options.failpoints:
        arm(Path(options.failpoints))
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, _leave_it_to_the_supervisor)
    faulthandler.enable()
    link = ModelLink(socket.socket(fileno=options.fd))
    code = _serve(link, options)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gpu_pool.model_process.main")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the supervisor")
    parser.add_argument("--parent", type=int, required=True, help="process id of the supervisor")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--torch-threads", type=int, default=1)
    parser.add_argument("--failpoints", default="", help="directory of a test that kills this process")
    return parser.parse_args(arguments)


def _leave_it_to_the_supervisor(signum: int, frame: FrameType | None) -> None:
    """Ctrl-C reaches the whole group; the batch that runs is still to be finished."""


def _serve(link: ModelLink, options: argparse.Namespace) -> int:
    try:
        backend = select_backend(options.backend, options.device, options.torch_threads, options.dtype)
        backend.load()
        backend.warmup()
    except StartError as error:
        link.send(Fatal(str(error), start_error=True))
        return EXIT_CONFIG
    except BaseException as error:  # noqa: BLE001 - whatever a model raises, the supervisor is told
        traceback.print_exc()
        link.send(Fatal(f"The model did not load: {type(error).__name__}: {error}"))
        return EXIT_NOT_LOADED
    if isinstance(backend, ServingBackend):
        link.send(Ready(backend.version, backend.most))
        backend.serve(link.connection)
    link.send(Ready(backend.version))
    return _answer(link, backend)


class Steps:
    """What is done after each step of the model: progress is told, listeners hear, and those who left are looked for."""

    def __init__(self, link: ModelLink, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._progress = ProgressCounter(link.send)
        self._looked_at = 0.0
        self.listeners = Listeners(link.send)

    def begin(self, run: Run) -> None:
        """A batch begins."""
        self._progress.begin()
        self.listeners.begin(run.seq)

    def __call__(self) -> None:
        """One more step is done."""
        self._progress()
        if not self.listeners:
            return
        self.listeners.flush()
        now = self._clock()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            for drop in self._link.drops():
                self.listeners.drop(drop.seq, drop.places)


def _answer(link: ModelLink, backend: Backend) -> int:
    steps = Steps(link)
    runner = BatchRunner(backend, steps)
    try:
        for run in link.runs():
            steps.begin(run)
            _answer_one(link, runner, run, steps.listeners)
    except DeviceLost as error:
        link.send(Fatal(str(error)))
        return EXIT_DEVICE_LOST
    return 0


def _answer_one(link: ModelLink, runner: BatchRunner, run: Run, listeners: Listeners) -> None:
    started = time.perf_counter()
    now = time.monotonic()
    results = run_readable(
        run.bodies,
        lambda items: runner.run(items, run.budget_ms),
        listeners.listen,
        deadlines(run, now),
        stream_deadlines(run, now),
    )
    gpu_ms = (time.perf_counter() - started) * 1000
    failpoint("answer_unsent")
    done = Done(run.seq, gpu_ms, results, runner.largest, runner.fault, round(runner.padding_waste, 4))
    try:
        link.send(done)
    except FrameTooLarge:
        link.send(too_large(done))


if __name__ == "__main__":
    main()
