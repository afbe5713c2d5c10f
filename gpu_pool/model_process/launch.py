"""How a model process is started: its command line and its environment."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.failpoints import armed_directory

_SETTINGS_PREFIX = "TIERLANE_"  # Connections and tokens, which the model must not get.
_SERVERS = frozenset({"PGPASSWORD", "PGPASSFILE", "POSTGRES_PASSWORD", "REDISCLI_AUTH", "REDIS_PASSWORD"})
_URLS = ("redis://", "rediss://", "redis+", "rediss+", "postgres://", "postgresql://", "postgresql+")


@dataclass(frozen=True, slots=True)
class ModelLaunch:
    """How a model process is started. `secrets` are added to its environment, which no other user can read.

    `max_slots` limits the requests of a model with slots, 0: not at all; `slots` is what the last process had learnt, 0: nothing.
    `check`: it runs the model's canary before it is ready, and prints tracebacks of the model to stderr.
    """

    backend: str
    device: str = "cpu"
    torch_threads: int = 1
    dtype: str = "auto"
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    max_slots: int = 0
    slots: int = 0
    check: bool = False

    def arguments(self, fd: int) -> list[str]:
        """The command line, with `fd` the process's end of the socket."""
        own = ["--fd", str(fd), "--parent", str(os.getpid())]
        model = ["--backend", self.backend, "--device", self.device, "--dtype", self.dtype]
        model += ["--torch-threads", str(self.torch_threads)]
        model += ["--max-slots", str(self.max_slots), "--slots", str(self.slots)]
        model += ["--check"] if self.check else []
        failpoints = ["--failpoints", directory] if (directory := armed_directory()) else []
        return [sys.executable, "-m", "gpu_pool.model_process.main", *own, *model, *failpoints]

    def environment(self) -> dict[str, str]:
        """The worker's environment without Tierlane's settings and server credentials, plus the secrets."""
        inherited = {
            name: text
            for name, text in os.environ.items()
            if not (name.startswith(_SETTINGS_PREFIX) or name in _SERVERS or text.startswith(_URLS))
        }
        return {**inherited, **self.secrets}
