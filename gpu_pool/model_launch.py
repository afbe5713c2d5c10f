"""How a model process is started: its command line, and what it finds in its environment."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.failpoints import armed_directory

_OUR_SETTINGS = "TIERLANE_"  # Connections and tokens: the model has no use for them.
_SERVERS = frozenset({"PGPASSWORD", "PGPASSFILE", "POSTGRES_PASSWORD", "REDISCLI_AUTH", "REDIS_PASSWORD"})
_URLS = ("redis://", "rediss://", "redis+", "rediss+", "postgres://", "postgresql://", "postgresql+")


@dataclass(frozen=True, slots=True)
class ModelLaunch:
    """How a model process is started. `secrets` are added to its environment, which no other user can read."""

    backend: str
    device: str = "cpu"
    torch_threads: int = 1
    dtype: str = "auto"
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def arguments(self, fd: int) -> list[str]:
        """The command line, with `fd` the process's end of the socket."""
        own = ["--fd", str(fd), "--parent", str(os.getpid())]
        model = ["--backend", self.backend, "--device", self.device, "--dtype", self.dtype]
        model += ["--torch-threads", str(self.torch_threads)]
        failpoints = ["--failpoints", directory] if (directory := armed_directory()) else []
        return [sys.executable, "-m", "gpu_pool.model_process.main", *own, *model, *failpoints]

    def environment(self) -> dict[str, str]:
        """Ours, without our settings and what opens Redis or PostgreSQL, and the secrets."""
        inherited = {name: text for name, text in os.environ.items() if not _is_ours(name, text)}
        return {**inherited, **self.secrets}


def _is_ours(name: str, text: str) -> bool:
    return name.startswith(_OUR_SETTINGS) or name in _SERVERS or text.startswith(_URLS)
