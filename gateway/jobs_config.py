"""What the part for asynchronous jobs is told at start: plain values with their units in their names."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """The composition root fills this in. Without hosts and a secret no callbacks are taken."""

    database_url: str = field(repr=False)
    total_ms: int = 600_000  # From taking a job in to its end.
    kept_ms: int = 600_000  # How long its result can be read after that.
    callback_hosts: tuple[str, ...] = ()  # `name`, `*.name`, each with `:port` where it is not the scheme's own.
    callback_secret: bytes = field(default=b"", repr=False)
    private_addresses: bool = False  # Whether callbacks may go to addresses that are not public.
