"""Webhooks: the end of a job is POSTed to its callback URL, signed, at least once.

What is still to be sent is kept in the job's row, so that the next active gateway goes on with it. A URL is checked
against its customer's list of hosts again, since the list may have changed. Only the status of the answer is read;
redirects are not followed.

A URL is parsed by the library that calls it, so that no two readers see two hosts in it. Every address is checked as it
is connected to: otherwise an allowed name that leads to a private address, or changes between check and connection,
would open what is behind this gateway.
"""

import asyncio
import contextlib
import functools
import ipaddress
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import aiohttp
import structlog
from aiohappyeyeballs import AddrInfoType
from yarl import URL

from gateway.config import JobConfig
from gateway.host_lists import CallbackHosts, split_entry
from gateway.http.response import encode_json
from gateway.jobs.results import Told, job_result
from gateway.jobs.signature import customer_key, signed
from ledger.jobs import Callback, CallbackLimits, JobRow, JobSession, due_callbacks, find_jobs, note_told
from ledger.postgres import Connection
from scheduler.errors import TierlaneError
from scheduler.fault_log import log_fault

NAT64 = ipaddress.ip_network("64:ff9b::/96")
# What the standard library takes for public, some of it only in the oldest version that we run with.
NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # Protocols' own; one cloud keeps its instances' credentials at 192.0.0.192.
            "168.63.129.16/32",  # Another cloud's host, which only its own machines can reach.
            "192.88.99.0/24",  # Relays of 6to4, given up by RFC 7526.
            "fec0::/10",  # Site-local, given up by RFC 3879 and still in use.
            "3fff::/20",  # Documentation, RFC 9637.
        ),
    )
)
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
SocketFactory = Callable[[AddrInfoType], socket.socket]


