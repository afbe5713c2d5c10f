"""`tiny`: the small torch language model that ships with the project, as a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpu_pool.backend import InvalidOutput, Item, ItemResult
from gpu_pool.padding import Padding
from gpu_pool.prompts import prompt_of, running_text
from gpu_pool.tasks import by_task
from gpu_pool.tiny.parameters import Generation, GenerationParameters, ParameterError, parse_parameters
from scheduler.errors import ErrorCode, StartError
from scheduler.vectors import write_vector

if TYPE_CHECKING:
    from gpu_pool.tiny.generate import TinyModel


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
        """What was computed for nothing."""
        return self._loaded().padding

    def load(self) -> None:
        """Import torch and load the weights. Raises StartError where one of them is not there."""
        try:
            from gpu_pool.tiny.generate import TinyModel  # noqa: PLC0415 - torch is imported on use only
        except ModuleNotFoundError as error:
            raise StartError(f"Backend 'tiny' needs the package {error.name!r}; install the extra 'worker'.") from None
        from gpu_pool.tiny.weights import WeightsError  # noqa: PLC0415 - see above

        try:
            self._model = TinyModel.load(self._device, self._threads)
        except WeightsError as error:
            raise StartError(f"Backend 'tiny': {error}") from None

    def warmup(self) -> None:
        """Generate a few tokens for two prompts of different lengths."""
        few = GenerationParameters(max_tokens=4)
        self._loaded().generate(["The", "Once upon a time"], [few, few], lambda: None)

    def run(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        """Generate or embed what each item asks. Raises InvalidOutput where the network computes what is no number."""
        return by_task(items, lambda texts: self._generate(texts, progress), lambda texts: self._embed(texts, progress))

    def _embed(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        embedded = self._loaded().embed([item.input for item in items], progress)
        return [ItemResult(write_vector(each.values), each.tokens) for each in embedded]

    def _generate(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        """For every item with good parameters; the others fail alone, before the model sees anything."""
        parsed = [_parse(item) for item in items]
        pairs = zip(items, parsed, strict=True)
        good = [(prompt_of(i, running_text), p, i.listener) for i, p in pairs if isinstance(p, GenerationParameters)]
        prompts, wishes, listeners = zip(*good, strict=True) if good else ((), (), ())
        try:
            made = iter(self._loaded().generate(prompts, wishes, progress, listeners) if good else [])
        except FloatingPointError as error:
            raise InvalidOutput(str(error)) from error
        return [p if isinstance(p, ItemResult) else _as_result(next(made)) for p in parsed]

    def close(self) -> None:
        """Let the weights go."""
        self._model = None

    def _loaded(self) -> TinyModel:
        if self._model is None:
            raise RuntimeError("the model is used before load(); this is a bug")
        return self._model


def _parse(item: Item) -> GenerationParameters | ItemResult:
    try:
        return parse_parameters(item.parameters)
    except ParameterError as error:
        return ItemResult(f"parameters.{error.field} {error.message}.", 0, ErrorCode.INVALID_REQUEST)


def _as_result(generation: Generation) -> ItemResult:
    tokens = generation.tokens_in + generation.tokens_out
    return ItemResult(generation.text, tokens, "", generation.tokens_out, generation.finish_reason)
