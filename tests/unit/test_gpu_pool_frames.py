"""Frames between supervisor and model process: closed schemas, capped sizes, golden bytes."""

import pickle

import pytest

from gpu_pool.backends.backend import ItemResult
from gpu_pool.model_process import messages
from gpu_pool.model_process.messages import (
    HEADER,
    Available,
    Done,
    Drop,
    Fatal,
    FrameError,
    FrameTooLarge,
    Piece,
    Pieces,
    Progress,
    Ready,
    Refused,
    Run,
    Said,
)

RUN = Run(7, 3000, [b"hello", b""])


def test_a_run_survives_the_way() -> None:
    """What the supervisor packs, the model process reads."""
    frame = messages.pack(RUN)

    assert messages.read_asked(frame[HEADER.size :]) == RUN
    assert len(frame) - HEADER.size == messages.body_length(frame[: HEADER.size])


def test_what_is_dropped_survives_the_way() -> None:
    """The other message of a supervisor."""
    assert messages.read_asked(messages.pack(Drop(7, [0, 3]))[HEADER.size :]) == Drop(7, [0, 3])


@pytest.mark.parametrize(
    "said",
    [
        Ready("tiny-1"),
        Progress(12),
        Pieces(7, [Piece(0, "gw-1 nonce", 12, "é")]),
        Done(7, 51.25, [ItemResult("olleh", 2), ItemResult("no", 0, "poison_request")]),
        Done(8, 51.25, [], 16, "The model raised ValueError.", 0.25),
        Ready("stand-in-1", 8),
        Refused(7, "The endpoint takes no more requests for now."),
        Refused(7, "The endpoint hung up.", counted=True),
        Available(False, "The endpoint takes no more requests for now."),
        Available(True),
        Fatal("The device is lost."),
        Fatal("No such module.", start_error=True),
    ],
)
def test_everything_said_survives_the_way(said: Said) -> None:
    """What the model process packs, the supervisor reads."""
    assert said == messages.read_said(messages.pack(said)[HEADER.size :])


@pytest.mark.parametrize(
    ("message", "golden"),
    [
        (Run(1, 2, [b"a"]), "0000000c 95a372756e010291c4016190"),
        (Ready("v"), "0000000a 93a57265616479a17601"),
        (Progress(5), "0000000b 92a870726f677265737305"),
        (Done(1, 0.5, []), "0000001c 97a4646f6e6501cb3fe00000000000009000a0cb0000000000000000"),
    ],
)
def test_golden_bytes(message: Run | Said, golden: str) -> None:
    """The bytes on the wire are these, so that they change on purpose only."""
    assert messages.pack(message) == bytes.fromhex(golden)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        pickle.dumps({"seq": 1}),
        messages.pack(Ready("v"))[4:],  # the other direction's message
        b"\x94\xa3run\x01\x02\x91\xc4\x05a",  # bytes that end early
        b"\x94\xa3run\x01\x02\x91\x07",  # a number as body
        b"\x91" * 100_000,  # deep enough to end a careless decoder
    ],
)
def test_what_is_no_run_is_refused(body: bytes) -> None:
    """A FrameError, and nothing else, whatever the bytes."""
    with pytest.raises(FrameError):
        messages.read_asked(body)


def test_what_a_model_process_may_not_say_is_refused() -> None:
    """A supervisor takes no Run, and no nonsense."""
    for body in (messages.pack(RUN)[4:], b"\xc1", b""):
        with pytest.raises(FrameError):
            messages.read_said(body)


def test_the_size_is_capped_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing over the cap is packed, and a length over it is not believed."""
    monkeypatch.setattr(messages, "MAX_BODY_BYTES", 100)

    with pytest.raises(FrameTooLarge):
        messages.pack(Ready("v" * 101))
    with pytest.raises(FrameError):
        messages.body_length(HEADER.pack(101))
