"""`pkg.module:function`: a Python function of strings, or a class with `predict`, as a model.

A class may have `load`, `predict`, `warmup` and `health`. The function takes 1 to 100 strings and returns as many, in
order, as strings or as `ModelOutput`. It may be `async`; one event loop is kept for its whole life, so that clients it holds
stay usable. If the signature of a function, or of `predict`, `generate` or `embed`, has `parameters`, it gets one dictionary
for each string, as its request sent them; if not, requests with parameters other than IGNORED are rejected. A class may
also have `embed(list[str]) -> list[list[float]]`, `chat_template(list[{"role", "content"}]) -> str` for conversations
(without it, turns are named), and `generate(list[str], tell) -> list[str]`, which writes step by step and is called if
a client streams.

`tell(list[str]) -> list[bool]` is called after each step with the text added to each output, and returns for each
whether it is still wanted; the model may leave the others as they are. Once none is wanted, because clients left or
deadlines passed, the next call raises OutputsUnwanted, which ends the run with the text written so far.
"""

import asyncio
import importlib
import inspect
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_pool.backends.backend import NO_EMBEDDINGS, TOO_LATE, InvalidOutput, Item, ItemResult, Unwell, by_task
from gpu_pool.backends.generation import named_turns, prompt_of
from gpu_pool.model_output import ModelOutput
from scheduler.errors import ErrorCode, StartError
from scheduler.payload import Task
from scheduler.prompt_messages import PromptMessage
from scheduler.vectors import write_vector

StreamCallback = Callable[[Sequence[str]], list[bool]]

MAX_STRINGS = 100  # Part of the documented contract.
NO_VECTOR = ItemResult("The model's vector is not a list of numbers.", 0, ErrorCode.INVALID_OUTPUT)
BAD_COUNTS = ItemResult("The model's token counts or finish reason are invalid.", 0, ErrorCode.INVALID_OUTPUT)

IGNORED = frozenset({"temperature", "top_p", "max_tokens", "seed", "stop"})
"""Parameters that clients of OpenAI's API send to any model. A function that does not take parameters ignores them."""
FINISH_REASONS = ("stop", "length")
MOST_TOKENS = 1_000_000_000
"""The largest count of an output; the sum of both has to fit the audit's 32 bits."""


