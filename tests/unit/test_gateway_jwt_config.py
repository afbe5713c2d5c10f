"""JWTs are off unless they are configured well: what would open too much is refused at start."""

from typing import Any

import pytest

from gateway.config import ALGORITHMS, DEFAULT_ALGORITHMS
from jwt_issuer import config
from scheduler.errors import StartError


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"algorithms": ("RS256", "HS256")}, "HS256"),
        ({"algorithms": ("hs512",)}, "hs512"),
        ({"algorithms": ("none",)}, "none"),
        ({"algorithms": ("None",)}, "none"),
        ({"algorithms": ("RS257",)}, "RS257"),
        ({"algorithms": ()}, "JWT_ALGORITHMS"),
        ({"issuer": None, "audience": None}, "JWT_AUDIENCE"),
        ({"issuer": "", "audience": ""}, "JWT_AUDIENCE"),
        ({"customer_claim": ""}, "JWT_CUSTOMER_CLAIM"),
        ({"jwks": ""}, "JWT_JWKS"),
        ({"jwks": "ftp://issuer.example/keys"}, "JWT_JWKS"),
        ({"jwks": "https:///keys"}, "JWT_JWKS"),
        ({"jwks": "https://user:secret@issuer.example/keys"}, "JWT_JWKS"),
        ({"leeway_s": 3600.0}, "leeway"),
        ({"leeway_s": -1.0}, "leeway"),
        ({"refresh_s": 0.0}, "refresh"),
        ({"refresh_s": float("nan")}, "refresh"),
        ({"keep_s": 1.0}, "keep"),
        ({"max_token_bytes": 100_000}, "8000"),
        ({"max_cached": 0}, "cached"),
    ],
)
def test_what_would_open_too_much_is_refused_at_start(changes: dict[str, Any], names: str) -> None:
    """One sentence that names the setting, and no secret."""
    with pytest.raises(StartError) as error:
        config(**changes)

    assert names in str(error.value)
    assert "secret@" not in str(error.value)


def test_no_symmetric_algorithm_can_ever_be_allowed() -> None:
    """A key set is public, so a secret in it would be everybody's."""
    assert not [name for name in ALGORITHMS if name.startswith("HS") or name.lower() == "none"]
    assert set(DEFAULT_ALGORITHMS) <= set(ALGORITHMS)


@pytest.mark.parametrize("changes", [{"issuer": None}, {"audience": None}, {"algorithms": ALGORITHMS}])
def test_an_issuer_or_an_audience_is_enough(changes: dict[str, Any]) -> None:
    """One of the two says for whom the tokens are meant."""
    assert config(**changes).customer_claim == "sub"


def test_messages_leave_out_the_query_of_the_url() -> None:
    """It may hold a secret."""
    assert config(jwks="https://issuer.example:8443/keys?code=secret").place == "https://issuer.example:8443/keys"
    assert config(jwks="/etc/keys.json").place == "/etc/keys.json"
