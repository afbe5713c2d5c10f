"""The check of outputs: with a model that reverses, an output proves that it belongs to the request."""

from enum import StrEnum

import msgspec

from tierlane_tools.bench.plan.inputs import Inputs

DECIDE_AFTER = 20


class Verify(StrEnum):
    """What is known of the model."""

    AUTO = "auto"
    """Find out from the first answers whether it reverses."""
    REVERSED = "reversed"
    """It returns the input reversed, as the simulated backend does."""
    OFF = "off"
    """Its output proves nothing."""


class _Answer(msgspec.Struct):
    output: str


_decoder = msgspec.json.Decoder(_Answer)


class OutputCheck:
    """Looks at every 200. `mode` becomes REVERSED or OFF once AUTO has decided."""

    __slots__ = ("_before", "_inputs", "_matches", "_misses", "mode")

    def __init__(self, mode: Verify, inputs: Inputs) -> None:
        self.mode = mode
        self._inputs = inputs
        self._before = inputs.reversed_before
        self._matches = 0
        self._misses = 0

    def look(self, nonce: bytes, body: bytes) -> None:
        """Compare one answer's body with the request that was sent."""
        if self.mode is Verify.OFF:
            return
        # The first question settles nearly every answer, so it is asked without a call.
        if self._before + nonce[::-1] + b'"' in body or self._is_reversed(nonce, body):
            self._matches += 1
        else:
            self._misses += 1
        if self.mode is Verify.AUTO and self._matches + self._misses >= DECIDE_AFTER:
            # By majority: a system that crosses some answers must not switch the check off.
            self.mode = Verify.REVERSED if self._matches >= self._misses else Verify.OFF

    @property
    def active(self) -> bool:
        """Whether outputs are compared, as far as is known by now."""
        return self.mode is Verify.REVERSED or (self.mode is Verify.AUTO and self._matches > self._misses)

    @property
    def crossed(self) -> int:
        """Answers whose output is not that of their request; 0 while outputs prove nothing."""
        return self._misses if self.active else 0

    @property
    def verified(self) -> int:
        """Answers whose output was seen to be that of their request."""
        return self._matches if self.active else 0

    def _is_reversed(self, nonce: bytes, body: bytes) -> bool:
        # Another server may escape or space its JSON differently.
        try:
            return _decoder.decode(body).output == self._inputs.reversed_text(nonce)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False