class OutputsUnwanted(BaseException):
    """No output of the run is wanted any more. Not an Exception, so that the model's handlers do not catch it."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__("No output of this run is wanted any more.")
        self.texts = texts


def stream_callback(
    items: Sequence[Item], progress: Callable[[], None], clock: Callable[[], float] = time.monotonic
) -> StreamCallback:
    """The callback for `generate`. It raises InvalidOutput unless it gets one text for each item."""
    written = [0] * len(items)
    texts = [""] * len(items)

    unwanted = False

    def tell(pieces: Sequence[str]) -> list[bool]:
        nonlocal unwanted
        if unwanted:
            raise OutputsUnwanted(texts)
        if len(pieces) != len(items):
            raise InvalidOutput(f"The model wrote {len(pieces)} texts for {len(items)} inputs.")
        for place, (item, piece) in enumerate(zip(items, map(plain_text, pieces), strict=True)):
            if item.listener is not None and piece:
                item.listener.emit(written[place], piece)
                written[place] += len(piece)
                texts[place] += piece
        progress()
        wanted = [item.listener is None or not item.listener.gone for item in items]
        # An item without a listener is wanted until its deadline.
        unwanted = not any(
            each and (item.listener or clock() < item.until) for each, item in zip(wanted, items, strict=True)
        )
        return wanted

    return tell


def plain_text(piece: Any) -> str:
    """A plain str that UTF-8 can encode. Raises InvalidOutput."""
    try:
        return str.encode(piece).decode()
    except (TypeError, UnicodeEncodeError):
        raise InvalidOutput("The model wrote a piece that is no text.") from None


def find_target(spec: str) -> Any:
    """Import what `pkg.module:name` names. Raises StartError with the part that is wrong."""
    module_name, _, name = spec.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        own = f"{module_name}.".startswith(f"{error.name}.")
        todo = f"put it in {Path.cwd()}, or name its folder in PYTHONPATH" if own else "install it in this environment"
        raise StartError(f"Backend {spec!r}: the module {error.name!r} is not found; {todo}.") from None
    except Exception as error:
        fault = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise StartError(f"Backend {spec!r}: importing {module_name!r} fails with {fault}.") from error
    for part in name.split("."):
        if not hasattr(target, part):
            raise StartError(f"Backend {spec!r}: the module {module_name!r} has no {name!r}.")
        target = getattr(target, part)
    methods = ["predict", "answer", *(["generate"] if getattr(target, "continuous", False) else [])]
    if any(callable(getattr(target, method, None)) for method in methods):
        return target
    if isinstance(target, type):
        raise StartError(
            f"Backend {spec!r}: the class needs a method predict(list[str]) -> list[str], or async answer(item)."
        )
    if not callable(target):
        raise StartError(f"Backend {spec!r}: {name!r} is not callable.")
    return target


def takes_parameters(function: Any) -> bool:
    """Whether the function can be called with `parameters=`."""
    try:
        declared = inspect.signature(function).parameters.get("parameters")
    except (TypeError, ValueError):  # Not callable, or without a signature, as some functions of C.
        return False
    return declared is not None and declared.kind in (declared.POSITIONAL_OR_KEYWORD, declared.KEYWORD_ONLY)


class FunctionBackend:
    """Runs a user's function or object; `target` is the result of `find_target`."""

    def __init__(self, spec: str, target: Any) -> None:
        self.version = spec
        self._target = target
        self._predict: Callable[..., Any] = target
        self._loop = asyncio.Runner()
        self._find_readers()

    def load(self) -> None:
        """Create the object of a class, and call its `load`."""
        if isinstance(self._target, type):
            self._target = self._target()
        self._predict = getattr(self._target, "predict", self._target)
        self._call_if_there("load")
        self._find_readers()
        self.version = str(getattr(self._target, "version", self.version))

    def warmup(self) -> None:
        """Call the object's `warmup`, if it has one."""
        self._call_if_there("warmup")

    def health(self) -> None:
        """Call the object's `health`, else its `warmup`. Raises Unwell if it returns False, or what it raises."""
        method = getattr(self._target, "health", None)
        if not callable(method):
            self.warmup()
        elif self._finished(method()) is False:
            raise Unwell("The model's health check returned False.")

    def rejection(self, item: Item) -> ItemResult | None:
        """The result of an item with a parameter that a method which may run it does not take; None for others."""
        embeds = item.task is Task.EMBED
        if not item.parameters or (embeds and not callable(getattr(self._target, "embed", None))):
            return None
        methods = ("embed",) if embeds else self._text_methods
        if self._readers.issuperset(methods):
            return None
        unread = [name for name in item.parameters if embeds or name not in IGNORED]
        if not unread:
            return None
        why = "is not a parameter of this model; it reads none."
        if not self._readers.isdisjoint(methods):
            why = "cannot be read: `generate` and `predict` of this model must both take `parameters`."
        return ItemResult(f"parameters.{unread[0]} {why}", 0, ErrorCode.INVALID_REQUEST)

    def run(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        """Call the function with at most 100 inputs at a time. Raises InvalidOutput for a wrong number of outputs."""
        results: list[ItemResult] = []
        for start in range(0, len(items), MAX_STRINGS):
            part = items[start : start + MAX_STRINGS]
            results += by_task(part, lambda texts: self._texts(texts, progress), self._vectors)
            progress()
        return results

    def _texts(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        prompts, generate = [prompt_of(item, self._template) for item in items], getattr(self._target, "generate", None)
        if callable(generate) and any(item.listener is not None for item in items):
            try:
                callback = stream_callback(items, progress)
                outputs = self._finished(generate(prompts, callback, **self._parameters("generate", items)))
            except OutputsUnwanted as ended:
                return [
                    TOO_LATE if item.listener is None else ItemResult(text)
                    for item, text in zip(items, ended.texts, strict=True)
                ]
        else:
            outputs = self._predict(prompts, **self._parameters("predict", items))
        return as_results(self._finished(outputs), len(items))

    def _vectors(self, items: Sequence[Item]) -> list[ItemResult]:
        embed = getattr(self._target, "embed", None)
        if not callable(embed):
            return [NO_EMBEDDINGS] * len(items)
        vectors = embed([item.input for item in items], **self._parameters("embed", items))
        return as_vectors(self._finished(vectors), len(items))

    def _find_readers(self) -> None:
        """Note which methods take parameters, and which of them may run a text: a stream in a batch decides between both."""
        methods = {name: getattr(self._target, name, None) for name in ("generate", "embed")}
        self._readers = {name for name, method in methods.items() if takes_parameters(method)}
        self._readers |= {"predict"} if takes_parameters(self._predict) else set()
        self._text_methods = ("predict", "generate") if callable(methods["generate"]) else ("predict",)

    def _parameters(self, method: str, items: Sequence[Item]) -> dict[str, list[dict[str, Any]]]:
        """The further argument of a method: a dictionary for each item, which the model may change; {} if it takes none."""
        return {"parameters": [dict(item.parameters) for item in items]} if method in self._readers else {}

    def _template(self, messages: Sequence[PromptMessage]) -> str:
        own = getattr(self._target, "chat_template", None)
        if not callable(own):
            return named_turns(messages)
        text = own([{"role": message.role, "content": message.content} for message in messages])
        if not isinstance(text, str):
            raise InvalidOutput("The model's chat_template returned no text.")
        return str(text)

    def close(self) -> None:
        """Call the object's `close`, if it has one, and close the event loop."""
        self._call_if_there("close")
        self._loop.close()

    def _call_if_there(self, name: str) -> None:
        method = getattr(self._target, name, None)
        if callable(method):
            self._finished(method())

    def _finished(self, value: Any) -> Any:
        return self._loop.run(_wait(value)) if inspect.isawaitable(value) else value


def as_results(outputs: Any, expected: int) -> list[ItemResult]:
    """One result for each output; one that is no string fails alone. Raises InvalidOutput for a wrong number."""
    if not isinstance(outputs, list | tuple) or isinstance(outputs, ModelOutput):
        raise InvalidOutput("The model did not return a list of strings.")
    if len(outputs) != expected:
        raise InvalidOutput(f"The model returned {len(outputs)} outputs for {expected} inputs.")
    return [_counted(output, _text_result) for output in outputs]


def as_vectors(vectors: Any, expected: int) -> list[ItemResult]:
    """One result for each vector; an invalid one fails alone. Raises InvalidOutput for a wrong number of vectors."""
    if not isinstance(vectors, list | tuple) or isinstance(vectors, ModelOutput) or len(vectors) != expected:
        raise InvalidOutput("The model did not return a vector for each input.")
    return [_counted(vector, _vector_result) for vector in vectors]


def _counted(output: Any, result_of: Callable[[Any], ItemResult]) -> ItemResult:
    """The result of an output: plain, or a `ModelOutput`, whose counts or error it gets."""
    if not isinstance(output, ModelOutput):
        return result_of(output)
    if output.error:
        sentence = _text_result(output.error)
        return sentence if sentence.error_code else ItemResult(sentence.output, 0, ErrorCode.INVALID_REQUEST)
    result = result_of(output.output)
    try:
        read, written = operator.index(output.input_tokens), operator.index(output.output_tokens)
    except TypeError:
        return BAD_COUNTS
    if result.error_code:
        return result
    if not (0 <= read <= MOST_TOKENS and 0 <= written <= MOST_TOKENS) or output.finish_reason not in FINISH_REASONS:
        return BAD_COUNTS
    return ItemResult(result.output, read + written, "", written, str(output.finish_reason))


def _text_result(text: Any) -> ItemResult:
    if not isinstance(text, str):
        return ItemResult("The model's output is not a string.", 0, ErrorCode.INVALID_OUTPUT)
    try:
        return ItemResult(text.encode().decode())  # A plain str, whatever the subclass.
    except UnicodeEncodeError:
        return ItemResult("The model's output is not valid Unicode.", 0, ErrorCode.INVALID_OUTPUT)


def _vector_result(vector: Any) -> ItemResult:
    if isinstance(vector, str | bytes | Mapping):  # float() would accept their elements.
        return NO_VECTOR
    try:
        return ItemResult(write_vector([float(value) for value in vector]))
    except (TypeError, ValueError, OverflowError):
        return NO_VECTOR


async def _wait(value: Any) -> Any:
    return await value
