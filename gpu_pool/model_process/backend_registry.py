"""From the text of `--backend` to a backend. The model's own module is imported in the model process only."""

import re

from gpu_pool.backends.backend import Backend
from gpu_pool.backends.openai_endpoint.settings import PREFIX, read_address
from scheduler.errors import StartError

FORMS = "tiny, simulated, simulated:MS, pkg.module:function, hf:DIR or openai:URL"
_SIMULATED = re.compile(r"simulated(?::(\d{1,5}(?:\.\d{1,3})?))?")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_HF = re.compile(r"hf:(.+)", re.DOTALL)


def check_form(spec: str) -> None:
    """Raise StartError where `spec` has none of the known forms; imports nothing, so a supervisor may ask."""
    if spec.startswith(PREFIX):
        read_address(spec)
        return
    if _HF.fullmatch(spec):
        return
    if spec.partition(":")[0] == "simulated" and not _SIMULATED.fullmatch(spec):
        raise StartError(f"Backend {spec!r}: MS must be a number of milliseconds from 0 to 99999, as in simulated:50.")
    if spec not in ("tiny", "simulated") and not _FUNCTION.fullmatch(spec) and not _SIMULATED.fullmatch(spec):
        raise StartError(f"Backend {spec!r} is not known; use {FORMS}.")


def select_backend(spec: str, device: str = "cpu", torch_threads: int = 1, dtype: str = "auto") -> Backend:
    """The backend that `spec` names, not loaded yet; only its own module is imported, and torch for `tiny` and `hf:` on load.

    Raises StartError for an unknown form, a module that is not found, and a name that is missing or not callable.
    """
    check_form(spec)
    simulated = _SIMULATED.fullmatch(spec)
    if simulated:
        from gpu_pool.backends.simulated import DEFAULT_MS, SimulatedBackend  # noqa: PLC0415 - only what is used

        return SimulatedBackend(float(simulated[1]) if simulated[1] else DEFAULT_MS)
    if spec.startswith(PREFIX):
        from gpu_pool.backends.openai_endpoint.backend import EndpointBackend  # noqa: PLC0415 - only what is used

        return EndpointBackend(spec)
    if spec == "tiny":
        from gpu_pool.backends.tiny.backend import TinyBackend  # noqa: PLC0415 - only what is used

        return TinyBackend(device, torch_threads)
    if directory := _HF.fullmatch(spec):
        from gpu_pool.backends.hf.backend import HfBackend  # noqa: PLC0415 - only what is used

        return HfBackend(directory[1], device, torch_threads, dtype)
    from gpu_pool.backends.function import FunctionBackend, find_target  # noqa: PLC0415 - only what is used

    return FunctionBackend(spec, find_target(spec))
