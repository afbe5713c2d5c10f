"""The cookie: what it says, who can make it, how long it holds, and how a browser must keep it."""

import pytest

from gateway.operations.session import LASTS_S, issue, left_s, presented, set_cookie

TOKEN, NOW = "the-service-token", 1_000_000.0
COOKIE = issue(TOKEN, NOW)
UNTIL, SIGNATURE = COOKIE.split(".")


@pytest.mark.parametrize(
    ("value", "now", "left"),
    [
        (COOKIE, NOW, LASTS_S),
        (COOKIE, NOW + 3600, LASTS_S - 3600),
        (COOKIE, NOW + LASTS_S, 0),
        (COOKIE, NOW + LASTS_S + 1, 0),
        (issue("another", NOW), NOW, 0),
        (f"{int(UNTIL) + 1}.{SIGNATURE}", NOW, 0),
        (f"{UNTIL}.{SIGNATURE[:-1]}", NOW, 0),
        (f"{UNTIL}.", NOW, 0),
        (f"{UNTIL}.ü", NOW, 0),
        (f"{'9' * 13}.{SIGNATURE}", NOW, 0),
        ("٣.x", NOW, 0),
        (".", NOW, 0),
        ("", NOW, 0),
        (TOKEN, NOW, 0),
    ],
)
def test_only_what_was_signed_holds_and_only_so_long(value: str, now: float, left: float) -> None:
    """Anything else is worth nothing, and raises nothing."""
    assert left_s(TOKEN, value, now) == left


def test_without_a_service_token_nobody_has_a_session() -> None:
    """Not even with a cookie that was signed with none."""
    assert left_s("", issue("", NOW), NOW) == 0


def test_the_cookie_says_nothing_of_the_token() -> None:
    """Neither does the header; scripts do not see it, other sites do not send it, it ends by itself."""
    header = set_cookie(COOKIE, lasts_s=LASTS_S, secure=True)

    assert TOKEN not in header
    assert header.split("; ")[1:] == [
        "Path=/internal/dashboard", "Max-Age=43200", "HttpOnly", "SameSite=Strict", "Secure",
    ]  # fmt: skip
    assert "Secure" not in set_cookie(COOKIE, lasts_s=LASTS_S, secure=False)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("", ""),
        ("a=b", ""),
        (f"tierlane_session={COOKIE}", COOKIE),
        (f"a=b; tierlane_session={COOKIE}; c=d", COOKIE),
        (f"xtierlane_session={COOKIE}", ""),
    ],
)
def test_it_is_found_among_others(header: str, value: str) -> None:
    """By its whole name."""
    assert presented(header) == value
