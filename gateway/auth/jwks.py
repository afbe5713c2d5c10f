"""The JWKS (RFC 7517) of a file or a URL, refreshed by one task. Requests only use the current set.

If the source is unavailable or its set is invalid, the last valid set stays in use for a bounded time only, since keys are
removed from a set when they have leaked. A token with an unknown key can bring the next refresh forward, but not closer
than LEAST_GAP_S to the last one.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf
from pathlib import Path

import structlog

from gateway.auth.jwks_reading import read_file, read_url
from gateway.auth.key_set import KeySet, KeySetError, parse_jwks
from gateway.config import JwtConfig
from scheduler.fault_log import log_fault
from scheduler.redis_client.backoff import Backoff

log = structlog.get_logger("gateway")

LEAST_GAP_S = 10.0
FILE_LOOK_S = 2.0
RETRY_S = (0.5, 30.0)
"""The first and the highest upper bound of the pause after a failed read."""


class JwksSource:
    """Follows the key set in `config`. `clock` is monotonic seconds; `read` returns the bytes or raises KeySetError."""

    def __init__(
        self,
        config: JwtConfig,
        *,
        read: Callable[[], Awaitable[bytes]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        least_gap_s: float = LEAST_GAP_S,
    ) -> None:
        self._config = config
        self._read = read or (
            partial(read_url, config.jwks) if config.is_url else partial(read_file, Path(config.jwks))
        )
        self._clock = clock
        least_s = min(least_gap_s, config.refresh_s)
        self._pauses_s = (least_s, config.refresh_s) if config.is_url else (FILE_LOOK_S, FILE_LOOK_S)
        self._raw: bytes | None = None
        self._keys: KeySet | None = None
        self._confirmed_at = -inf
        self._problem: str | None = f"The JWKS at {config.place} was not read yet."
        self._wanted = asyncio.Event()
        self._backoff = Backoff(*RETRY_S)

    @property
    def keys(self) -> KeySet | None:
        """The last valid set; None before the first read, and when its source was unavailable for `keep_s`."""
        return self._keys if self._clock() - self._confirmed_at <= self._config.keep_s else None

    @property
    def problem(self) -> str | None:
        """Why the set may be outdated or missing, as a sentence for health; None while there is no problem."""
        return self._problem

    def wanted(self) -> None:
        """Request a refresh, because a token has an unknown key."""
        self._wanted.set()

    async def run(self) -> None:
        """Refresh the set forever. A request for a refresh shortens the pause only if the last read succeeded."""
        least_s, most_s = self._pauses_s
        while True:
            await self.refresh()
            if self._problem is not None:
                await self._backoff.sleep()
                continue
            await asyncio.sleep(least_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(most_s - least_s):
                    await self._wanted.wait()

    async def refresh(self) -> None:
        """Read the set once and use it if it is valid. Never raises."""
        self._wanted.clear()  # Before the read, so that a request during the read is not lost.
        try:
            raw = await self._read()
            if raw != self._raw:  # An unchanged set keeps the cache of verified tokens.
                keys = parse_jwks(raw, self._config.algorithms)
                self._raw, self._keys = raw, keys
                log.info("key set for JWTs loaded", place=self._config.place, keys=len(keys), skipped=keys.skipped)
        except KeySetError as error:
            self._problem = f"The JWKS at {self._config.place} {error}."
        except Exception as error:  # noqa: BLE001 - the loop must survive any error
            log_fault("JWKS refresh failed", error)
            self._problem = f"The JWKS at {self._config.place} cannot be refreshed: {type(error).__name__}."
        else:
            self._confirmed_at = self._clock()
            self._problem = None
            self._backoff.reset()
