"""Bugs that a single line brings back: nowhere in the product does such a line stand."""

import ast
import asyncio
import re
from collections.abc import Callable
from functools import partial

import pytest

from regressions import lint
from regressions.lint import ROOT, Rule, found, sources
from scheduler.tasks import end_all

WALL_CLOCK = {
    "gateway/http/response.py": "the Date header",
    "gateway/inference/pipeline.py": "whether a key has expired, which its owner wrote as a date",
    "gateway/operations/health_collector.py": "what a person is shown: the time of the look, and the age of the audit",
    "gpu_pool/backends/openai_endpoint/requests.py": "a Retry-After that is a date, as the endpoint wrote it; what it asks for is bounded",
    "tierlane/check/system.py": "the clocks of Redis and PostgreSQL beside ours, whose difference is what is asked",
    "tierlane/roles/tracing.py": "when a span began, for people; laid behind this process's own monotonic times",
    "tierlane/bench/runner.py": "when a measurement began, for its report",
}


def broken(rule: Rule) -> list[str]:
    """Where the product breaks the rule."""
    return [f"{name}:{line}" for name, tree in sources() for line in found(tree, rule)]


def test_bug_07_nothing_is_pushed_outside_of_a_script() -> None:
    """A push by hand is sent twice, or not at all, when its reply is lost; here only scripts that may be repeated push."""
    assert broken(lint.moves_by_hand) == []


def test_bug_09_nothing_is_moved_in_two_steps() -> None:
    """What is taken by one command and put back by another is lost in between; scripts alone take what they keep."""
    assert broken(lint.moves_by_hand) == []
    texts = {path.name: path.read_text("utf-8") for path in (ROOT / "scheduler" / "lua").rglob("*.lua")}
    assert [name for name, text in texts.items() if "'BLPOP'" in text or "'BRPOP'" in text] == []


def test_bug_11_nobody_walks_the_keyspace_or_a_long_list() -> None:
    """KEYS, SCAN and LREM cost what everybody has stored; only an operator who settles dead letters walks their list, and only
    who builds a lost index again looks for all rows, a piece at a time.
    """
    assert {place.partition(":")[0] for place in broken(lint.walks_the_keyspace)} <= {
        "scheduler/protocol/index_repair.py"
    }
    assert {place.partition(":")[0] for place in broken(lint.removes_by_value)} <= {
        "scheduler/protocol/cancellation.py"
    }
    for path in ROOT.glob("*/lua/**/*.lua"):
        assert not re.search(r"'(KEYS|SCAN|FLUSHALL|FLUSHDB)'", path.read_text("utf-8")), path.name


def test_bug_16_two_wall_clocks_never_meet() -> None:
    """Ages across hosts go wrong with a clock; the wall clock is read only where it is shown, or compared with a date."""
    places = {place.partition(":")[0] for place in broken(lint.tells_the_time)}
    assert places <= set(WALL_CLOCK)


def test_bug_27_wait_for_swallows_a_cancel() -> None:
    """A cancel that came as the wait ended was lost (CPython #86296); here `asyncio.timeout` bounds every wait."""
    assert broken(lint.waits_for) == []


async def test_bug_27_a_loop_that_loses_a_cancel_is_ended_all_the_same() -> None:
    """Where a library loses one, the role still stops: it cancels until its loops have ended."""
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


def test_bug_28_a_task_that_nobody_holds_is_collected() -> None:
    """The event loop holds tasks weakly: one whose result is dropped can vanish in the middle; here each one is kept."""
    assert [f"{name}:{line}" for name, tree in sources() for line in lint.forgets_a_task(tree)] == []


def test_bug_29_shielded_work_is_lost_at_shutdown() -> None:
    """Shielded work goes on unseen and dies with the loop; here what must end is held and waited for."""
    assert broken(lint.shields) == []


def test_bytes_from_outside_never_become_code() -> None:
    """Pickle over Redis is remote code execution (CVE-2025-61765 and others); here nothing that could unpickle is there."""
    assert broken(lint.unpickles) == []


BAD_NODES: list[tuple[Rule, str]] = [
    (lint.moves_by_hand, "async def f(c):\n    await c.lpush('queue:free', 'id')"),
    (lint.moves_by_hand, "async def f(self):\n    await self._client.rpop('queue:free')"),
    (lint.walks_the_keyspace, "async def f(c):\n    return await c.keys('request:*')"),
    (lint.walks_the_keyspace, "def f(c):\n    return [k for k in c.scan_iter('x*')]"),
    (lint.removes_by_value, "async def f(c):\n    await c.lrem('queue:free', 1, 'id')"),
    (lint.shields, "import asyncio\nasync def f(w):\n    await asyncio.shield(w())"),
    (lint.tells_the_time, "import time\ndef age(at):\n    return time.time() - at"),
    (lint.waits_for, "import asyncio\nasync def f(a):\n    await asyncio.wait_for(a, 1)"),
    (lint.waits_for, "from asyncio import wait_for"),
    (lint.shields, "import asyncio\nasync def f(a):\n    await asyncio.shield(a)"),
    (lint.unpickles, "import pickle"),
    (lint.unpickles, "from yaml import load"),
    (lint.unpickles, "def f(path):\n    return torch.load(path)"),
]
BAD_LINES: list[tuple[Callable[[ast.Module], list[int]], str]] = [
    *((partial(found, rule=rule), text) for rule, text in BAD_NODES),
    (lint.forgets_a_task, "async def f(a):\n    asyncio.create_task(a)"),
    (lint.forgets_a_task, "async def f(self, a):\n    self._loop.create_task(a)"),
    (lint.forgets_a_task, "async def f(a):\n    task = asyncio.ensure_future(a)"),
]


@pytest.mark.parametrize(("rule", "text"), BAD_LINES, ids=[text.splitlines()[-1].strip() for _, text in BAD_LINES])
def test_the_rules_find_what_they_forbid(rule: Callable[[ast.Module], list[int]], text: str) -> None:
    """A rule that finds nothing in a line that is wrong would prove nothing of the product."""
    assert rule(ast.parse(text))


def test_the_rules_let_good_lines_pass() -> None:
    """Mappings have keys, and task groups hold their tasks."""
    good = "async def f(d, a):\n    async with asyncio.TaskGroup() as group:\n        group.create_task(a)\n    return d.keys()"
    tree = ast.parse(good)
    assert lint.forgets_a_task(tree) == found(tree, lint.walks_the_keyspace) == []


def test_every_bug_of_the_list_has_its_test_or_its_reason() -> None:
    """Fifty bugs that others had: each is tested here under its number, or the README says why not."""
    folder = ROOT / "tests" / "regressions"
    tested = {
        int(n) for path in folder.glob("test_*.py") for n in re.findall(r"def test_bug_(\d\d)_", path.read_text())
    }
    explained = {int(n) for n in re.findall(r"^\| (\d\d) \|", (folder / "README.md").read_text("utf-8"), re.MULTILINE)}

    assert tested | explained == set(range(1, 51))
    assert not tested & explained
