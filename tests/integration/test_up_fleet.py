"""`tierlane up --autoscale` obeys its gateway: workers come and go, stack.json stays true, nobody who left comes back."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from eventually import eventually
from up_harness import RunningUp, working_in


class Scaled:
    """A stack whose gateway advises what a file says."""

    def __init__(self, home: Path, *flags: str) -> None:
        self._advice = home / "advice.json"
        self.advise(healthy=1, recommended=1)
        self.up = RunningUp(home / "data", 0, *flags, env={"STAND_IN_ADVICE": str(self._advice)})

    def advise(self, *, healthy: int, recommended: int) -> None:
        row = {"current_workers": healthy, "recommended_workers": recommended, "reason": "the test wants it"}
        self.say(json.dumps({"pools": {"default": row}}))

    def say(self, text: str) -> None:
        fresh = self._advice.with_suffix(".new")
        fresh.write_text(text)
        fresh.rename(self._advice)

    def asked(self) -> int:
        return self.up.text.count("was asked for advice")

    def workers(self) -> list[str]:
        return sorted(name for name in self.up.pids() if name.startswith("worker-") and "model" not in name)

    async def become(self, *names: str) -> None:
        await eventually(lambda: self.workers() == list(names), f"the workers {names}")


@pytest.fixture
async def scaled(tmp_path: Path) -> AsyncIterator[Scaled]:
    """A ready stack with one worker, that may have three."""
    stack = Scaled(tmp_path, "workers=1", "autoscale=1:3")
    await stack.up.ready()
    yield stack
    if stack.up.process.poll() is None:
        stack.up.process.kill()
    stack.up.process.wait()
    await eventually(lambda: not working_in(tmp_path), "the end of every server", 3.0)


async def test_workers_come_and_go_as_advised(scaled: Scaled) -> None:
    """Two more are started; then the newest leave, are not started again, and their names are free."""
    await scaled.become("worker-1")
    before = scaled.up.pids()["worker-1"]
    scaled.advise(healthy=1, recommended=3)
    await scaled.become("worker-1", "worker-2", "worker-3")

    scaled.advise(healthy=3, recommended=1)
    await scaled.become("worker-1")
    scaled.advise(healthy=1, recommended=2)
    await scaled.become("worker-1", "worker-2")

    assert scaled.up.pids()["worker-1"] == before
    assert "starting it again" not in scaled.up.text
    assert "1 workers become 3: the test wants it" in scaled.up.text
    assert await scaled.up.interrupt(within_s=5.0) == 0


@pytest.mark.parametrize("text", ["no json", "{}", '{"pools": {"default": {"current_workers": null}}}', "[]"])
async def test_a_gateway_that_says_nothing_useful_changes_nothing(scaled: Scaled, text: str) -> None:
    """No such pool, no number, no JSON: the workers stay, and the next good answer is obeyed."""
    await scaled.become("worker-1")
    scaled.say(text)
    before = scaled.asked()
    await eventually(lambda: scaled.asked() >= before + 2, "two more questions")
    assert scaled.workers() == ["worker-1"]

    scaled.advise(healthy=1, recommended=2)

    await scaled.become("worker-1", "worker-2")


async def test_the_start_is_within_the_bounds(tmp_path: Path) -> None:
    """`--workers` says with how many it begins, and is held at the least."""
    stack = Scaled(tmp_path, "workers=1", "autoscale=2:3")
    try:
        await stack.up.ready()

        assert stack.workers() == ["worker-1", "worker-2"]
    finally:
        assert await stack.up.interrupt() == 0
