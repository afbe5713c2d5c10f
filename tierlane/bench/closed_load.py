"""Closed loop: so many users, each of whom sends the next request when the last one is answered.

It finds how much a system can do, since it never asks for more. Its latencies flatter a system that stalls: then nobody
asks. For latencies at a given load take the open loop.
"""

import asyncio
from collections.abc import Sequence
from random import Random

from tierlane.bench.connection import Pending
from tierlane.bench.http_client import RequestForm
from tierlane.bench.inputs import Inputs
from tierlane.bench.load import Load, Phase
from tierlane.bench.mix import Mix, tier_at
from tierlane.bench.output_check import OutputCheck

AFTER_SILENCE_S = 0.1
"""How long a user waits who got no answer: a server that is away must not make the generator spin."""


class ClosedLoad(Load):
    """So many users, until the last phase is over; then what is under way ends."""

    def __init__(
        self,
        users: int,
        mix: Mix,
        seed: int,
        *,
        phases: Sequence[Phase],
        forms: Sequence[Sequence[RequestForm]],
        inputs: Inputs,
        check: OutputCheck,
    ) -> None:
        """As Load; each request has a tier of its own, drawn from the mix."""
        super().__init__(phases, forms, inputs, check)
        self._users = users
        self._bounds = mix.cumulative()
        self._point = Random(f"{seed}/tiers").random
        self._until_s = self._phases[-1].until_s
        self._over = False

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self._until_s, self._end)
        for _ in range(self._users):
            self._send()

    def _end(self) -> None:
        self._give_up()
        if self._settled == self._number:
            self._done.set()

    def _give_up(self) -> None:
        self._over = True

    def _exhausted(self) -> bool:
        return self._over

    def _following(self) -> Pending | None:
        now_s = self.elapsed_s()
        if self._over or now_s >= self._until_s:
            return None
        return self._made(now_s, tier_at(self._bounds, self._point()))

    def _failed(self) -> None:
        if not self._over:
            asyncio.get_running_loop().call_later(AFTER_SILENCE_S, self._send)

    def _send(self) -> None:
        following = self._following()
        if following is not None:
            self.pool.submit(following)
