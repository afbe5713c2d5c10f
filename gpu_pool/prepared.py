"""What backends that generate text share: what an item asks is read before the model sees anything, and fails alone."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.backends.generation import MAX_TOKENS, Generation, GenerationParameters, ParameterError, parse_parameters
from scheduler.errors import ErrorCode

P = TypeVar("P")


def run_prepared(
    items: Sequence[Item], prepare: Callable[[Item], P | ItemResult], run: Callable[[list[P]], list[ItemResult]]
) -> list[ItemResult]:
    """One result for each item, in order. `prepare` gives what `run` gets of an item, or its refusal; `run` gets the
    former together, if there are any.
    """
    prepared = [prepare(item) for item in items]
    good = [each for each in prepared if not isinstance(each, ItemResult)]
    made = iter(run(good) if good else [])
    return [each if isinstance(each, ItemResult) else next(made) for each in prepared]


def read_parameters(item: Item, most_tokens: int = MAX_TOKENS) -> GenerationParameters | ItemResult:
    """How the item's text is to be made, or the refusal that names the field at fault."""
    try:
        return parse_parameters(item.parameters, most_tokens)
    except ParameterError as error:
        return ItemResult(f"parameters.{error.field} {error.message}.", 0, ErrorCode.INVALID_REQUEST)


def as_result(generation: Generation) -> ItemResult:
    """The result of a text that was made."""
    tokens = generation.tokens_in + generation.tokens_out
    return ItemResult(generation.text, tokens, "", generation.tokens_out, generation.finish_reason)
