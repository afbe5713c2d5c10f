"""How a model process is started: its command line, and what it finds in its environment."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.failpoints import armed_directory

_OUR_SETTINGS = "TIERLANE_"  # Connections and tokens: the model has no use for them.


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
        return [sys.executable, "-m", "gpu_pool.model_process", *own, *model, *failpoints]

    def environment(self) -> dict[str, str]:
        """Ours, without our settings, and the secrets."""
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(_OUR_SETTINGS)}
        return {**inherited, **self.secrets}
