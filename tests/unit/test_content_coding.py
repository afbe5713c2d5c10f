"""Bodies with a content coding: gzip, deflate in both forms, zstd; their limit and their faults."""

import gzip
import zlib

import pytest
from backports import zstd
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.http.body.budget import BodyBudget
from gateway.http.body.content_coding import PIECE_BYTES, EncodingError, coding_of, decoded
from identities import identity
from scheduler.errors import ErrorCode, RequestError

BODY = b'{"input": "' + bytes(range(32, 127)).replace(b'"', b"").replace(b"\\", b"") * 9_000 + b'"}'
"""Larger than several pieces."""
MOST = 1 << 20
_raw = zlib.compressobj(wbits=-zlib.MAX_WBITS)
RAW_DEFLATE = _raw.compress(BODY) + _raw.flush()
ENCODED = (
    ("gzip", gzip.compress(BODY)),
    ("deflate", zlib.compress(BODY)),
    ("deflate", RAW_DEFLATE),
    ("zstd", zstd.compress(BODY)),
)


def ignore(_: int) -> None:
    """Count nothing."""


def headers(*values: str) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(("Content-Encoding", value) for value in values))


@pytest.mark.parametrize(
    ("values", "coding"),
    [
        ((), ""),
        (("",), ""),
        (("identity",), ""),
        (("GZIP",), "gzip"),
        (("x-gzip",), "gzip"),
        (("identity, zstd",), "zstd"),
        (("identity", "deflate"), "deflate"),
    ],
)
def test_the_coding_of_a_body(values: tuple[str, ...], coding: str) -> None:
    """Names have any case; an empty name and `identity` name no coding."""
    assert coding_of(headers(*values)) == coding


@pytest.mark.parametrize("values", [("br",), ("gzip, gzip",), ("gzip", "zstd"), ("compress",), ("nonsense",)])
def test_other_codings_are_rejected_with_those_that_are_accepted(values: tuple[str, ...]) -> None:
    """Also two codings, one upon the other."""
    with pytest.raises(EncodingError) as caught:
        coding_of(headers(*values))
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNSUPPORTED_ENCODING, "Content-Encoding")
    assert caught.value.accepted == "gzip, deflate, zstd, identity"


@pytest.mark.parametrize(("coding", "raw"), ENCODED)
async def test_a_body_is_decoded_up_to_its_limit(coding: str, raw: bytes) -> None:
    """The limit holds for the decoded size, to the byte."""
    assert len(BODY) > 3 * PIECE_BYTES
    assert await decoded(raw, coding, MOST, ignore) == BODY
    assert await decoded(raw, coding, len(BODY), ignore) == BODY
    assert await decoded(raw, coding, len(BODY) - 1, ignore) is None


@pytest.mark.parametrize(("coding", "raw"), ENCODED)
async def test_faults_of_a_coded_body_are_named(coding: str, raw: bytes) -> None:
    """A body that ends early, has bytes after its end, or is not in its coding."""
    plain = b"no"
    for faulty, fault in (
        (raw[:-9], "ends before"),
        (b"", "ends before"),
        (raw + b"more", "bytes after"),
        (plain, "cannot be decoded"),
    ):
        with pytest.raises(RequestError, match=fault) as caught:
            await decoded(faulty, coding, MOST, ignore)
        assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, "Content-Encoding")


async def test_a_window_of_zstd_is_at_most_8_mib() -> None:
    """RFC 9659: a larger one would take memory that the limits of bodies do not count."""
    options = {zstd.CompressionParameter.window_log: 25, zstd.CompressionParameter.content_size_flag: 0}
    compressor = zstd.ZstdCompressor(options=options)
    raw = compressor.compress(BODY * 20) + compressor.flush()
    with pytest.raises(RequestError, match="cannot be decoded"):
        await decoded(raw, "zstd", 1 << 30, ignore)


@pytest.mark.parametrize(("coding", "raw"), ENCODED)
async def test_a_body_counts_while_it_is_decoded(coding: str, raw: bytes) -> None:
    """Against the budget of its key, so that many small bodies do not become large ones at the same time."""
    budget = BodyBudget(in_all=MOST, of_customer=MOST, of_key=len(BODY) - 1)
    share = budget.share(identity())

    with pytest.raises(RequestError, match="Too many bytes of request bodies") as caught:
        await decoded(raw, coding, MOST, share.take)
    assert caught.value.code is ErrorCode.RATE_LIMIT_EXCEEDED
    assert budget.in_all > 2 * PIECE_BYTES
    share.give_back()
    assert budget.in_all == 0
