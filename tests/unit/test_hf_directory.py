"""`hf:DIR`: what is wrong with a directory is told in one sentence, before torch or transformers are imported."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_pool.backends.hf.backend import HfBackend
from gpu_pool.backends.hf.directory import SentenceLayout, Unusable, read_directory
from scheduler.errors import StartError

MODULES = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.fixture
def causal(tmp_path: Path) -> Path:
    """What a causal model's directory holds, as far as it is looked at."""
    folder = tmp_path / "my-model"
    write(folder / "config.json", {"architectures": ["LlamaForCausalLM"]})
    write(folder / "model.safetensors", "weights")
    write(folder / "tokenizer.json", {})
    return folder


@pytest.fixture
def sentences(causal: Path) -> Path:
    """The layout of sentence-transformers."""
    write(causal / "config.json", {"architectures": ["BertModel"]})
    write(causal / "modules.json", MODULES)
    write(causal / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False})
    write(causal / "sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": False})
    return causal


def shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    write(folder / "model.safetensors.index.json", {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    write(folder / "one.safetensors", "weights")


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def architecture(name: str) -> Callable[[Path], None]:
    return lambda folder: write(folder / "config.json", {"architectures": [name]})


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: write(folder / "config.json", "{"), "config.json is no JSON"),
        (lambda folder: write(folder / "config.json", []), "config.json is no JSON object"),
        (architecture("T5ForConditionalGeneration"), "its architecture is T5ForConditionalGeneration: a causal"),
        (architecture("BertModel"), "its architecture is BertModel: a causal"),
        (lambda folder: (folder / "model.safetensors").unlink(), "it has no model.safetensors"),
        (pickle_only, "its weights are a pickle (pytorch_model.bin), which could run code"),
        (shard, "two.safetensors, which model.safetensors.index.json names, is missing"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "it has no tokenizer"),
        (lambda folder: write(folder / "modules.json", [{}]), "modules.json is no list of modules"),
        (lambda folder: write(folder / "modules.json", MODULES[:1]), "does not name a Transformer and its Pooling"),
    ],
)
def test_every_fault_is_named(causal: Path, spoil: Callable[[Path], None], fault: str) -> None:
    """A worker refuses to start with one sentence that says what to mend."""
    spoil(causal)

    with pytest.raises(StartError) as caught:
        HfBackend(str(causal), "cpu", 1).load()

    assert str(caught.value).startswith(f"Backend 'hf:{causal}': ")
    assert fault in str(caught.value)


def test_a_package_that_is_missing_is_named(causal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the extra that brings it."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "gpu_pool.backends.hf.loading", raising=False)

    with pytest.raises(StartError, match="needs the package 'transformers'; install the extra 'hf'"):
        HfBackend(str(causal), "cpu", 1).load()


def test_a_directory_that_is_not_there_is_named() -> None:
    """Nothing is looked for elsewhere."""
    with pytest.raises(Unusable, match="there is no such directory"):
        read_directory(Path("surely/not/here"))


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("modules.json", [*MODULES, {"path": "3", "type": "x.Dense"}], "its module Dense is not supported"),
        ("modules.json", [{"path": "../..", "type": "x.Transformer"}, *MODULES[1:]], "which is outside of it"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "its pooling (pooling_mode_max_tokens)"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "its pooling (lasttoken)"),
        ("1_Pooling/config.json", {}, "its pooling (none)"),
    ],
)
def test_steps_that_would_be_another_vector_are_refused(sentences: Path, name: str, value: object, fault: str) -> None:
    """Leaving a step out would give vectors that look right and are not."""
    write(sentences / name, value)

    with pytest.raises(Unusable) as caught:
        read_directory(sentences)

    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_the_sentence_layout_is_read(sentences: Path, pooling: dict[str, object], mode: str) -> None:
    """The transformer's folder, the pooling, and how much of a text counts."""
    write(sentences / "1_Pooling" / "config.json", pooling)

    assert SentenceLayout(sentences, mode, 256, False) == read_directory(sentences).sentences


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_the_version_tells_one_state_from_another(causal: Path, name: str) -> None:
    """The directory's name, and a hash that a change of configuration, tokenizer or weights changes."""
    before, again = read_directory(causal).version, read_directory(causal).version
    text = (causal / name).read_text()
    write(causal / name, text + " ")

    after = read_directory(causal).version

    assert before == again != after
    assert before.startswith("my-model-")
    assert len(before) == len("my-model-") + 8


def test_shards_count_as_weights(causal: Path) -> None:
    """A large model's weights are several files that an index names."""
    shard(causal)
    write(causal / "two.safetensors", "weights")

    assert read_directory(causal).sentences is None
