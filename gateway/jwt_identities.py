"""JWTs as a second way in, put together: key set, verifier, customers. Only imported where JWTs are configured."""

import time
from collections.abc import Callable, Mapping

from gateway.auth.jwks import JwksSource
from gateway.auth.jwt_customers import CustomersView, JwtCustomers
from gateway.auth.jwt_verifier import JwtVerifier
from gateway.jwt_config import JwtConfig
from ledger.catalog.snapshot import Identity
from scheduler.tasks import Loop


class JwtIdentities:
    """Identifies customers by tokens that a trusted issuer signed. `clock` is monotonic seconds."""

    def __init__(
        self,
        catalog: CustomersView,
        config: JwtConfig,
        *,
        source: JwksSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source or JwksSource(config, clock=clock)
        self._config = config
        self._verifier = JwtVerifier(config, self.source)
        self._customers = JwtCustomers(catalog, clock)

    @property
    def max_bytes(self) -> int:
        """Bytes that a token may have."""
        return self._config.max_token_bytes

    @property
    def problem(self) -> str | None:
        """Why the key set may be old or missing; None while all is well."""
        return self.source.problem

    def identify(self, presented: str, wall_now: float) -> Identity:
        """Who presents this token; `wall_now` is seconds since the epoch. Raises RequestError."""
        return self._customers.identity(self._verifier.verify(presented, wall_now))

    def loops(self) -> Mapping[str, Loop]:
        """What has to run beside the requests, by name."""
        return {"jwks": self.source.run, "customer names": self._customers.run}
