"""`hf:DIR` with a causal language model: small networks of chance, since what is tested is how they are run."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpu_pool.backends.backend import TOO_LATE, InvalidOutput, Item
from gpu_pool.backends.hf.backend import HfBackend
from hf_models import CONTEXT, SENTENCES, STRICT, change_config, make_causal
from scheduler.errors import StartError
from scheduler.payload import PromptMessage, Task, encode_messages

MIXED = ["", "Once", "What happens when the queue is full?", SENTENCES[2], "Once upon a time there was a machine " * 2]


class Reader:
    """A listener that stays."""

    gone = late = False

    def __init__(self) -> None:
        self.text = ""

    def say(self, offset: int, text: str) -> None:
        self.text = self.text[:offset] + text


def backend_of(folder: Path, dtype: str = "float32") -> HfBackend:
    backend = HfBackend(str(folder), "cpu", 1, dtype)
    backend.load()
    return backend


@pytest.fixture(scope="module", params=["llama", "gpt2", "mistral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of each kind: rotary positions, learnt ones, and a cache that forgets."""
    return make_causal(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def backend(folder: Path) -> HfBackend:
    """It, loaded."""
    return backend_of(folder)


def run(backend: HfBackend, *prompts: str, **parameters: Any) -> list[str]:
    items = [Item(prompt, {"max_tokens": 24} | parameters) for prompt in prompts]
    return [result.output for result in backend.run(items, lambda: None)]


def reference(folder: Path, prompt: str, count: int) -> list[int]:
    """The likeliest tokens one by one, by the bare network without cache or padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = tokenizer(prompt)["input_ids"]
    before = len(tokens)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(network(torch.tensor([tokens])).logits[0, -1].argmax()))
    return list(tokens[before:])


def test_greedy_in_a_batch_of_mixed_lengths_is_what_each_prompt_gives_alone(backend: HfBackend) -> None:
    """Left padding, mask and positions leave no trace."""
    alone = [run(backend, prompt)[0] for prompt in MIXED]

    assert alone == run(backend, *MIXED)
    assert alone[::-1] == run(backend, *MIXED[::-1])
    assert len(set(alone)) == len(MIXED)


def test_greedy_is_what_the_bare_network_says(folder: Path, backend: HfBackend) -> None:
    """The same tokens as without cache, batch or padding; the model's own end mark ends it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt in MIXED[1:]:
        drawn = reference(folder, prompt, 24)
        until = drawn.index(1) if 1 in drawn else len(drawn)
        expected = tokenizer.decode(drawn[:until], skip_special_tokens=True).rstrip("\ufffd")

        assert run(backend, "pad " * 20, prompt)[1] == expected


def test_each_row_has_its_own_length(backend: HfBackend) -> None:
    """Rows end and leave one after the other; who stays is not disturbed."""
    counts = [1, 30, 2, 17, 3, 9]
    items = [Item("Once upon", {"max_tokens": count}) for count in counts]

    results = backend.run(items, lambda: None)

    longest = results[1].output
    assert counts == [result.output_tokens for result in results]
    assert {"length"} == {result.finish_reason for result in results}
    assert all(longest.startswith(result.output) for result in results)


def test_the_models_own_end_mark_ends_a_row(tmp_path: Path) -> None:
    """Whichever of its tokens the generation's settings name; it is no part of the text."""
    folder = make_causal(tmp_path)
    drawn = reference(folder, "Once", 12)
    first = next(place for place, token in enumerate(drawn) if place >= 3 and token not in drawn[:place])
    free = run(backend_of(folder), "Once", max_tokens=first)[0]
    change_config(folder, "generation_config.json", eos_token_id=[1, drawn[first]])

    (result,) = backend_of(folder).run([Item("Once", {"max_tokens": 24})], lambda: None)

    assert (result.output, result.output_tokens, result.finish_reason) == (free, first, "stop")


def test_a_stop_string_is_never_shown(backend: HfBackend) -> None:
    """Neither in the answer nor to who reads along, however tokens cut it; the text ends right before it."""
    (whole,) = run(backend, "Once upon", max_tokens=40)
    assert len(whole) > 12
    for begin in range(2, 10):
        stop = whole[begin : begin + 3]
        reader = Reader()
        items = [Item("Once upon", {"max_tokens": 40, "stop": [stop, "\x00\x00"]}, listener=reader) for _ in range(1)]

        (result,) = backend.run(items, lambda: None)

        assert result.output == whole[: whole.index(stop)] == reader.text
        assert result.finish_reason == "stop"
        assert run(backend, "Once upon", max_tokens=40, stop=stop) == [result.output]


def test_seeds_are_reproducible_whatever_the_batch(backend: HfBackend) -> None:
    """A row's chance is its own."""
    wishes = [{"temperature": 0.5 + seed / 4, "top_p": 0.95, "seed": seed, "max_tokens": 16} for seed in range(8)]
    items = [Item(MIXED[seed % 5], wish) for seed, wish in enumerate(wishes)]
    alone = [backend.run([item], lambda: None)[0] for item in items]
    noise = [Item("noise", {"temperature": 1.0}), Item("noise " * 9, {"max_tokens": 3})]

    assert alone[::-1] == backend.run([*noise, *items[::-1]], lambda: None)[2:]
    assert len({result.output for result in alone}) == len(alone)


def rounding(_network: Any, _args: Any, asked: dict[str, Any], said: Any) -> Any:
    """What another batch does to scores; a row that is computed alone is not touched."""
    if asked["use_cache"]:
        said.logits = said.logits + (torch.rand_like(said.logits) - 0.5) * 1e-4
    return said


def test_a_choice_that_rounding_could_turn_is_made_from_the_row_alone(tmp_path: Path) -> None:
    """Of tokens that nearly tie, neighbours must not decide which is taken."""
    backend = backend_of(make_causal(tmp_path))
    network: Any = backend._loaded()._network  # type: ignore[attr-defined]
    network.lm_head.weight[2::2] = network.lm_head.weight[3::2] * (1 + 1e-7)
    wishes: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 5}]
    items = [Item("Once upon", {"max_tokens": 16} | wish) for wish in wishes]
    quiet = backend.run(items, lambda: None)
    network.register_forward_hook(rounding, with_kwargs=True)

    assert [quiet] * 4 == [backend.run(items, lambda: None) for _ in range(4)]


