"""What the part for asynchronous jobs is told at start: plain values with their units in their names."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """The composition root fills this in. Without a secret no callbacks are taken, nor where a customer has no hosts."""

    database_url: str = field(repr=False)
    total_ms: int = 600_000  # From taking a job in to its end.
    kept_ms: int = 600_000  # How long its result can be read after that.
    callback_hosts: tuple[str, ...] = ()  # Of customers without a list of their own: see gateway/host_lists.py.
    callback_secret: bytes = field(default=b"", repr=False)  # Of which each customer's own is made.
    shared_signature: bool = False  # Whether it signs itself as well, as it did before customers had their own.
    private_addresses: bool = False  # Whether callbacks may go to addresses that are not public.
