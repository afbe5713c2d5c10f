"""`hf:DIR`: a directory in Hugging Face format as a backend: a causal language model, or a sentence-embedding model.

Nothing is downloaded, no code of the directory runs, and weights must be safetensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpu_pool.backends.backend import Item, ItemResult, by_task
from gpu_pool.backends.hf.directory import read_directory
from gpu_pool.backends.hf.json_file import Unusable
from scheduler.errors import StartError

if TYPE_CHECKING:
    from gpu_pool.backends.hf.loading import HfModel
    from gpu_pool.backends.stepping import RowLoop

SLOTS: Final = 32
"""Texts of a language model at a time; a device with less memory gets fewer."""

OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
"""Read by the libraries when they are imported. `TOKENIZERS_PARALLELISM` is left to the operator."""


class HfBackend:
    """Runs the model in `directory` on `device` ("auto", "cpu", "cuda", "cuda:1") with `threads` CPU threads.

    `dtype` is "float32", "bfloat16", "float16", or "auto": that of the weights on CUDA, float32 elsewhere.
    """

    def __init__(self, directory: str, device: str, threads: int, dtype: str = "auto") -> None:
        self._directory = directory
        self._device = device
        self._threads = threads
        self._dtype = dtype
        self._version = f"hf:{directory}"
        self._model: HfModel | None = None
        self._loop: RowLoop[Any] | None = None

    @property
    def slots(self) -> int:
        """0 for an embedding model, which runs batches."""
        return SLOTS if self._loop is not None else 0

    @property
    def context_tokens(self) -> int:
        """The most tokens of prompt and output together, once loaded; 0: not limited."""
        return self._model.context_tokens if self._model is not None else 0

    @property
    def version(self) -> str:
        """The directory's name and a short hash of its content, once loaded."""
        return self._version

    def load(self) -> None:
        """Import torch and transformers and load the weights. Raises StartError if the directory cannot be used."""
        os.environ.update(OFFLINE)
        try:
            found = read_directory(Path(self._directory).expanduser())
            from gpu_pool.backends.hf.loading import load_model  # noqa: PLC0415 - torch is imported on use only

            self._model = load_model(found, self._device, self._dtype, self._threads)
        except Unusable as error:
            raise StartError(f"Backend 'hf:{self._directory}': {error}.") from None
        except ModuleNotFoundError as error:
            raise StartError(f"Backend 'hf:' needs the package {error.name!r}; install the extra 'hf'.") from None
        self._loop = self._model.loop()
        self._version = found.version

    def warmup(self) -> None:
        """Run a small batch."""
        self._loaded().warmup()

    def health(self) -> None:
        """Runs the warm-up again."""
        self.warmup()

    def run(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        """Generate text or an embedding for each item. Raises InvalidOutput if the network computes NaN or infinity."""
        model = self._loaded()
        return by_task(items, lambda some: model.texts(some, progress), lambda some: model.vectors(some, progress))

    def add(self, key: int, item: Item) -> None:
        """See `SteppingBackend`."""
        self._stepping().add(key, item)

    def remove(self, key: int) -> int:
        """See `SteppingBackend`."""
        return self._stepping().remove(key)

    def step(self, progress: Callable[[], None]) -> list[tuple[int, ItemResult]]:
        """See `SteppingBackend`. Raises InvalidOutput if the network computes NaN or infinity."""
        return self._stepping().step(progress)

    def close(self) -> None:
        """Release the weights."""
        self._model = self._loop = None

    def _stepping(self) -> RowLoop[Any]:
        if self._loop is None:
            raise RuntimeError("an embedding model has no slots; this is a bug")
        return self._loop

    def _loaded(self) -> HfModel:
        if self._model is None:
            raise RuntimeError("the model is used before load(); this is a bug")
        return self._model
