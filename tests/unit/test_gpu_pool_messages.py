"""Frames between worker and model process: malformed bodies and size limits."""

import pickle

import pytest

from gpu_pool.model_process import messages
from gpu_pool.model_process.messages import (
    HEADER,
    FrameError,
    FrameTooLarge,
    Ready,
    Run,
)

RUN = Run(7, 3000, [b"hello", b""])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        pickle.dumps({"seq": 1}),
        b"\x94\xa3run\x01\x02\x91\xc4\x05a",  # Truncated bytes.
        b"\x94\xa3run\x01\x02\x91\x07",  # A number as body.
        b"\x91" * 100_000,  # Deep nesting.
    ],
)
def test_malformed_bodies_are_rejected(body: bytes) -> None:
    """Junk, and messages of the other direction, raise FrameError and nothing else."""
    with pytest.raises(FrameError):
        messages.decode_worker_message(body)
    with pytest.raises(FrameError):
        messages.decode_model_message(body)
    with pytest.raises(FrameError):
        messages.decode_worker_message(messages.pack(Ready("v"))[HEADER.size :])
    with pytest.raises(FrameError):
        messages.decode_model_message(messages.pack(RUN)[HEADER.size :])


def test_size_is_limited_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an oversized message nor an oversized length is accepted."""
    monkeypatch.setattr(messages, "MAX_BODY_BYTES", 100)

    with pytest.raises(FrameTooLarge):
        messages.pack(Ready("v" * 101))
    with pytest.raises(FrameError):
        messages.body_length(HEADER.pack(101))
