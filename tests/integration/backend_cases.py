"""The backends that the contract holds for: how each is made, and what it offers. A new one is one more `Case`."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from endpoint_stand_in import StandIn, serving
from gpu_pool.backends.backend import Backend
from gpu_pool.backends.function import FunctionBackend
from gpu_pool.backends.openai_endpoint.backend import EndpointBackend
from gpu_pool.model_process.backend_registry import select_backend
from hf_models import make_causal


def shout(texts: list[str]) -> list[str]:
    """A plain function."""
    return [text.upper() for text in texts]


async def shout_later(texts: list[str]) -> list[str]:
    """One that waits for something."""
    await asyncio.sleep(0)
    return shout(texts)


class Writer:
    """A class with everything that one may have; it writes letter by letter where somebody reads along."""

    def __init__(self) -> None:
        self.steps = 0

    def load(self) -> None:
        self.steps = 0

    def warmup(self) -> None:
        self.predict(["x"])

    def health(self) -> bool:
        return True

    def predict(self, texts: list[str]) -> list[str]:
        return shout(texts)

    def generate(self, texts: list[str], tell: Callable[[Sequence[str]], list[bool]]) -> list[str]:
        written = [""] * len(texts)
        wanted = [True] * len(texts)
        for step in range(max(map(len, texts), default=0)):
            pieces = [text[step : step + 1].upper() if want else "" for text, want in zip(texts, wanted, strict=True)]
            written = [text + piece for text, piece in zip(written, pieces, strict=True)]
            wanted = tell(pieces)
            self.steps += 1
        return written

    def embed(self, texts: list[str]) -> list[list[float]]:
        return [[float(len(text)), 1.0] for text in texts]


class Served(EndpointBackend):
    """`openai:URL` before a server that is there as long as the backend is."""

    def __init__(self) -> None:
        self._server = ExitStack()
        super().__init__(f"openai:{self._server.enter_context(serving(StandIn(letter_s=0.01))).url}")

    def close(self) -> None:
        super().close()
        self._server.close()


@dataclass(frozen=True)
class Case:
    """One backend. `make` gives it, not loaded; the path is a folder of its own that all its tests share.

    `embeds`: it makes vectors. `steps`: it writes step by step, so a listener hears pieces and can leave.
    `parameters`: it reads the parameters of an item, and knows `max_tokens`, `temperature` and `seed`.
    """

    name: str
    make: Callable[[Path], Backend]
    embeds: bool = False
    steps: bool = False
    parameters: bool = False


def _function(target: Any) -> Callable[[Path], Backend]:
    return lambda _: FunctionBackend("cases:target", target)


def _hf(folder: Path) -> Backend:
    if not (folder / "config.json").exists():
        make_causal(folder)
    return select_backend(f"hf:{folder}", "cpu", 1, "float32")


CASES = (
    Case("simulated", lambda _: select_backend("simulated:0")),
    Case("tiny", lambda _: select_backend("tiny"), embeds=True, steps=True, parameters=True),
    Case("function", _function(shout)),
    Case("async function", _function(shout_later)),
    Case("class", _function(Writer), embeds=True, steps=True),
    Case("hf", _hf, steps=True, parameters=True),
    Case("openai", lambda _: Served(), embeds=True, steps=True),
)
