"""A customer that attacks with its key, in its own process: `python worst_customer.py '<JSON of Orders>'`.

It starts requests at a steady rate, of each kind in turn, until its stdin closes; then it waits until the gateway has
ended all connections, and writes a `Report` as JSON to stdout.
"""

import asyncio
import contextlib
import json
import os
import random
import secrets
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from hostile_connections import LARGEST, Line, a_byte_short, chunks_without_end, half_closed_body, reset

PATIENCE_S = 25.0  # A connection that the gateway has not ended by then has no deadline.
MOST_OPEN = 1000
LARGE = 131_000  # Just below the largest input; a string in the parameters fills the body.
FILLER = {"parameters": {"note": "x" * (LARGEST - 1024 - LARGE)}}
STREAM_S = 0.12  # About the time at which a stream begins.
HANGING_HOSTS = 9  # With 8 callbacks at a time each: more than the 64 that a gateway has open.


@dataclass
class Orders:
    """The gateway, the rate (requests/s), and the local ports that hang on a callback or refuse it."""

    host: str
    port: int
    key: str
    rate: float
    hanging: int
    refusing: int

    @property
    def callback_hosts(self) -> str:
        """The callback hosts of the customer."""
        hanging = [f"127.0.0.{n + 1}:{self.hanging}" for n in range(HANGING_HOSTS)]
        return ", ".join([*hanging, f"127.0.0.1:{self.refusing}"])


class AcceptedRequest(NamedTuple):
    """An accepted request: its time (monotonic seconds), the bytes of its input, and whether it has an Idempotency-Key."""

    at_s: float
    size: int
    keyed: bool


@dataclass
class Report:
    """`answers`: counts by kind and status, -1 without a response and -2 where the client disconnected; `held`: connections
    that the gateway did not end in time; `late_s`: the largest delay of the attack behind its rate.
    """

    answers: dict[str, int] = field(default_factory=Counter)
    accepted: list[AcceptedRequest] = field(default_factory=list)
    held: int = 0
    late_s: float = 0.0


class Attack(NamedTuple):
    """One request: its kind, path, body, further header lines, and whether the client disconnects."""

    kind: str
    path: str
    body: dict[str, Any]
    lines: tuple[bytes, ...] = ()
    disconnects: bool = False


HALF_SENT = (a_byte_short, half_closed_body, chunks_without_end, reset)
KINDS = (
    "new key",
    "large body",
    "abandoned stream",
    "job, callback hangs",
    "half-sent body",
    "new key, large body",
    "job, callback refused",
    "abandoned stream",
    "job, invalid callback",
    "job, new key, large body",
)


def attack_of(kind: str, orders: Orders) -> Attack:
    """A request of this kind with an input of its own."""
    text = secrets.token_hex(50)
    if kind == "abandoned stream":
        return Attack(kind, "/v1/completions", {"prompt": text, "stream": True}, disconnects=True)
    body: dict[str, Any] = (
        {"input": text + "x" * (LARGE - len(text))} | FILLER if "large body" in kind else {"input": text}
    )
    urls = {
        "job, callback hangs": f"http://127.0.0.{random.randint(1, HANGING_HOSTS)}:{orders.hanging}/{text}",
        "job, callback refused": f"http://127.0.0.1:{orders.refusing}/{text}",
        "job, invalid callback": invalid_url(orders.hanging),
    }
    if kind in urls:
        body["callback_url"] = urls[kind]
    lines = [b"Idempotency-Key: " + secrets.token_hex(16).encode()] if "new key" in kind else []
    lines += [b"Prefer: respond-async"] if kind.startswith("job") else []
    return Attack(kind, "/v1/inference", body, tuple(lines))


def invalid_url(port: int) -> str:
    """A callback URL that must be rejected, although many parsers read it as the local host."""
    hosts = (
        "127.1",
        "2130706433",
        "0x7f.1",
        "127.0.0.1.",
        "user:pw@127.0.0.1",
        "127.0.0.1%2f",
        "[::ffff:127.0.0.1]",
        "xn--",
    )
    return random.choice(
        [f"http://{host}:{port}/" for host in hosts] + ["http://" + "a" * 10_000, "file:///etc/passwd", "\x00"]
    )


class WorstCustomer:
    """Attacks until `stop` is set; the report is complete when `run` returns."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._open: set[asyncio.Task[None]] = set()
        self.report = Report()
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Attack until stopped; returns when every connection has ended or was held for too long."""
        began = time.monotonic()
        for number in count():
            due_s = began + number / self._orders.rate - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due_s)):
                    await self.stop.wait()
            if self.stop.is_set():
                break
            self.report.late_s = max(self.report.late_s, -due_s)
            self._begin(KINDS[number % len(KINDS)], number)
        await asyncio.gather(*self._open)

    def _begin(self, kind: str, number: int) -> None:
        if len(self._open) >= MOST_OPEN:
            self.report.answers[f"{kind}: not sent"] += 1
            return
        task = asyncio.create_task(self._connection(kind, number))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _connection(self, kind: str, number: int) -> None:
        status = -1
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await asyncio.open_connection(self._orders.host, self._orders.port)
                try:
                    line = Line(reader, writer, self._orders.key)
                    half = HALF_SENT[number // len(KINDS) % len(HALF_SENT)]
                    status = await (half_sent(line, half) if kind == "half-sent body" else self._request(kind, line))
                finally:
                    writer.close()
        except TimeoutError:
            self.report.held += 1
        except OSError:
            pass
        self.report.answers[f"{kind}: {status}"] += 1

    async def _request(self, kind: str, line: Line) -> int:
        attack, at_s = attack_of(kind, self._orders), time.monotonic()
        body = json.dumps(attack.body).encode()
        head = line.head(b"Connection: close", b"Content-Type: application/json", *attack.lines, length=len(body))
        await line.send(head.replace(b"/v1/inference", attack.path.encode(), 1) + body)
        status = -2
        if attack.disconnects:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.uniform(0, STREAM_S)):
                    await line.reader.read(1)
        else:
            status = status_of(await line.reader.read())
        if status in (-2, 200, 202):
            keyed = any(each.startswith(b"Idempotency-Key") for each in attack.lines)
            self.report.accepted.append(AcceptedRequest(at_s, len(next(iter(attack.body.values()))), keyed))
        return status


async def half_sent(line: Line, half: Any) -> int:
    """Send an incomplete body; returns the status of the response before the gateway closes the connection."""
    await half(line)
    return status_of(await line.reader.read())


def status_of(answer: bytes) -> int:
    """The status of the first response, -1 without one."""
    words = answer[:16].split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else -1


async def main() -> None:
    os.nice(5)  # The attack itself must not take CPU from the stack.
    customer = WorstCustomer(Orders(**json.loads(sys.argv[1])))
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, lambda: (loop.remove_reader(sys.stdin), customer.stop.set()))
    await customer.run()
    json.dump(vars(customer.report), sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
