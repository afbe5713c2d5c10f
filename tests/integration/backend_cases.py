"""The backends that the contract tests run for: how each is made, and what it can do. Add a `Case` for a new backend."""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import endpoint_access
from endpoint_stand_in import StandIn, serving
from gpu_pool.backends.answering import AnswerBackend
from gpu_pool.backends.backend import Backend
from gpu_pool.backends.function import FunctionBackend
from gpu_pool.backends.open_inference.endpoint import OpenInferenceEndpoint
from gpu_pool.backends.openai_endpoint.backend import EndpointBackend
from gpu_pool.model_process.backend_registry import select_backend
from hf_models import make_causal
from open_inference_stand_in import OpenInferenceStandIn


def upper(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


async def upper_async(texts: list[str]) -> list[str]:
    await asyncio.sleep(0)
    return upper(texts)


class Writer:
    """A class with embeddings and step-by-step output."""

    def predict(self, texts: list[str]) -> list[str]:
        return upper(texts)

    def generate(self, texts: list[str], tell: Callable[[Sequence[str]], list[bool]]) -> list[str]:
        written, wanted = [""] * len(texts), [True] * len(texts)
        for step in range(max(map(len, texts), default=0)):
            pieces = [text[step : step + 1].upper() if want else "" for text, want in zip(texts, wanted, strict=True)]
            written = [text + piece for text, piece in zip(written, pieces, strict=True)]
            wanted = tell(pieces)
        return written

    def embed(self, texts: list[str]) -> list[list[float]]:
        return [[float(len(text)), 1.0] for text in texts]


class Answerer:
    """A class that answers requests one by one."""

    async def answer(self, item: Any) -> str:
        for letter in item.input.upper():
            item.emit(letter)
            await asyncio.sleep(0)
        return str(item.input).upper()

    async def embed(self, texts: list[str]) -> list[list[float]]:
        return [[float(len(text)), 1.0] for text in texts]


class Generator:
    """A class with a generator for each request."""

    continuous = True

    def generate(self, item: Any) -> Iterator[str]:
        yield from item.input.upper()


class ServedEndpoint(EndpointBackend):
    """`openai:URL` with a server that lives as long as the backend."""

    def __init__(self) -> None:
        self._server = ExitStack()
        os.environ.update(endpoint_access().environment())
        super().__init__(f"openai:{self._server.enter_context(serving(StandIn(chunk_s=0.01))).url}")

    def close(self) -> None:
        super().close()
        self._server.close()


class ServedModel(EndpointBackend):
    """`oip:URL` with a server that lives as long as the backend."""

    def __init__(self) -> None:
        self._server = ExitStack()
        server = self._server.enter_context(serving(OpenInferenceStandIn()))
        os.environ.update(endpoint_access().environment())
        super().__init__(f"oip:{server.url}#{server.name}", OpenInferenceEndpoint)

    def close(self) -> None:
        super().close()
        self._server.close()


@dataclass(frozen=True)
class Case:
    """One backend, of a form in BACKENDS. `make` returns it unloaded; the path is a folder that its tests share.

    `embeds`: it makes embeddings. `steps`: it writes step by step, so listeners get pieces and can leave. `parameters`: it
    reads `max_tokens`, `temperature` and `seed`. The names in `STEPPING` are backends with slots.
    """

    name: str
    form: str
    make: Callable[[Path], Backend]
    embeds: bool = False
    steps: bool = False
    parameters: bool = False


def _function(target: Any) -> Callable[[Path], Backend]:
    return lambda _: FunctionBackend("cases:target", target)


def _answers(target: Any) -> Callable[[Path], Backend]:
    return lambda _: AnswerBackend("cases:target", target)


def _hf(folder: Path) -> Backend:
    if not (folder / "config.json").exists():
        make_causal(folder)
    return select_backend(f"hf:{folder}", "cpu", 1, "float32")


CASES = (
    Case("simulated", "simulated[:MS]", lambda _: select_backend("simulated:0")),
    Case("tiny", "tiny", lambda _: select_backend("tiny"), embeds=True, steps=True, parameters=True),
    Case("function", "pkg.module:function", _function(upper)),
    Case("async function", "pkg.module:function", _function(upper_async)),
    Case("class", "pkg.module:function", _function(Writer), embeds=True, steps=True),
    Case("answers", "pkg.module:function", _answers(Answerer), embeds=True, steps=True),
    Case("generators", "pkg.module:function", _answers(Generator), steps=True),
    Case("hf", "hf:DIR", _hf, steps=True, parameters=True),
    Case("openai", "openai:URL", lambda _: ServedEndpoint(), embeds=True, steps=True),
    Case("oip", "oip:URL", lambda _: ServedModel()),
)
STEPPING = frozenset({"tiny", "answers", "generators", "hf"})
