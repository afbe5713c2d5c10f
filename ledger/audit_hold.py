"""How long a request that has only begun waits for its end in the auditor's hands: pure arithmetic.

Two records that are written together are one row, copied once; apart, the second costs three times the first. Nearly all
requests end within a moment, for which every beginning waits. In a deep queue nearly none does, so there it waits on.

The price is room: an entry stays in Redis until all before it is written. One slow request must not keep the outbox of
a fast system, so the oldest of what is held goes on waiting only while at least half of what has begun since is open too.
"""

import msgspec

LONGEST_S = 60.0
"""However long requests may live: an auditor that takes over reads again all that was held."""


class HoldPolicy(msgspec.Struct, frozen=True):
    """How long and how much, in seconds, requests and bytes.

    `hold_s`: every beginning may wait so long. `deep_s`: so long where at least `deep_open` are open; until then the
    audit does not know of them, nor can they be closed as abandoned. `most_open`, `most_bytes`: no more is ever held.
    """

    hold_s: float = 1.0
    deep_s: float = LONGEST_S
    deep_open: int = 1000
    most_open: int = 200_000
    most_bytes: int = 64 << 20

    def keeps(self, age_s: float, open_: int, begun: int, size: int) -> bool:
        """Whether the oldest open request may go on waiting.

        `age_s`: since it was taken. Of its entry and all that came after: `open_` requests without an end, of the
        `begun` ones, in `size` bytes.
        """
        if open_ > self.most_open or size > self.most_bytes:
            return False
        deep = open_ >= self.deep_open and 2 * open_ >= begun
        return age_s < (self.deep_s if deep else self.hold_s)
