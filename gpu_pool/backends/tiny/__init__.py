"""`tiny`: the small torch language model that ships with Tierlane.

This package is imported without torch; `TinyModel` is looked up, and torch with it, when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu_pool.backends.generation import Generation, GenerationParameters, ParameterError, parse_parameters

if TYPE_CHECKING:
    from gpu_pool.backends.tiny.generate import TinyModel

__all__ = ["Generation", "GenerationParameters", "ParameterError", "TinyModel", "parse_parameters"]


def __getattr__(name: str) -> Any:
    """Import the torch half on first use (PEP 562)."""
    if name == "TinyModel":
        from gpu_pool.backends.tiny.generate import TinyModel  # noqa: PLC0415 - here, since it brings torch

        return TinyModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
