"""The limit on requests that run no model: token counts, lists of models, and all that reads or changes stored responses, jobs,
files and batches.

They join no queue, so admission does not count them. Each gateway counts its own requests, without a call to Redis, against
its part of the limit: all live gateways have equal parts. No GPU is needed, so the limit is not reduced with the capacity.
"""

import math
import time
from collections.abc import Callable

from gateway.http.errors import RejectionError
from gateway.http.response import Headers
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Identity
from ratelimit.headers import with_empty_bucket
from ratelimit.limits import auxiliary_limits
from ratelimit.token_bucket import DAY_MS, LocalBucket
from scheduler.bounded_dict import BoundedDict
from scheduler.errors import ErrorCode

MAX_BUCKETS = 10_000
"""Customers, and keys with a limit of their own. The least recently used bucket is dropped, and is full at its next use."""


class AuxiliaryLimitReached(RejectionError):
    """The rejection of a known caller."""

    def __init__(self, identity: Identity, message: str, retry_after_ms: int, policy: str, headers: Headers) -> None:
        super().__init__(ErrorCode.RATE_LIMIT_EXCEEDED, message, retry_after_ms, (policy,), headers)
        self.identity = identity


class AuxiliaryLimits:
    """The limits of all customers at this gateway. `clock`: monotonic seconds.

    `gateways`: the number of live gateways; `headers`: the rate limit headers of a caller; `rejected`: is called with the tier
    of each rejected request.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        gateways: Callable[[], int],
        headers: Callable[[Identity], Headers],
        rejected: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        max_buckets: int = MAX_BUCKETS,
    ) -> None:
        self._catalog = catalog
        self._gateways = gateways
        self._headers = headers
        self._rejected = rejected
        self._clock = clock
        self._buckets: BoundedDict[str, LocalBucket] = BoundedDict(max_buckets)  # The least recently used one first.

    def __len__(self) -> int:
        return len(self._buckets)

    def charge(self, identity: Identity) -> None:
        """Count one request, unless the tier is in shadow. Raises AuxiliaryLimitReached, and then counts nothing."""
        tiers = self._catalog.snapshot.tiers if self._catalog.snapshot is not None else ()
        tier = next((row for row in tiers if row.name == identity.tier), None)
        if tier is None or tier.shadow:
            return
        now, gateways = self._clock(), max(1, self._gateways())
        names = identity.customer_id, f"key {identity.key_id}"
        found: list[LocalBucket] = []
        limits = auxiliary_limits(identity, tier.auxiliary_rate, tier.auxiliary_burst)
        for name, limit in zip(names, limits, strict=False):
            part = limit._replace(rate=limit.rate / gateways, size=max(1.0, limit.size / gateways))
            bucket = self._buckets.get(name)
            if bucket is None:
                bucket = self._buckets[name] = LocalBucket(part.size, now)
            else:
                self._buckets.move_to_end(name)
            if not bucket.has(1, part, now):
                self._rejected(identity.tier)
                owner, level = "API key" if found else "account", bucket.level
                message = f"The rate limit of this {owner} for requests that run no model, {limit.words}, is reached."
                retry_ms, full_ms = (
                    min(DAY_MS, math.ceil((wanted - level) / part.per_s * 1000)) for wanted in (1, part.size)
                )
                headers = with_empty_bucket(self._headers(identity), limit, full_ms)
                raise AuxiliaryLimitReached(identity, message, retry_ms, limit.kind.name, headers)
            found.append(bucket)
        for bucket in found:
            bucket.level -= 1
