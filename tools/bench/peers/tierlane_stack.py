"""Tierlane as it is compared: everything on, all limits raised but checked, a key of each tier, one audit row each."""
# ruff: noqa: INP001 - a folder of scripts, not a package

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cases.stack import Stack
from measuring import JobError, wait_for
from running import Job, StartError, processes
from wrk import Target

from tierlane_local.running import up_command

ROOT = Path(__file__).resolve().parents[3]
GATEWAYS = 2
START_S = 120.0
POLL_S = 0.2
AUDIT_S = 60.0
BATCH_SIZE = "UPDATE models SET max_batch_size = {size}"
ENDED = "SELECT count(*) FROM requests WHERE status IN ('completed', 'failed')"
OPEN = "SELECT count(*) FROM requests WHERE status NOT IN ('completed', 'failed')"


@contextmanager
def running_tierlane(port: int, job: Job) -> Iterator[tuple[Stack, Target]]:
    """Run a stack until the end of the block. Raises StartError and JobError."""
    with processes(job.limit_s) as (group, home):
        stack = Stack(home)
        options = ["--ephemeral", "--port", port, "--gateways", GATEWAYS, "--schedulers", 1, "--workers", job.gpus]
        options += ["--backend", f"simulated:{job.service_ms}", "--max-batch-size", job.batch]
        group.start(up_command(home / "data", *options), ROOT, dict(os.environ))
        deadline = time.monotonic() + START_S
        while not stack.file.exists():
            group.still_alive()
            if time.monotonic() > deadline:
                raise StartError(f"not up within {START_S:.0f} s: {group.last_line()}")
            time.sleep(POLL_S)
        stack.raise_limits(BATCH_SIZE.format(size=job.batch))
        target = Target(f"{stack.info.http_url}/v1/inference", tuple(stack.info.keys.values()))
        wait_for(target, START_S, group.still_alive)
        yield stack, target


def audit_rows(stack: Stack) -> int:
    """The number of rows of ended requests, once no request is open. Raises JobError."""
    deadline, before = time.monotonic() + AUDIT_S, -1
    while (ended := int(stack.value(ENDED))) != before or stack.value(OPEN):
        if time.monotonic() > deadline:
            raise JobError(f"the audit was not complete after {AUDIT_S:.0f} s")
        before = ended
        time.sleep(1.0)
    return ended
