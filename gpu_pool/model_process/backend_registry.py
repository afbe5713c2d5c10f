"""From the value of `--backend` to a backend. Only the model process imports the model's own module."""

import re
from typing import NamedTuple

from gpu_pool.backends.backend import Backend
from gpu_pool.backends.openai_endpoint.settings import OPEN_INFERENCE, PREFIX, SERVERS, read_address
from scheduler.errors import StartError

FORMS = "tiny, simulated, simulated:MS, pkg.module:function, hf:DIR, openai:URL or oip:URL"
_SIMULATED = re.compile(r"simulated(?::(\d{1,5}(?:\.\d{1,3})?)(?:\+(\d{1,5}(?:\.\d{1,3})?))?)?")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_HF = re.compile(r"hf:(.+)", re.DOTALL)


class BackendForm(NamedTuple):
    """A form of `--backend`, and what its models do: "yes", "-", or the condition. The contract tests prove it."""

    form: str
    texts: str = "yes"  # And chats.
    steps: str = "-"  # It writes step by step, so a stream begins before the text is complete.
    vectors: str = "-"
    passes_on: bool = False  # Chats are passed on to a server, which may have further capabilities.


BACKENDS = (
    BackendForm("tiny", steps="yes", vectors="yes"),
    BackendForm("simulated[:MS]"),
    BackendForm("pkg.module:function", steps="with `generate` or `answer`", vectors="with `embed`"),
    BackendForm("hf:DIR", texts="language models", steps="language models", vectors="embedding models"),
    BackendForm("openai:URL", texts="as its server", steps="as its server", vectors="as its server", passes_on=True),
    BackendForm("oip:URL", vectors="with text inputs"),
)


def check_form(spec: str) -> None:
    """Raise StartError if `spec` has no known form. Imports nothing, so the worker may call it."""
    if spec.startswith(SERVERS):
        read_address(spec)
        return
    if _HF.fullmatch(spec):
        return
    if spec.partition(":")[0] == "simulated" and not _SIMULATED.fullmatch(spec):
        raise StartError(
            f"Backend {spec!r}: MS must be milliseconds from 0 to 99999, as in simulated:50, or simulated:50+1 with a time for each word."
        )
    if spec not in ("tiny", "simulated") and not _FUNCTION.fullmatch(spec) and not _SIMULATED.fullmatch(spec):
        raise StartError(f"Backend {spec!r} is not known; use {FORMS}.")


def select_backend(spec: str, device: str = "cpu", torch_threads: int = 1, dtype: str = "auto") -> Backend:
    """The backend that `spec` names, not loaded. Only its own module is imported; `tiny` and `hf:` import torch on
    load.

    Raises StartError for an unknown form, a missing module, and a name that is missing or not callable.
    """
    check_form(spec)
    simulated = _SIMULATED.fullmatch(spec)
    if simulated:
        from gpu_pool.backends.simulated import DEFAULT_MS, SimulatedBackend  # noqa: PLC0415 - only the selected backend

        return SimulatedBackend(float(simulated[1] or DEFAULT_MS), float(simulated[2] or 0))
    if spec.startswith(PREFIX):
        from gpu_pool.backends.openai_endpoint.backend import EndpointBackend  # noqa: PLC0415 - only the selected backend

        return EndpointBackend(spec)
    if spec.startswith(OPEN_INFERENCE):
        from gpu_pool.backends.open_inference.endpoint import OpenInferenceEndpoint  # noqa: PLC0415 - only the selected backend
        from gpu_pool.backends.openai_endpoint.backend import EndpointBackend  # noqa: PLC0415 - only the selected backend

        return EndpointBackend(spec, OpenInferenceEndpoint)
    if spec == "tiny":
        from gpu_pool.backends.tiny.backend import TinyBackend  # noqa: PLC0415 - only the selected backend

        return TinyBackend(device, torch_threads)
    if directory := _HF.fullmatch(spec):
        from gpu_pool.backends.hf.backend import HfBackend  # noqa: PLC0415 - only the selected backend

        return HfBackend(directory[1], device, torch_threads, dtype)
    from gpu_pool.backends.answering import AnswerBackend, answers  # noqa: PLC0415 - only the selected backend
    from gpu_pool.backends.function import FunctionBackend, find_target  # noqa: PLC0415 - only the selected backend

    target = find_target(spec)
    return AnswerBackend(spec, target) if answers(target) else FunctionBackend(spec, target)
