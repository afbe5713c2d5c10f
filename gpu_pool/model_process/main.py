"""The model process, `python -m gpu_pool.model_process.main`: loads one backend and runs batches, or single requests
if the backend has slots, until its worker is gone.

It communicates over one inherited socket (gpu_pool/model_process/messages.py), never over stdout, has no Redis
connection and no secrets, and can be killed at any moment: its worker hands the batch to another one. Exit codes: 0 the
worker is gone, 70 the device or the model is lost, 78 only other settings can help, 1 the model did not load.

It must not outlive its worker: the kernel ends it, even inside a kernel launch or a C call, by PR_SET_PDEATHSIG (Linux
only, prctl(2)); everywhere, end-of-file on the socket does the same for a process whose interpreter still runs.
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
from functools import partial
from pathlib import Path

from gpu_pool.backends.backend import ServingBackend, SteppingBackend
from gpu_pool.model_process.backend_registry import select_backend
from gpu_pool.model_process.batch_runner import BatchRunner
from gpu_pool.model_process.device_errors import DeviceLost
from gpu_pool.model_process.inputs import IN_TIME, reject_of, run_readable
from gpu_pool.model_process.listeners import PIECES_EVERY_S, Listeners
from gpu_pool.model_process.messages import Available, Done, Fatal, ModelLink, ProgressCounter, Ready, Run, send_done
from gpu_pool.model_process.stepping import serve_slots
from gpu_pool.model_process.tracebacks import Tracebacks
from scheduler.errors import StartError
from scheduler.failpoints import arm, failpoint

_PR_SET_PDEATHSIG = 1

EXIT_NOT_LOADED, EXIT_DEVICE_LOST, EXIT_CONFIG = 1, 70, 78  # The last two as in sysexits.h.

HANG_MS = 10_000
"""A checked batch that has longer may be one that hangs."""

DROP_POLL_S = 0.02  # Interval of looking for cancellations; leases report them less often.


def die_with_parent(parent: int) -> None:
    """Have this process killed when `parent` (the process that started it) ends; exit at once if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # The parent ended before prctl.
        os._exit(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until the worker is gone. Never returns: every path ends in `os._exit`, past hooks that could hang."""
    parser = argparse.ArgumentParser(prog="python -m gpu_pool.model_process.main")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the supervisor")
    parser.add_argument("--parent", type=int, required=True, help="process id of the supervisor")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--torch-threads", type=int, default=1)
    parser.add_argument("--max-slots", type=int, default=0, help="most requests at a time; 0: the model's own number")
    parser.add_argument("--slots", type=int, default=0, help="slots of the last process of the worker")
    parser.add_argument("--check", action="store_true", help="run the canary first, print tracebacks of the model")
    parser.add_argument("--failpoints", default="", help="directory of a test that kills this process")
    options = parser.parse_args(arguments)
    # Child processes of the model must not inherit the socket, or its end would go unnoticed.
    os.set_inheritable(options.fd, False)  # noqa: FBT003 - the standard library's signature
    die_with_parent(options.parent)
    if options.failpoints:
        arm(Path(options.failpoints))
    for name in (signal.SIGINT, signal.SIGTERM):
        # Ctrl-C reaches the whole process group; the worker decides when this process ends.
        signal.signal(name, lambda *_: None)
    faulthandler.enable()
    link = ModelLink(socket.socket(fileno=options.fd))
    code = _serve(link, options)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(link: ModelLink, options: argparse.Namespace) -> int:
    report = Tracebacks() if options.check else None
    try:
        backend = select_backend(options.backend, options.device, options.torch_threads, options.dtype)
        if (report_waiting := getattr(backend, "report_waiting", None)) is not None:
            report_waiting(lambda reason, cause: link.send(Available(not reason, reason, cause=cause)))
        backend.load()
        backend.warmup()
        if options.check:
            backend.health()
        context_tokens = int(getattr(backend, "context_tokens", 0))
    except StartError as error:
        if report is not None and error.__cause__ is not None:  # The model's module raised.
            report(error.__cause__)
        link.send(Fatal(str(error), start_error=True))
        return EXIT_CONFIG
    except BaseException as error:  # noqa: BLE001 - the model may raise anything
        if report is None:
            traceback.print_exc()
        else:
            report(error)
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        link.send(Fatal(f"The model did not load: {text}"))
        return EXIT_NOT_LOADED
    if isinstance(backend, ServingBackend):
        if options.slots:
            backend.resume(options.slots)
        link.send(Ready(backend.version, backend.slots, context_tokens))
        backend.serve(link.connection)
    try:
        if isinstance(backend, SteppingBackend) and backend.slots:
            slots = min(backend.slots, options.max_slots or backend.slots)
            link.send(Ready(backend.version, slots, context_tokens))
            serve_slots(link, backend, slots, report)
        link.send(Ready(backend.version, 0, context_tokens))
        steps = Steps(link, checked=options.check)
        runner = BatchRunner(backend, steps, report=report)
        for run in link.runs():
            steps.begin(run)
            started, now = time.perf_counter(), time.monotonic()
            compute = partial(runner.run, budget_ms=run.budget_ms)
            results = run_readable(run, compute, steps.listeners.listen, now, reject_of(backend))
            gpu_ms = (time.perf_counter() - started) * 1000
            faulthandler.cancel_dump_traceback_later()
            failpoint("answer_unsent")
            done = Done(run.seq, gpu_ms, results, runner.largest, runner.fault, runner.padding_waste)
            send_done(link.send, done)
    except DeviceLost as error:
        link.send(Fatal(str(error)))
    return EXIT_DEVICE_LOST


class Steps:
    """Called after each step of the model: reports progress, sends pieces, and reads cancellations."""

    def __init__(self, link: ModelLink, clock: Callable[[], float] = time.monotonic, *, checked: bool = False) -> None:
        self._link = link
        self._checked = checked
        self._clock = clock
        self._progress = ProgressCounter(link.send)
        self._polled_at = 0.0
        self.listeners = Listeners(link.send, PIECES_EVERY_S)

    def begin(self, run: Run) -> None:
        """A batch begins."""
        self._progress.begin()
        self.listeners.begin(run.seq)
        if self._checked and run.budget_ms >= HANG_MS:  # Before the process is killed, its author sees where it is.
            faulthandler.dump_traceback_later(run.budget_ms * IN_TIME / 1000)

    def __call__(self) -> None:
        """One more step is done."""
        self._progress()
        if not self.listeners:
            return
        self.listeners.flush()
        now = self._clock()
        if now - self._polled_at >= DROP_POLL_S:
            self._polled_at = now
            for drop in self._link.drops():
                self.listeners.drop(drop.seq, drop.places)


if __name__ == "__main__":
    main()