def test_without_a_seed_chance_is_free(backend: HfBackend) -> None:
    """Two rows of one batch differ."""
    one, other = run(backend, "Once upon", "Once upon", temperature=1.5)

    assert one != other


def test_a_prompt_that_fills_the_context_is_refused(backend: HfBackend) -> None:
    """In words, and alone; what fits almost is cut where the context ends."""
    items = [Item("日本" * CONTEXT, {}), Item("x", {"max_tokens": 4000})]

    refused, cut = backend.run(items, lambda: None)

    assert refused.error_code == "invalid_request"
    assert f"the model reads less than {CONTEXT}" in refused.output
    assert (cut.finish_reason, cut.tokens_used) in {("length", CONTEXT), ("stop", cut.tokens_used)}


def test_a_row_whose_time_is_over_ends_alone(folder: Path) -> None:
    """Before its process would be ended for it; the neighbours have their answers."""
    backend = backend_of(folder)
    now = time.monotonic()
    items = [Item("Once", {"max_tokens": 9}, until=now - 1), Item("Once", {"max_tokens": 9}, until=now + 600)]

    late, good = backend.run(items, lambda: None)

    assert (late, good.error_code, good.output_tokens) == (TOO_LATE, "", 9)


def test_scores_that_are_not_finite_are_no_answer(folder: Path) -> None:
    """A broken device computes NaN without an error, and any text made of it would be nonsense."""
    backend = backend_of(folder)
    backend._loaded()._network.get_output_embeddings().weight[0, 0] = torch.nan  # type: ignore[attr-defined]

    with pytest.raises(InvalidOutput, match="not finite"):
        backend.run([Item("Once", {"max_tokens": 4})], lambda: None)
    with pytest.raises(InvalidOutput):
        backend.health()


def chat(*messages: PromptMessage) -> Item:
    return Item(encode_messages(list(messages)), {"max_tokens": 8}, Task.CHAT)


def test_a_conversation_is_put_into_the_tokenizers_template(backend: HfBackend) -> None:
    """`developer` is told as `system`, which templates know."""
    said = [PromptMessage("developer", "Be brief."), PromptMessage("user", "Once?")]

    (answer,) = backend.run([chat(*said)], lambda: None)

    assert [answer.output] == run(backend, "<system>Be brief.<user>Once?<assistant>", max_tokens=8)


def test_without_a_template_turns_are_named(tmp_path: Path) -> None:
    """As for a plain function."""
    backend = backend_of(make_causal(tmp_path, template=None))

    (answer,) = backend.run([chat(PromptMessage("user", "Once?"))], lambda: None)

    assert [answer.output] == run(backend, "user: Once?\nassistant:", max_tokens=8)


def test_what_a_template_refuses_fails_alone(tmp_path: Path) -> None:
    """Many take no system message, or no two turns of one side."""
    backend = backend_of(make_causal(tmp_path, template=STRICT))

    refused, good = backend.run([chat(PromptMessage("system", "x")), chat(PromptMessage("user", "x"))], lambda: None)

    assert (refused.error_code, good.error_code) == ("invalid_request", "")
    assert "chat template" in refused.output


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_shorter_numbers_are_what_the_flag_says(folder: Path, dtype: str) -> None:
    """The network is in them, and answers."""
    backend = backend_of(folder, dtype)

    assert backend._loaded()._network.dtype == getattr(torch, dtype)  # type: ignore[attr-defined]
    assert backend.run([Item("Once", {"max_tokens": 3})], lambda: None)[0].error_code == ""


def lose_a_tensor(folder: Path) -> None:
    """One layer more than there are weights for."""
    change_config(folder, num_hidden_layers=3, layer_types=None)


def foreign_code(folder: Path) -> None:
    change_config(
        folder, model_type="own-kind", auto_map={"AutoModelForCausalLM": "code.Model", "AutoConfig": "code.C"}
    )
    (folder / "code.py").write_text("raise SystemExit('the code of the directory ran')")


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lose_a_tensor, "its weights lack"),
        (foreign_code, "transformers cannot load"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"no weights"),
            "transformers cannot load its model",
        ),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "transformers cannot load its tokenizer"),
    ],
)
def test_what_transformers_cannot_load_is_one_sentence(
    tmp_path: Path, spoil: Callable[[Path], None], fault: str
) -> None:
    """Weights that are missing are never made up by chance, and no code of the directory runs."""
    folder = make_causal(tmp_path)
    spoil(folder)

    with pytest.raises(StartError) as caught:
        backend_of(folder)

    assert str(caught.value).startswith(f"Backend 'hf:{folder}': ")
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)
