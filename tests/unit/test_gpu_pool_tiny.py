"""The model `tiny`: pinned weights, text quality, stop strings, and rows that do not depend on their batch."""

import math
import random
import re
from pathlib import Path

import pytest
import torch

from gpu_pool.backends.backend import InvalidOutput, Item
from gpu_pool.backends.generation import Generation, GenerationParameters
from gpu_pool.backends.tiny import sampling
from gpu_pool.backends.tiny.backend import TinyBackend
from gpu_pool.backends.tiny.generate import TinyModel
from gpu_pool.backends.tiny.model import BEGIN, END, PATH, WeightsError, load_network
from gpu_pool.backends.tiny.row import StreamBuffer, TinySequence
from scheduler.errors import StartError
from scheduler.payload import Task
from scheduler.vectors import read_vector

CPU = torch.device("cpu")
PROMPTS = ["What is a compiler?", "The kernel is", "A hacker is someone who", "", "In the early days of the network,"]
TEXT = (
    "A program that answers many callers should answer each as if the others were not there. Ein Gerät, "
    "das zählt; 日本語のテキスト; and a line\nthat ends. What happens when the queue is full? Nothing is lost: "
    "the machine waits, the network waits, and the hacker at the keyboard waits with them until morning. "
)
WORDS = (
    "a about all an and are as at be been but by can could do does for from get has have if in into is it its like may more not "
    "of often on one only or other out program see so some system than that the their them then there they this time to two "
    "unix up use used user users very was when where which who with word words you your computer hacker"
)
COMMON_WORDS = frozenset(WORDS.split())


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel.load("cpu")


@pytest.fixture(scope="module")
def backend() -> TinyBackend:
    backend = TinyBackend("cpu", 1)
    backend.load()
    return backend


