"""Random texts that mark the submissions of requests."""

import os

NONCE_BYTES = 8


class Nonces:
    """Random texts of 16 hexadecimal digits. One system call draws many, because a call costs as much as decoding a request."""

    def __init__(self, a_call: int = 512) -> None:
        self._a_call = a_call
        self._drawn: list[str] = []

    def draw(self) -> str:
        """A nonce that was not returned before."""
        if not self._drawn:
            digits = os.urandom(NONCE_BYTES * self._a_call).hex()
            self._drawn = [digits[i : i + 2 * NONCE_BYTES] for i in range(0, len(digits), 2 * NONCE_BYTES)]
        return self._drawn.pop()
