"""What `tiny` answers: how texts end, what is counted, that they are text, and that they read as English."""

from __future__ import annotations

import re

import pytest

from gpu_pool.backends.generation import Generation, GenerationParameters
from gpu_pool.backends.tiny import TinyModel
from gpu_pool.backends.tiny.model import BEGIN, END, NetworkShape
from gpu_pool.backends.tiny.row import TinySequence

PROMPTS = ["What is a compiler?", "The kernel is", "A hacker is someone who", "", "In the early days of the network,"]

WORDS = """
a about above after all also an and another any are as at be because been before being between but by can could do
does done down each even ever every few first for from get given go good had has have he her here him his how i if
in into is it its just kind know known large less like line long machine made make man many may means memory might
more most much must name never new next no not now number of off often old on once one only or order other others
our out over own part people place point problem program programmer programmers programs read really right running
said same say see sense set she should show since small so some someone something sometimes software still such
system systems take term than that the their them then there these they thing things think this those though
through time to too two under unix up upon us use used user users uses usually version very was way we well were
what when where which while who whole why will with without word words work world would write written year years
yet you your code computer computers data file hacker hackers hack language network operating process used
"""
COMMON_WORDS = frozenset(WORDS.split())


@pytest.fixture(scope="module")
def model() -> TinyModel:
    """The shipped model on the CPU."""
    return TinyModel.load("cpu")


def answer(model: TinyModel, prompt: str, parameters: GenerationParameters) -> Generation:
    """Answer one prompt."""
    return model.generate([prompt], [parameters])[0]


def test_the_version_is_named(model: TinyModel) -> None:
    """Answers carry the version of the weights that made them."""
    assert model.version == "tiny-1"


def test_greedy_text_reads_as_english(model: TinyModel) -> None:
    """Among the whole words of greedy answers at least 60 % are common ones; random letters give none."""
    answers = model.generate(PROMPTS, [GenerationParameters(max_tokens=160)] * len(PROMPTS))
    words = [word for text in answers for word in re.findall(r"[a-z]+", text.text.lower())[1:-1]]
    assert len(words) > 60
    assert sum(word in COMMON_WORDS for word in words) / len(words) > 0.6


def test_every_prompt_brings_some_text(model: TinyModel) -> None:
    """The end mark is not taken before there is text, an empty prompt included."""
    prompts = [*PROMPTS, "kernel: The core of a system.", "\n", "See also hacker.", "日本語"]
    for text in model.generate(prompts, [GenerationParameters()] * len(prompts)):
        assert text.text.strip()


def test_max_tokens_ends_the_text(model: TinyModel) -> None:
    """A text cut by max_tokens has that many bytes and says so; a shorter one is its beginning."""
    long = answer(model, PROMPTS[1], GenerationParameters(max_tokens=24))
    short = answer(model, PROMPTS[1], GenerationParameters(max_tokens=9))
    assert (long.finish_reason, long.tokens_out, short.tokens_out) == ("length", 24, 9)
    assert long.text[:9] == short.text


def test_the_prompt_is_counted_in_bytes(model: TinyModel) -> None:
    """tokens_in is the UTF-8 length; a prompt over the context counts what was read."""
    one = GenerationParameters(max_tokens=1)
    assert [answer(model, prompt, one).tokens_in for prompt in ("", "abc", "né", "x" * 2000)] == [0, 3, 3, 510]


def test_a_long_prompt_keeps_its_end(model: TinyModel) -> None:
    """Only the last bytes of an over-long prompt are read, so what stood before does not matter."""
    tail = "the machine waits for the network. " * 20
    wish = GenerationParameters(max_tokens=16)
    assert answer(model, "first " * 500 + tail, wish) == answer(model, "other " * 900 + tail, wish)


def test_text_ends_before_a_stop_string(model: TinyModel) -> None:
    """The text is what came before the stop string's first place, and the reason is `stop`."""
    free = answer(model, PROMPTS[2], GenerationParameters(max_tokens=40))
    stop = free.text[10:13]
    stopped = answer(model, PROMPTS[2], GenerationParameters(max_tokens=40, stop=("\x00", stop)))
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert stopped.tokens_out == len(stopped.text) + len(stop)


@pytest.mark.parametrize(
    ("drawn", "stops", "text"),
    [("xab", ("b", "ab"), "x"), ("xab", ("ab", "b"), "x"), ("a\n\nb", ("\n\n",), "a"), ("né", ("é",), "n")],
)
def test_stop_strings_that_end_together_cut_at_the_earliest(drawn: str, stops: tuple[str, ...], text: str) -> None:
    """Byte by byte: the row ends with the stop string's last byte, and the text before the one that began first."""
    row = TinySequence([BEGIN], GenerationParameters(stop=stops), [])
    for byte in drawn.encode():
        if row.finished is None:
            row.take(byte)
    assert (row.result().text, row.finished) == (text, "stop")


def test_the_end_mark_ends_a_row() -> None:
    """The model's own end mark is not text and is not counted."""
    row = TinySequence([BEGIN, 97], GenerationParameters(), [])
    for token in (98, END):
        row.take(token)
    assert row.result() == Generation("b", 1, 1, "stop")


def test_a_stop_string_may_be_the_whole_text(model: TinyModel) -> None:
    """When the first bytes are the stop string the text is empty."""
    first = answer(model, PROMPTS[0], GenerationParameters(max_tokens=2)).text
    assert answer(model, PROMPTS[0], GenerationParameters(stop=(first,))).text == ""


def test_a_seed_brings_the_same_text_again(model: TinyModel) -> None:
    """Same seed, same text; other seeds, other texts; no seed, chance."""
    wishes = [GenerationParameters(1.0, seed=seed) for seed in (1, 1, 2, -(2**63), 2**63 - 1, None, None)]
    texts = [text.text for text in model.generate([PROMPTS[0]] * len(wishes), wishes)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == len(texts) - 1


def test_hot_draws_are_still_valid_text(model: TinyModel) -> None:
    """At temperature 2, after prompts of many scripts, every text is valid UTF-8 with no lone surrogate."""
    prompts = ["日本語", "naïve é", "\x00\x7f", "\ud800 lone", "🙂" * 300, "plain"] * 3
    wishes = [GenerationParameters(2.0, max_tokens=32, seed=seed) for seed in range(len(prompts))]
    for text in model.generate(prompts, wishes):
        assert text.text.encode("utf-8").decode("utf-8") == text.text


def test_each_pass_is_reported(model: TinyModel) -> None:
    """on_step is called after each layer and for each byte of the longest row, which a watchdog reads as progress."""
    steps = list[int]()
    wishes = [GenerationParameters(max_tokens=count) for count in (2, 9)]
    answers = model.generate(PROMPTS[1:3], wishes, on_step=lambda: steps.append(1))
    layers = NetworkShape().layers
    assert max(text.tokens_out for text in answers) == 9
    assert len(steps) == 9 * (layers + 1)


def test_a_batch_of_nothing_is_nothing(model: TinyModel) -> None:
    """No prompts, no answers; a list of parameters that does not match is refused."""
    assert model.generate([], []) == []
    with pytest.raises(ValueError, match="shorter"):
        model.generate(["a", "b"], [GenerationParameters()])