def test_weights_are_pinned(tmp_path: Path) -> None:
    """The shipped file is small and float32; a file that is missing or differs in one bit is rejected."""
    network = load_network(CPU)
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    assert PATH.stat().st_size < 8_000_000
    changed = tmp_path / "tiny.safetensors"
    with pytest.raises(WeightsError, match="cannot be read"):
        load_network(CPU, changed)
    data = bytearray(PATH.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    with pytest.raises(WeightsError, match=r"has SHA-256 [0-9a-f]{64}, but tiny-1 was released with [0-9a-f]{64}"):
        load_network(CPU, changed)


@pytest.mark.parametrize(
    ("device", "count", "found"), [("cuda:7", 2, "cuda:0, cuda:1"), ("cuda:1", 1, "cuda:0"), ("cuda", 0, "no GPU")]
)
def test_a_missing_gpu_is_a_start_error(device: str, count: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the setting and the GPUs that exist."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    with pytest.raises(StartError, match=rf"^TIERLANE_DEVICE={device}: torch finds {found}\. Set "):
        TinyBackend(device, 1).load()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scores_that_are_not_finite_are_invalid_output(value: float) -> None:
    """A broken device computes NaN without an error."""
    network = load_network(CPU)
    with torch.no_grad():
        network.scores.weight[0, 0] = value
    backend = TinyBackend("cpu", 1)
    backend._model = TinyModel(network, CPU)

    with pytest.raises(InvalidOutput, match="not finite"):
        backend.run([Item("Once upon a time", {"max_tokens": 4})], lambda: None)
    with pytest.raises(FloatingPointError):
        backend.warmup()


def test_greedy_text_is_english(model: TinyModel) -> None:
    """At least 60 % of the whole words are common ones; every prompt gives some text."""
    results = model.generate(PROMPTS, [GenerationParameters(max_tokens=160)] * len(PROMPTS))
    words = [word for result in results for word in re.findall(r"[a-z]+", result.text.lower())[1:-1]]
    assert len(words) > 60
    assert sum(word in COMMON_WORDS for word in words) / len(words) > 0.6

    prompts = [*PROMPTS, "kernel: The core of a system.", "\n", "See also hacker.", "日本語"]
    assert all(r.text.strip() for r in model.generate(prompts, [GenerationParameters()] * len(prompts)))


def test_tokens_are_bytes_and_long_prompts_keep_their_end(model: TinyModel) -> None:
    """A prompt over the context counts what was read, and its beginning has no effect."""
    one, tail = GenerationParameters(max_tokens=1), "the machine waits for the network. " * 20
    generated = model.generate(["", "abc", "né", "x" * 2000, "first " * 500 + tail, "other " * 900 + tail], [one] * 6)

    assert [result.tokens_in for result in generated[:4]] == [0, 3, 3, 510]
    assert generated[4] == generated[5]
    with pytest.raises(ValueError, match="shorter"):
        model.generate(["a", "b"], [one])


@pytest.mark.parametrize(
    ("drawn", "stops", "text"),
    [("xab", ("b", "ab"), "x"), ("xab", ("ab", "b"), "x"), ("a\n\nb", ("\n\n",), "a"), ("né", ("é",), "n")],
)
def test_text_ends_before_the_earliest_stop_string(drawn: str, stops: tuple[str, ...], text: str) -> None:
    """Byte by byte; the model's own end mark is no text and is not counted."""
    row = TinySequence([BEGIN], GenerationParameters(stop=stops), None)
    for byte in drawn.encode():
        if row.finished is None:
            row.take(byte)
    assert (row.result().text, row.finished) == (text, "stop")

    row = TinySequence([BEGIN, 97], GenerationParameters(), None)
    for token in (98, END):
        row.take(token)
    assert row.result() == Generation("b", 1, 1, "stop")


def test_streamed_text_is_never_taken_back() -> None:
    """Byte by byte: no partial characters, nothing of a stop string, and the pieces are the whole text."""

    class Listener:
        gone = late = False
        text = ""

        def emit(self, offset: int, text: str) -> None:
            assert offset == len(self.text)
            self.text += text

    text = "naïve 😀 end"
    drawn, listener = text.encode() + b"STOP", Listener()
    stream = StreamBuffer(listener, [b"STOP", b"TOPS"])
    for length in range(1, len(drawn)):
        stream.update(drawn[:length])
        assert text.startswith(listener.text)
    stream.finish(text.encode())
    stream.finish(text.encode())

    assert listener.text == text


def test_seeds_and_valid_text(model: TinyModel) -> None:
    """Same seed, same text; no seed, random text; at temperature 2 all text is valid UTF-8."""
    seeded = [GenerationParameters(1.0, seed=seed) for seed in (1, 1, 2, -(2**63), 2**63 - 1, None, None)]
    texts = [result.text for result in model.generate(PROMPTS[:1] * len(seeded), seeded)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == len(texts) - 1

    prompts = ["日本語", "naïve é", "\x00\x7f", "\ud800 lone", "🙂" * 300, "plain"] * 3
    hot = [GenerationParameters(2.0, max_tokens=32, seed=seed) for seed in range(len(prompts))]
    assert all(result.text.encode().decode() == result.text for result in model.generate(prompts, hot))


def prompts_of(generator: random.Random, count: int) -> list[str]:
    """Random parts of TEXT with 0 to 300 characters."""
    starts = [generator.randrange(len(TEXT)) for _ in range(count)]
    return [(TEXT * 2)[start : start + generator.choice([0, 1, 7, 30, 90, 300])] for start in starts]


@pytest.mark.parametrize("noise", [None, 1e9], ids=["usual", "every choice from the row alone"])
def test_rows_do_not_depend_on_their_batch(model: TinyModel, monkeypatch: pytest.MonkeyPatch, noise: float) -> None:
    """Greedy and seeded rows of mixed lengths give the same text alone and in shuffled batches of many sizes."""
    generator = random.Random(4)
    prompts = prompts_of(generator, 12)
    parameters = [GenerationParameters(max_tokens=generator.choice([3, 16, 24])) for _ in prompts[:6]]
    parameters += [GenerationParameters(generator.choice([0.5, 1.0, 1.5]), 0.9, 20, seed) for seed in range(6)]
    alone = [model.generate([prompt], [each])[0] for prompt, each in zip(prompts, parameters, strict=True)]
    if noise is not None:
        monkeypatch.setattr(sampling, "NOISE", noise)
    for size in (2, 5, 12):
        order = generator.sample(range(len(prompts)), len(prompts))
        for at in range(0, len(order), size):
            batch = order[at : at + size]
            results = model.generate(
                [*(prompts[i] for i in batch), "unseeded"],
                [*(parameters[i] for i in batch), GenerationParameters(1.0, max_tokens=5)],
            )
            assert results[:-1] == [alone[i] for i in batch]


def test_embeddings_have_length_one_and_ignore_padding(backend: TinyBackend) -> None:
    """A token is a byte; a text longer than the context is read whole."""
    texts = ["The cat sat.", "", "é" * 700]
    alone = [read_vector(backend.run([Item(text, {}, Task.EMBED)], lambda: None)[0].output) for text in texts]
    results = backend.run([Item(text, {}, Task.EMBED) for text in texts], lambda: None)

    assert [result.tokens_used for result in results] == [12, 0, 1400]
    for one, result in zip(alone, results, strict=True):
        vector = read_vector(result.output)
        assert math.hypot(*vector) == pytest.approx(1.0, abs=1e-5)
        assert vector == pytest.approx(one, abs=1e-4)
