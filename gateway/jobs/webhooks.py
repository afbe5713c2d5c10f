"""Webhooks: the end of a job is POSTed to its callback URL, signed, at least once.

What is to be sent is stored in the job's row, so that the next active gateway continues. A URL is checked against the
customer's list of hosts again before each attempt, since the list may have changed. Only the status of the response is
read, and redirects are not followed. Each address is checked when it is connected to; otherwise an allowed name that
resolves to a private address, or to another one after the check, would give access to the network behind the gateway.
"""

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import aiohttp
import structlog
from yarl import URL

from gateway.config import JobConfig
from gateway.host_lists import CallbackHosts
from gateway.http.response import encode_json
from gateway.jobs.callback_url import url_problem
from gateway.jobs.documents import CallbackBody, job_result
from gateway.jobs.paused_hosts import MAX_CALLS_PER_HOST, PausedHosts
from gateway.jobs.webhook_security import checked_sockets, customer_key, signed
from ledger.jobs import Callback, JobRow, JobSession, due_callbacks, find_jobs, record_callback_attempt
from scheduler.errors import TierlaneError
from scheduler.fault_log import LoggedFaults, log_fault

log = structlog.get_logger("gateway")

TIMEOUT_S = 5.0
POLL_S = 1.0
MIN_POLL_S = 0.05  # Each query sorts all due callbacks.
MAX_CALLS = 64
MAX_CALLS_PER_CUSTOMER = 32  # So that a customer with many hosts that do not respond does not block the others.
QUERY_ROWS = 256
DELAYS_S = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 240.0)
GONE = 410


def retry_after_s(tries: int, left_s: float, status: int | None) -> float | None:
    """Seconds until the next attempt after `tries` failed ones, the last with `status`; None: no further attempt.

    There is none after the last delay, after the result has expired, and after 410 Gone.
    """
    if status == GONE or tries > len(DELAYS_S):
        return None
    delay_s = DELAYS_S[tries - 1]
    return delay_s if delay_s < left_s else None


def webhook_client(*, private: bool) -> aiohttp.ClientSession:
    """A client that connects to public addresses only, unless `private`."""
    connector = aiohttp.TCPConnector(
        socket_factory=checked_sockets(private=private), use_dns_cache=False, force_close=True, limit=MAX_CALLS
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


async def post_signed(
    client: aiohttp.ClientSession, url: str, keys: Sequence[bytes], message_id: str, body: bytes, *, at_s: int
) -> int | None:
    """POST a signed message. Returns the status of the response, None if there is none. `at_s`: seconds since the epoch."""
    headers = {"Content-Type": "application/json", "User-Agent": "tierlane"}
    headers |= signed(keys, message_id, at_s, body)
    try:
        async with client.post(URL(url), data=body, headers=headers, allow_redirects=False) as response:
            response.close()  # Without reading the body.
            return response.status
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None


class _Call(NamedTuple):
    host: str
    customer_id: str
    task: asyncio.Task[None]


class Callbacks:
    """Sends the callbacks of one pool. `wall` is seconds since the epoch."""

    def __init__(
        self, config: JobConfig, pool: str, hosts: CallbackHosts, wall: Callable[[], float] = time.time
    ) -> None:
        self._paused = PausedHosts(time.monotonic)
        self._config = config
        self._hosts = hosts
        self._pool = pool
        self._wall = wall
        self._session = JobSession(config.database_url, "tierlane-jobs-callbacks")
        self._calls: dict[str, _Call] = {}
        self._due = asyncio.Event()

    def wake(self) -> None:
        """Check for due callbacks: a job has ended."""
        self._due.set()

    async def run(self) -> None:
        """Send due callbacks until cancelled. The next active gateway repeats the calls that are cancelled with it."""
        client = webhook_client(private=self._config.private_addresses)
        try:
            async with client:
                while True:
                    await self._start_due(client)
                    await asyncio.sleep(MIN_POLL_S)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(POLL_S):
                            await self._due.wait()
        finally:
            tasks = [call.task for call in self._calls.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._session.close()

    async def _start_due(self, client: aiohttp.ClientSession) -> None:
        """Start calls up to the limits."""
        self._due.clear()
        if len(self._calls) >= MAX_CALLS:
            return
        due: Sequence[Callback] = ()
        with LoggedFaults("reading due callbacks failed"), contextlib.suppress(TierlaneError):
            due = await self._session.run(
                lambda connection: due_callbacks(
                    connection,
                    self._pool,
                    limit=QUERY_ROWS,
                    per_host=MAX_CALLS_PER_HOST,
                    per_customer=MAX_CALLS_PER_CUSTOMER,
                    calling=list(self._calls),
                    paused=self._paused.paused(),
                )
            )
        hosts = Counter(call.host for call in self._calls.values())
        customers = Counter(call.customer_id for call in self._calls.values())
        for callback in due:
            host, customer_id = callback.host, callback.customer_id
            if hosts[host] >= self._paused.max_calls(_host_of(callback)):
                continue
            if customers[customer_id] >= MAX_CALLS_PER_CUSTOMER:
                continue
            if len(self._calls) >= MAX_CALLS:
                return
            hosts[host] += 1
            customers[customer_id] += 1
            task = asyncio.create_task(self._call(client, callback), name="callback")
            self._calls[callback.id] = _Call(host, customer_id, task)
            task.add_done_callback(functools.partial(self._done, callback.id))

    def _done(self, job_id: str, _: "asyncio.Task[None]") -> None:
        del self._calls[job_id]
        self._due.set()  # Another call can start.

    async def _call(self, client: aiohttp.ClientSession, callback: Callback) -> None:
        """Send one callback and record the attempt."""
        try:
            row = (await self._session.run(lambda connection: find_jobs(connection, [callback.id]))).get(callback.id)
            status = await self._post(client, callback, row) if row is not None else GONE
            if status is None:
                self._paused.failed(_host_of(callback))
            elif row is not None:
                self._paused.responded(_host_of(callback))
        except TierlaneError:
            return  # It is still due.
        except Exception as error:  # noqa: BLE001 - recorded as a failed attempt, or it would be due again at once
            log_fault("a callback failed", error, id=callback.id)
            status = None
        delivered = status is not None and 200 <= status < 300
        wait_s = None if delivered else retry_after_s(callback.tries + 1, callback.left_s, status)
        if not delivered:
            log.info("callback_failed", id=callback.id, status=status, again_s=wait_s)
        with contextlib.suppress(TierlaneError):  # Then it is sent once more.
            await self._session.run(
                lambda connection: record_callback_attempt(connection, callback.id, wait_s, status or 0)
            )

    async def _post(self, client: aiohttp.ClientSession, callback: Callback, row: JobRow) -> int | None:
        """The status of the response; None if there is none, or the URL is not allowed any more."""
        config = self._config
        if url_problem(callback.url, self._hosts.of(row.customer_id), private=config.private_addresses):
            return None
        result = job_result(row)
        body = encode_json(CallbackBody(callback.id, result.status, result.output, result.error, result.metadata))
        keys = [customer_key(config.callback_secret, row.customer_id, number) for number in callback.secrets]
        if config.shared_signature:
            keys.append(config.callback_secret)
        return await post_signed(client, callback.url, keys, callback.id, body, at_s=int(self._wall()))


def _host_of(callback: Callback) -> str:
    """The customer's host, as `paused` in `due_callbacks`: another customer may reach it."""
    return f"{callback.customer_id} {callback.host}"
