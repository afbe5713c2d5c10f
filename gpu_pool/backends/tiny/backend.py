"""`tiny`: the small torch language model that ships with Tierlane, as a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpu_pool.backends.backend import InvalidOutput, Item, ItemResult, OutputListener, Padding, by_task
from gpu_pool.backends.generation import (
    GenerationParameters,
    as_result,
    prompt_of,
    read_parameters,
    run_prepared,
    running_text,
)
from scheduler.errors import StartError
from scheduler.payload import write_vector

if TYPE_CHECKING:
    from gpu_pool.backends.tiny.generate import TinyModel


Prepared = tuple[str, GenerationParameters, "OutputListener | None"]


class TinyBackend:
    """Generates text on `device` ("cpu", "cuda", "cuda:1") with `threads` CPU threads."""

    def __init__(self, device: str, threads: int) -> None:
        self._device = device
        self._threads = threads
        self._model: TinyModel | None = None

    @property
    def version(self) -> str:
        """The version of the loaded weights."""
        return self._loaded().version

    @property
    def padding(self) -> Padding:
        """Padding of the passes of the last batch."""
        return self._loaded().padding

    def load(self) -> None:
        """Import torch and load the weights. Raises StartError if either is missing."""
        try:
            from gpu_pool.backends.tiny.generate import TinyModel  # noqa: PLC0415 - torch is imported on use only
        except ModuleNotFoundError as error:
            raise StartError(f"Backend 'tiny' needs the package {error.name!r}; install the extra 'worker'.") from None
        from gpu_pool.backends.tiny.model import WeightsError  # noqa: PLC0415 - see above

        try:
            self._model = TinyModel.load(self._device, self._threads)
        except WeightsError as error:
            raise StartError(f"Backend 'tiny': {error}") from None

    def warmup(self) -> None:
        """Generate a few tokens for two prompts of different lengths."""
        few = GenerationParameters(max_tokens=4)
        self._loaded().generate(["The", "Once upon a time"], [few, few], lambda: None)

    def health(self) -> None:
        """Runs the warm-up again."""
        self.warmup()

    def run(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        """Generate text or an embedding for each item. Raises InvalidOutput if the network computes NaN or infinity."""
        return by_task(items, lambda texts: self._generate(texts, progress), lambda texts: self._embed(texts, progress))

    def _embed(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        embedded = self._loaded().embed([item.input for item in items], progress)
        return [ItemResult(write_vector(each.values), each.tokens) for each in embedded]

    def _generate(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        return run_prepared(items, _prepare, lambda prepared: self._continued(prepared, progress))

    def _continued(self, prepared: Sequence[Prepared], progress: Callable[[], None]) -> list[ItemResult]:
        prompts, parameters, listeners = zip(*prepared, strict=True)
        try:
            return [
                as_result(generation)
                for generation in self._loaded().generate(prompts, parameters, progress, listeners)
            ]
        except FloatingPointError as error:
            raise InvalidOutput(str(error)) from error

    def close(self) -> None:
        """Release the weights."""
        self._model = None

    def _loaded(self) -> TinyModel:
        if self._model is None:
            raise RuntimeError("the model is used before load(); this is a bug")
        return self._model


def _prepare(item: Item) -> Prepared | ItemResult:
    parameters = read_parameters(item)
    if isinstance(parameters, ItemResult):
        return parameters
    return prompt_of(item, running_text), parameters, item.listener