def is_public(text: str) -> bool:
    """Whether an address is one of the internet's: not private, loopback, link-local, multicast or reserved."""
    try:
        address = _inner(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return False
    if address.is_multicast or address.is_reserved or address.is_unspecified or not address.is_global:
        return False
    return not any(address in network for network in NOT_PUBLIC)


def _inner(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for, where it does."""
    if isinstance(address, ipaddress.IPv6Address):
        teredo = address.teredo
        if teredo is not None:
            return teredo[1]
        if address in NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address


def judged_sockets(*, private: bool) -> SocketFactory:
    """Makes the sockets of a connector, each for an address that may be connected to. `private`: for all of them.

    It is the last that is asked before connecting, and is asked of the address itself: whether the URL had a name, an
    address, or a number that some resolver takes for one makes no difference. What it makes raises OSError.
    """

    def make(address: AddrInfoType) -> socket.socket:
        family, kind, proto, _, place = address
        if not private and not is_public(str(place[0])):
            raise OSError(f"{place[0]} is not a public address.")
        return socket.socket(family, kind, proto)

    return make


MAX_CHARACTERS = 2048
_LABEL = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z)(?:{_LABEL}\.)*{_LABEL}")
"""A name that DNS can hold: no %2f that a resolver may take for what it stands for, and no dot at its end."""

_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")
"""What a resolver may take for an IPv4 address, however it is written: 127.1, 2130706433, 0x7f.1, 0177.0.0.1."""


def refused(url: str, hosts: Sequence[str], *, private: bool = False) -> str | None:
    """Why callbacks do not go to `url`, in words for the client; None where they may. `private`: to any address."""
    if not hosts:
        return "Callbacks are not enabled here."
    if len(url) > MAX_CHARACTERS:
        return f"`callback_url` must not be longer than {MAX_CHARACTERS} characters."
    parsed = _parsed(url)
    if parsed is None:
        return "`callback_url` must be an http or https URL in ASCII, without user, password and fragment."
    return _host_refused(parsed, hosts, private=private)


def _host_refused(parsed: URL, hosts: Sequence[str], *, private: bool) -> str | None:
    host = (parsed.raw_host or "").lower()
    if not _is_address(host) and (_NUMBER.fullmatch(host) or not _is_name(parsed, host)):
        return (
            "The host of `callback_url` must be a DNS name without a dot at its end, or an IP address in its usual form, "
            "such as 192.0.2.1 or [2001:db8::1]."
        )
    if not any(_allows(entry, host, parsed) for entry in hosts):
        return "The host of `callback_url` is not one of those that callbacks may go to."
    if _is_address(host) and not private and not is_public(host):
        return "`callback_url` must not lead to an address that is not public."
    return None


def _parsed(url: str) -> URL | None:
    """None for what is no plain URL: nothing in it that one reader could take for something else than another does."""
    if not (url.isascii() and url.isprintable()) or any(character in url for character in ' "#<>\\^`{|}'):
        return None
    try:
        parsed = URL(url)
        plain = parsed.scheme in ("http", "https") and "@" not in parsed.raw_authority and bool(parsed.raw_host)
    except ValueError:
        return None
    return parsed if plain else None


def _is_name(url: URL, host: str) -> bool:
    if _NAME.fullmatch(host) is None:
        return False
    try:
        return bool(url.host)  # Which decodes what is written in Punycode.
    except ValueError:
        return False


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return "%" not in host  # No zone: it means something on one machine alone.


def _allows(entry: str, host: str, url: URL) -> bool:
    name, port = split_entry(entry)
    right_port = url.is_default_port() if port is None else url.port == port
    if name.startswith("*."):
        return right_port and host.endswith(name[1:]) and len(host) > len(name) - 1
    return right_port and host == name


log = structlog.get_logger("gateway")

TIMEOUT_S = 5.0
LOOK_EVERY_S = 1.0
LOOK_PAUSE_S = 0.05  # Between two looks at the least: one sorts whatever is due.
MOST_AT_ONCE = 64
MOST_OF_A_HOST = 8  # So that one that does not answer leaves room for the others.
MOST_OF_A_CUSTOMER = 32  # The same of a customer with many hosts that do not answer.
LOOK_ROWS = 256
DELAYS_S = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 240.0)
GONE = 410
PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
MOST_PAUSED = 1000


def again_s(tries: int, left_s: float, status: int | None) -> float | None:
    """Seconds until the next try after `tries` that failed, the last with `status`; None: give up.

    It ends with the delays, with the result itself, and where the receiver says that it is gone for good.
    """
    if status == GONE or tries > len(DELAYS_S):
        return None
    delay_s = DELAYS_S[tries - 1]
    return delay_s if delay_s < left_s else None


class _Call(NamedTuple):
    host: str
    customer_id: str
    task: asyncio.Task[None]


class PausedHosts:
    """Hosts of customers that did not answer lately: each is called once after a pause that grows, until it answers.

    Else every end that such a host never takes would cost a connection and two statements with each of its tries.
    `clock` is monotonic seconds. Bounded: of more hosts than `MOST_PAUSED` those that failed first are called as any other.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failed: dict[str, tuple[int, float]] = {}  # How often in a row, and when the pause ends.

    def paused(self) -> list[str]:
        """Those that are not to be called now."""
        now = self._clock()
        return [name for name, (_, until) in self._failed.items() if until > now]

    def most(self, name: str) -> int:
        """How many calls to it may be under way."""
        return 1 if name in self._failed else MOST_OF_A_HOST

    def answered(self, name: str) -> None:
        """It answered, whatever the status."""
        self._failed.pop(name, None)

    def failed(self, name: str) -> None:
        """It did not answer. Of calls that were made together only the first counts."""
        times, until = self._failed.pop(name, (0, 0.0))
        if until <= self._clock():
            until = self._clock() + PAUSES_S[min(times, len(PAUSES_S) - 1)]
            times += 1
        self._failed[name] = times, until
        if len(self._failed) > MOST_PAUSED:
            del self._failed[next(iter(self._failed))]


class Callbacks:
    """Tells the ends of one pool's jobs. `wall` is seconds since the epoch."""

    def __init__(
        self, config: JobConfig, pool: str, hosts: CallbackHosts, wall: Callable[[], float] = time.time
    ) -> None:
        self._paused = PausedHosts(time.monotonic)
        self._config = config
        self._hosts = hosts
        self._pool = pool
        self._wall = wall
        self._session = JobSession(config.database_url, "tierlane-jobs-callbacks")
        self._under_way: dict[str, _Call] = {}
        self._due = asyncio.Event()
        self.told = 0
        self.failed = 0

    def look(self) -> None:
        """An end was written: there may be somebody to tell."""
        self._due.set()

    async def run(self) -> None:
        """Tell whatever is due; ends by being cancelled, and what is under way is then told by the next keeper."""
        connector = aiohttp.TCPConnector(
            socket_factory=judged_sockets(private=self._config.private_addresses),
            use_dns_cache=False,
            force_close=True,
            limit=MOST_AT_ONCE,
        )
        client = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        try:
            async with client:
                while True:
                    await self._look(client)
                    await asyncio.sleep(LOOK_PAUSE_S)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_EVERY_S):
                            await self._due.wait()
        finally:
            tasks = [call.task for call in self._under_way.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._session.close()

    async def _look(self, client: aiohttp.ClientSession) -> None:
        self._due.clear()
        if len(self._under_way) >= MOST_AT_ONCE:
            return
        try:
            due = await self._session.run(self._due_now)
        except TierlaneError:
            return
        except Exception as error:  # noqa: BLE001 - no fault may end this loop
            log_fault("looking for callbacks failed", error)
            return
        hosts = Counter(call.host for call in self._under_way.values())
        customers = Counter(call.customer_id for call in self._under_way.values())
        for callback in due:
            host, customer_id = callback.host, callback.customer_id
            most = self._paused.most(_name(callback))
            if hosts[host] >= most or customers[customer_id] >= MOST_OF_A_CUSTOMER:
                continue
            if len(self._under_way) >= MOST_AT_ONCE:
                return
            hosts[host] += 1
            customers[customer_id] += 1
            task = asyncio.create_task(self._tell(client, callback), name="callback")
            self._under_way[callback.id] = _Call(host, customer_id, task)
            task.add_done_callback(functools.partial(self._done, callback.id))

    async def _due_now(self, connection: Connection) -> list[Callback]:
        limits = CallbackLimits(
            LOOK_ROWS, MOST_OF_A_HOST, MOST_OF_A_CUSTOMER, list(self._under_way), self._paused.paused()
        )
        return await due_callbacks(connection, self._pool, limits)

    def _done(self, job_id: str, _: "asyncio.Task[None]") -> None:
        del self._under_way[job_id]
        self._due.set()  # There is room for the next.

    async def _tell(self, client: aiohttp.ClientSession, callback: Callback) -> None:
        try:
            row = (await self._session.run(lambda connection: find_jobs(connection, [callback.id]))).get(callback.id)
            status = await self._post(client, callback, row) if row is not None else GONE
            if status is None:
                self._paused.failed(_name(callback))
            elif row is not None:
                self._paused.answered(_name(callback))
        except TierlaneError:
            return  # It is still due.
        except Exception as error:  # noqa: BLE001 - it is noted as any try that failed, or it would be due again at once
            log_fault("a callback failed", error, id=callback.id)
            status = None
        well = status is not None and 200 <= status < 300
        wait_s = None if well else again_s(callback.tries + 1, callback.left_s, status)
        self.told += well
        self.failed += not well
        if not well:
            log.info("callback_failed", id=callback.id, status=status, again_s=wait_s)
        with contextlib.suppress(TierlaneError):  # Then it is told once more.
            await self._session.run(lambda connection: note_told(connection, callback.id, wait_s))

    async def _post(self, client: aiohttp.ClientSession, callback: Callback, row: JobRow) -> int | None:
        """The status of the answer; None where there was none, or where it may not be called."""
        hosts, private = self._hosts.of(row.customer_id), self._config.private_addresses
        if refused(callback.url, hosts, private=private):
            return None
        result = job_result(row.id, row.status, row.output, row.error_code)
        body = encode_json(Told(callback.id, result.status, result.output, result.error))
        headers = {"Content-Type": "application/json", "User-Agent": "tierlane"}
        headers |= signed(self._keys(row.customer_id), callback.id, int(self._wall()), body)
        try:
            async with client.post(URL(callback.url), data=body, headers=headers, allow_redirects=False) as answer:
                answer.close()  # Unread: only its status says something.
                return answer.status
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return None

    def _keys(self, customer_id: str) -> list[bytes]:
        secret = self._config.callback_secret
        return [customer_key(secret, customer_id), *([secret] if self._config.shared_signature else [])]


def _name(callback: Callback) -> str:
    """Of the customer's host: another customer may reach it."""
    return f"{callback.customer_id} {callback.host}"
