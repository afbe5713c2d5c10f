"""API keys: their form, their checksum, and verification against the catalog."""

import re
from hashlib import sha256
from math import inf
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.catalog.api_key import BASE62, checksum, mint, parse, verify
from ledger.catalog.snapshot import Identity, Key, Snapshot
from scheduler.errors import ErrorCode, RequestError

NOW = 1_800_000_000.0
IDENTITY = Identity("k", "c", "acme", "paid", 2000, limits=(10.0, 10.0, 5, None))


def snapshot_with(key_id: str, secret_hash: bytes, **changes: object) -> Snapshot:
    fields = {"expires_at": inf, "revoked": False, "suspended": False} | changes
    return Snapshot(1, (), {}, {key_id: Key(IDENTITY, secret_hash, **fields)}, {}, ())


def rejection(presented: str, snapshot: Snapshot, **options: bool) -> ErrorCode:
    with pytest.raises(RequestError) as error:
        verify(presented, snapshot, NOW, **options)
    return error.value.code


def test_a_minted_key_has_the_published_form() -> None:
    """Prefix, public id, secret and checksum, so that secret scanners can find it."""
    key = mint()

    assert re.fullmatch(r"tl_[a-z0-9]{12}_[0-9A-Za-z]{34}", key.text)
    assert key.id == key.text[3:15]
    assert key.secret_hash == sha256(key.text[16:44].encode()).digest()


def test_the_checksum_is_crc32_in_six_base62_digits() -> None:
    """Compared with another implementation."""

    def divided(body: str) -> str:
        value, digits = crc32(body.encode()), ""
        for _ in range(6):
            value, digit = divmod(value, 62)
            digits = BASE62[digit] + digits
        return digits

    assert checksum("123456789") == "3jZRME"  # The check value of CRC-32, 0xCBF43926.
    assert [checksum(f"tl_{n}") for n in range(50)] == [divided(f"tl_{n}") for n in range(50)]


def test_a_key_with_one_changed_character_is_rejected_before_a_lookup() -> None:
    """CRC-32 finds every change of one character."""
    key = mint().text
    changed = [key[:at] + ("1" if key[at] != "1" else "2") + key[at + 1 :] for at in range(50)]

    assert parse(key) is not None
    assert [text for text in changed if parse(text)] == []


@given(st.text(max_size=80))
def test_arbitrary_text_is_no_key_and_no_error(text: str) -> None:
    """Whatever a client sends."""
    assert parse(text) is None


@pytest.mark.parametrize("form", ["{0}\n", " {0}", "{0} ", "{0}0", "Bearer {0}", "{0}\u0660", ""])
def test_a_key_with_other_characters_around_it_is_rejected(form: str) -> None:
    """Spaces, line ends, further digits, or nothing at all."""
    assert parse(form.format(mint().text)) is None


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"expires_at": NOW + 0.001}, None),
        ({"expires_at": NOW}, ErrorCode.INVALID_API_KEY),
        ({"expires_at": NOW - 1}, ErrorCode.INVALID_API_KEY),
        ({"revoked": True}, ErrorCode.INVALID_API_KEY),
        ({"suspended": True}, ErrorCode.ACCOUNT_SUSPENDED),
        ({"suspended": True, "revoked": True}, ErrorCode.INVALID_API_KEY),
    ],
)
def test_expired_revoked_and_suspended_keys(changes: dict[str, object], code: ErrorCode | None) -> None:
    """A key is valid until its expiry. A valid key of a suspended account gets its own code; else the identity is prebuilt."""
    key = mint()
    snapshot = snapshot_with(key.id, key.secret_hash, **changes)

    if code is None:
        assert verify(key.text, snapshot, NOW) is IDENTITY
    else:
        assert rejection(key.text, snapshot) is code


def test_a_wrong_secret_is_rejected_even_if_the_account_is_suspended() -> None:
    """Only a holder of the secret learns about the account."""
    key = mint()
    snapshot = snapshot_with(key.id, bytes(32), suspended=True)

    assert rejection(key.text, snapshot) is ErrorCode.INVALID_API_KEY


def test_an_unknown_key_is_invalid_only_while_the_catalog_is_fresh() -> None:
    """Without PostgreSQL the key may be newer than the catalog."""
    snapshot = snapshot_with("anotherkey00", bytes(32))
    key = mint().text

    assert rejection(key, snapshot) is ErrorCode.INVALID_API_KEY
    assert rejection(key, snapshot, fresh=False) is ErrorCode.CATALOG_UNAVAILABLE
    assert rejection("tl_nonsense", snapshot, fresh=False) is ErrorCode.INVALID_API_KEY
