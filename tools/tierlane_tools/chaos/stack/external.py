"""An external stack, described by its stack file: faults of processes and servers, without proxies.

The file is read again for each fault, because processes restart. The load uses the customers of the file, one a tier.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp
import asyncpg
import msgspec
import psutil

from ledger.postgres import asyncpg_dsn, closing
from tierlane_local.child_process import family
from tierlane_local.stack_file import StackInfo
from tierlane_tools.chaos.faults.fault_kind import FaultTarget
from tierlane_tools.chaos.faults.target import StackTargets
from tierlane_tools.chaos.history import LoadCustomer, Sources, Target
from tierlane_tools.chaos.options import TOOL, ChaosUsageError

PATIENCE_S = 5.0
PROBE = "tierlane chaos"
ADDRESSES = ("http_url", "redis_url", "database_url", "service_token")  # Of the stack file.
SERVERS = (FaultTarget.REDIS, FaultTarget.POSTGRES)
FIND_CUSTOMER = """
SELECT c.id::text AS id, c.name, c.tier FROM api_keys AS k JOIN customers AS c ON c.id = k.customer_id WHERE k.id = $1
"""


def _read_stack(path: Path) -> StackInfo:
    """Read the file, which needs all addresses. Raises ChaosUsageError."""
    option = TOOL.both_names("against")
    try:
        stack = msgspec.json.decode(path.read_bytes(), type=StackInfo)
        if missing := [name for name in ADDRESSES if not getattr(stack, name)]:
            raise msgspec.ValidationError(f"Object missing required field `{missing[0]}`")
    except OSError as error:
        raise ChaosUsageError(f"{option}: cannot read {path}: {error.strerror}; is the stack up?") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ChaosUsageError(f"{option}: {path} is not a stack file: {error}.") from None
    return stack


class ExternalStack(StackTargets):
    """The targets of faults in an external stack."""

    def __init__(self, path: Path) -> None:
        """Raises ChaosUsageError."""
        self._path = path
        self._info = _read_stack(path)
        self._names = {
            place: [process.name for process in self._info.processes if process.role == place] for place in FaultTarget
        }

    @property
    def counts(self) -> Mapping[FaultTarget, int]:
        """The number of targets of each place."""
        return {place: 1 if place in SERVERS else len(names) for place, names in self._names.items()}

    @property
    def redis_url(self) -> str:
        """Redis."""
        return self._info.redis_url

    @property
    def database_url(self) -> str:
        """PostgreSQL."""
        return self._info.database_url

    def name(self, place: FaultTarget, index: int) -> str:
        """The name of a target in events."""
        return str(place) if place in SERVERS else self._names[place][index]

    def processes(self, place: FaultTarget, index: int) -> Sequence[psutil.Process]:
        """The running processes of a target, a server with all its children."""
        name = self.name(place, index)
        pids = [one.pid for one in _read_stack(self._path).processes if one.role == place and one.name == name]
        processes = [process for pid in pids for process in family(pid)]
        return processes if place in SERVERS else processes[:1]

    async def target(self) -> Target:
        """The target of the load. Raises ChaosUsageError where the stack cannot be used."""
        url = self._info.http_url
        # Crosstalk is detected in outputs, so they must be the inputs reversed.
        key = next(iter(self._info.keys.values()), "")
        option = TOOL.both_names("against")
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        headers = {"Authorization": f"Bearer {key}"}
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.post(f"{url}/v1/inference", json={"input": PROBE}) as response,
            ):
                body = await response.json(content_type=None)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ChaosUsageError(f"{option}: {url} is not responding: {type(error).__name__}.") from None
        if not isinstance(body, dict) or body.get("output") != PROBE[::-1]:
            raise ChaosUsageError(
                f"{option}: the stack must run the backend `simulated`, whose outputs are its inputs reversed."
            )
        async with closing(
            await asyncpg.connect(asyncpg_dsn(self._info.database_url), timeout=PATIENCE_S)
        ) as connection:
            found = []
            for key in self._info.keys.values():
                row = await connection.fetchrow(FIND_CUSTOMER, key.split("_")[1])
                if row is not None:
                    found.append(LoadCustomer(tier=row["tier"], id=row["id"], name=row["name"], key=key))
        return Target((url,), tuple(found))

    def sources(self, started_at: float) -> Sources:
        """The sources of evidence; the backend writes no log."""
        info = self._info
        return Sources(info.database_url, info.redis_url, None, started_at)
