"""Modules that a process must not import at start: they are slow and not used by it."""

import subprocess
import sys

import pytest

ROLE = "from tierlane.cli import _role; import tierlane.settings.model; _role({!r}); import ledger.revision"
PROBE = """
import sys
{start}
print(*(name for name in {heavy!r} if name in sys.modules))
import rich, gc
assert gc.isenabled()
"""
HEAVY = ("alembic", "sqlalchemy", "rich", "opentelemetry.sdk.metrics", "torch", "transformers")
STARTS = {role: ROLE.format(role) for role in ("gateway", "scheduler", "worker")} | {
    "model process": "import gpu_pool.model_process.main, gpu_pool.backends.tiny.backend, gpu_pool.backends.hf.backend"
}


@pytest.mark.parametrize("name", STARTS)
def test_process_starts_without_unused_libraries(name: str) -> None:
    """Torch is imported only when a model is loaded; everything can be imported later."""
    probe = PROBE.format(start=STARTS[name], heavy=HEAVY)

    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)

    assert (result.stdout.split(), result.stderr) == ([], "")
