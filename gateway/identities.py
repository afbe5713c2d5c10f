"""Who presents this token: an API key goes to the catalog, a JWT to the verifier where one is configured."""

from collections.abc import Mapping
from typing import Protocol

from gateway.bearer import looks_like_jwt
from gateway.catalog import IdentityView
from scheduler.tasks import Loop

KEY_PREFIX = "tl_"


class Keys(Protocol):
    """The catalog, as far as API keys go."""

    def identify(self, presented: str, wall_now: float) -> IdentityView: ...


class Tokens(Protocol):
    """A second way in, for tokens that others issue."""

    @property
    def max_bytes(self) -> int: ...
    @property
    def problem(self) -> str | None: ...

    def identify(self, presented: str, wall_now: float) -> IdentityView: ...

    def loops(self) -> Mapping[str, Loop]: ...


class Identities:
    """Both ways in. Without `tokens` there is only the first."""

    def __init__(self, keys: Keys, tokens: Tokens | None = None) -> None:
        self._keys = keys
        self._tokens = tokens

    @property
    def longest_jwt(self) -> int:
        """Bytes that a JWT may have; 0 where none is taken."""
        return self._tokens.max_bytes if self._tokens else 0

    @property
    def problem(self) -> str | None:
        """Why some tokens cannot be checked as they should, for health; None while all is well."""
        return self._tokens.problem if self._tokens else None

    def identify(self, presented: str, wall_now: float) -> IdentityView:
        """The identity. Raises RequestError as the catalog and the verifier do; `wall_now` is seconds since the epoch."""
        if self._tokens is None or presented.startswith(KEY_PREFIX) or not looks_like_jwt(presented):
            return self._keys.identify(presented, wall_now)
        return self._tokens.identify(presented, wall_now)

    def loops(self) -> Mapping[str, Loop]:
        """What has to run beside the requests, by name."""
        return self._tokens.loops() if self._tokens else {}
