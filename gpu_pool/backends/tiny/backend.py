"""`tiny`: the small torch language model that ships with Tierlane, as a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from gpu_pool.backends.backend import InvalidOutput, Item, ItemResult, Padding
from gpu_pool.backends.generation import GenerationParameters
from gpu_pool.backends.stepping import RowLoop, run_all
from scheduler.errors import StartError

if TYPE_CHECKING:
    from gpu_pool.backends.tiny.generate import TinyModel
    from gpu_pool.backends.tiny.row import TinySequence

LARGEST_BATCH = 64
"""Rows that run together in `run`."""

T = TypeVar("T")


class TinyBackend:
    """Generates text on `device` ("cpu", "cuda", "cuda:1") with `threads` CPU threads."""

    slots = 32

    def __init__(self, device: str, threads: int) -> None:
        self._device = device
        self._threads = threads
        self._model: TinyModel | None = None
        self._loop: RowLoop[TinySequence] | None = None

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
        return _checked(lambda: run_all(self._loaded().loop(), items, progress, LARGEST_BATCH))

    def add(self, key: int, item: Item) -> None:
        """See `SteppingBackend`."""
        self._loop = self._loop or self._loaded().loop()
        self._loop.add(key, item)

    def remove(self, key: int) -> int:
        """See `SteppingBackend`."""
        return self._loop.remove(key) if self._loop else 0

    def step(self, progress: Callable[[], None]) -> list[tuple[int, ItemResult]]:
        """See `SteppingBackend`. Raises InvalidOutput if the network computes NaN or infinity."""
        loop = self._loop
        return _checked(lambda: loop.step(progress)) if loop else []

    def close(self) -> None:
        """Release the weights."""
        self._model = None

    def _loaded(self) -> TinyModel:
        if self._model is None:
            raise RuntimeError("the model is used before load(); this is a bug")
        return self._model


def _checked(run: Callable[[], T]) -> T:
    try:
        return run()
    except FloatingPointError as error:
        raise InvalidOutput(str(error)) from error
