"""Bugs that a single line of code causes: the product has no such line."""

import asyncio
import re

import pytest

from regressions import lint
from regressions.lint import ROOT, Rule, matches, unreferenced_tasks
from scheduler.tasks import end_all

WALL_CLOCK = {
    "gateway/account/keys.py": "whether a key has expired, which is stored as a date",
    "gateway/account/usage.py": "which day it is, in UTC",
    "gateway/admin_api/oidc.py": "when a sign-in expires: a claim of a JWT, which any process may read",
    "gateway/admin_api/audit.py": "which days and times a report has by default; the audit stores dates",
    "gateway/alerts/service.py": "which date the end of a period is, with an error of up to half a period, and the time of a signature",
    "gateway/http/response.py": "the Date header",
    "gateway/inference/pipeline.py": "whether a key has expired, which is stored as a date",
    "gateway/limits/capacity.py": "which price is in force, which is stored as a date",
    "gateway/operations/health/collector.py": "times that are shown: of the observation, and the age of the audit",
    "gateway/translations/message_endpoints.py": "the dates in Anthropic's rate-limit headers",
    "gpu_pool/backends/openai_endpoint/requests.py": "a Retry-After that is a date; its delay is bounded",
    "gpu_pool/backends/open_inference/endpoint.py": "a Retry-After that is a date; its delay is bounded",
    "scheduler/protocol/admission.py": "which years of offsets of a time zone are sent; the time of Redis selects among them",
    "tierlane/admin/requests.py": "which requests are listed by default; the audit stores dates",
    "tierlane/admin/tiers_and_models.py": "whether a price starts in the past, which is stored as a date",
    "tierlane/check/system.py": "the difference between the clocks of Redis, PostgreSQL and this host",
    "tierlane/roles/tracing.py": "the start of a span; durations use the monotonic clock",
    "tools/tierlane_tools/bench/runner.py": "the start of a measurement, for its report",
}


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [
        (lint.changes_a_list, set()),  # bugs 7 and 9: sent twice or lost between two steps
        (lint.scans_the_keyspace, {"scheduler/protocol/index_repair.py"}),  # bug 11: cost of all stored data
        (lint.removes_by_value, {"scheduler/protocol/cancellation.py"}),  # bug 11: dead letters, by an operator
        (lint.reads_the_wall_clock, set(WALL_CLOCK)),  # bug 16: clocks of two hosts
        (lint.uses_wait_for, set()),  # bug 27: a lost cancellation (CPython #86296)
        (lint.shields, set()),  # bug 29: shielded work is lost at shutdown
        # Of YAML only nodes are composed, by the safe loader, and none is constructed.
        (
            lint.deserializes_code,
            {"tierlane/admin/catalog_file.py"},
        ),  # remote code execution (CVE-2025-61765 and others)
    ],
)
def test_code_that_must_not_exist(rule: Rule, allowed: set[str]) -> None:
    """Except in the modules named here."""
    assert {place.partition(":")[0] for place in matches(rule)} <= allowed


def test_commands_that_scripts_must_not_use() -> None:
    """Bugs 9 and 11: blocking pops, and commands over the whole keyspace."""
    for path in ROOT.glob("*/lua/**/*.lua"):
        text = path.read_text("utf-8")
        assert not re.search(r"'(KEYS|SCAN|FLUSHALL|FLUSHDB|BLPOP|BRPOP)'", text), path.name


def test_bug_28_a_task_without_a_reference_is_collected() -> None:
    """The event loop references tasks weakly, so a task whose result is dropped can disappear while it runs."""
    assert unreferenced_tasks() == []


async def test_bug_27_a_loop_that_loses_cancellations_is_ended() -> None:
    """If a library loses a cancellation, `end_all` repeats it until the loop has ended."""
    lost = 0

    async def loop() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost += 1
                if lost == 3:
                    raise

    task = asyncio.create_task(loop())
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await end_all([task])

    assert (task.cancelled(), lost) == (True, 3)
