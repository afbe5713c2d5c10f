"""The key set that is in force: one task looks at its source, requests only ever see what is there.

A set that is bad or away leaves the last good one in force, for a bounded time: keys are taken out of a set because
they leaked. A token with an unknown key may hasten the next look, but not past `LEAST_GAP_S` since the one before.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from math import inf
from pathlib import Path

import structlog

from gateway.jwks_read import FileReader, KeySetAway, Reader, UrlReader
from gateway.jwt_config import JwtConfig
from gateway.jwt_keys import BadKeySet, KeySet, parse_jwks
from scheduler.backoff import Backoff
from scheduler.fault_log import log_fault

log = structlog.get_logger("gateway")

LEAST_GAP_S = 10.0
FILE_LOOK_S = 2.0
RETRY_S = (0.5, 30.0)
"""The first and the longest ceiling of the pause after a failed look."""


class JwksSource:
    """Follows the key set that `config` names. `clock` is monotonic seconds."""

    def __init__(
        self,
        config: JwtConfig,
        *,
        reader: Reader | None = None,
        clock: Callable[[], float] = time.monotonic,
        least_gap_s: float = LEAST_GAP_S,
        file_look_s: float = FILE_LOOK_S,
    ) -> None:
        self._config = config
        self._reader = reader or _reader(config)
        self._clock = clock
        # A refresh that is shorter than the least gap is what was asked for.
        least_s = min(least_gap_s, config.refresh_s)
        self._pauses_s = (least_s, config.refresh_s) if config.is_url else (file_look_s, file_look_s)
        self._raw: bytes | None = None
        self._keys: KeySet | None = None
        self._confirmed_at = -inf
        self._problem: str | None = f"The JWKS at {config.place} was not read yet."
        self._wanted = asyncio.Event()
        self._backoff = Backoff(*RETRY_S)

    @property
    def keys(self) -> KeySet | None:
        """The last good set; None before the first one, and once its source has been away for too long."""
        return self._keys if self._clock() - self._confirmed_at <= self._config.keep_s else None

    @property
    def problem(self) -> str | None:
        """Why the set may be old or missing, in one sentence for health; None while all is well."""
        return self._problem

    def wanted(self) -> None:
        """Somebody presented a key that is not in the set: look again soon."""
        self._wanted.set()

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await self._pause()

    async def look(self) -> None:
        """Read once and take over what is good. Never raises."""
        self._wanted.clear()  # Before the look, so that a wish during it is heard.
        try:
            self._take(await self._reader.read())
        except (KeySetAway, BadKeySet) as error:
            self._problem = f"The JWKS at {self._config.place} {error}."
        except Exception as error:  # noqa: BLE001 - the loop must outlive what nobody thought of.
            log_fault("the JWKS cannot be followed", error)
            self._problem = f"The JWKS at {self._config.place} cannot be followed: {type(error).__name__}."
        else:
            self._confirmed_at = self._clock()
            self._problem = None
            self._backoff.reset()

    def _take(self, raw: bytes) -> None:
        """Replace the set where it changed, so that verified tokens are not forgotten for nothing. Raises BadKeySet."""
        if raw == self._raw:
            return
        keys = parse_jwks(raw, self._config.algorithms)
        self._raw, self._keys = raw, keys
        log.info("key set for JWTs loaded", place=self._config.place, keys=len(keys), skipped=keys.skipped)

    async def _pause(self) -> None:
        """Wait for the next look; a wish shortens the wait only where the last look was good."""
        if self._problem is not None:
            await self._backoff.sleep()
            return
        least_s, most_s = self._pauses_s
        await asyncio.sleep(least_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s - least_s):
                await self._wanted.wait()


def _reader(config: JwtConfig) -> Reader:
    return UrlReader(config.jwks) if config.is_url else FileReader(Path(config.jwks))
