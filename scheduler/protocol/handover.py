"""`limits_leave` and `limits_arrive`: the limits of a customer move with it from one cell to another.

Each cell marks the customers that left it and those that arrived, with the version of the catalog that decided it. `admit`
checks the mark, so that no gateway can admit a customer in two cells, however old its catalog is.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from redis.asyncio import Redis

from ratelimit.limits import Bucket, EffectiveLimits, packed_limits
from scheduler.protocol.admission import KINDS
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script

MAX_CUSTOMERS = 64
"""Per call, so that it does not block Redis."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_number = msgspec.msgpack.Decoder(int).decode
_flag = msgspec.msgpack.Decoder(bool).decode
_flags = msgspec.msgpack.Decoder(list[bool]).decode
_KNOWN = 7  # The position in a reply.


class Wanted(NamedTuple):
    """What is wanted of a customer, beside its own limits: those of keys, by their ids, and its Idempotency-Keys."""

    keys: Sequence[str] = ()
    idempotency: Sequence[str] = ()


class Left(NamedTuple):
    """What is left of a customer's limits in the cell that it leaves.

    `newer`: the version of a newer catalog, by which the customer does not leave it for the cell of the caller; 0: none.
    `is_home`: by that catalog, this cell is its home.
    `known`: those of its Idempotency-Keys that have a request or a stored reply in this cell.
    """

    newer: int
    state: msgspec.Raw
    known: frozenset[str] = frozenset()
    is_home: bool = False


class ArrivingLimits(NamedTuple):
    """A customer that arrives: its limits, the limits of its keys that have their own, and what other cells had left of them.

    `keys` in the order in which the other cells were asked. `is_empty`: a cell that may have had them does not respond, so
    that buckets start empty.
    """

    customer_id: str
    limits: EffectiveLimits
    keys: Mapping[str, Bucket]
    states: Mapping[str, Left]  # By cell.
    is_empty: bool = False


def _limits_leave(version: int, packed_customers: bytes) -> None: ...
def _limits_arrive(version: int, packed_arrivals: bytes, packed_kinds: bytes) -> None: ...


class LimitsHandover:
    """The scripts of one cell. Both methods may be repeated, and raise RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._leave = Script("limits_leave", _limits_leave, client, keys)
        self._arrive = Script("limits_arrive", _limits_arrive, client, keys)

    async def leave(self, version: int, customers: Mapping[str, Wanted]) -> dict[str, Left]:
        """Mark customers as having left this cell. Returns what is left of their limits.

        `version`: of the catalog by which their home is another cell.
        """
        packed = await self._leave(version, _encode([(customer_id, *each) for customer_id, each in customers.items()]))
        found: dict[str, Left] = {}
        for (customer_id, wanted), each in zip(customers.items(), packed, strict=True):
            reply = _decode(each)
            flags = _flags(reply[_KNOWN]) if wanted.idempotency and len(reply) > _KNOWN else ()
            known = frozenset(key for key, is_known in zip(wanted.idempotency, flags, strict=False) if is_known)
            newer = _number(reply[0])
            found[customer_id] = Left(newer, msgspec.Raw(each), known, newer > 0 and _flag(reply[1]))
        return found

    async def arrive(self, version: int, arrivals: Sequence[ArrivingLimits]) -> list[int]:
        """Store what is left of the limits. Returns for each customer 0, since this cell is its home now.

        Otherwise it is the version of the newer catalog by which it has another home.
        """
        rows = [
            (
                each.customer_id,
                packed_limits(each.limits)[0],
                [(key_id, bucket.rate, bucket.size) for key_id, bucket in each.keys.items()],
                each.is_empty,
                [(cell, left.state) for cell, left in each.states.items()],
            )
            for each in arrivals
        ]
        return [int(newer) for newer in await self._arrive(version, _encode(rows), KINDS)]
