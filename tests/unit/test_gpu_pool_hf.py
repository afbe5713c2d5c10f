"""`hf:DIR` without torch: checks of the model directory, and its version."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_pool.backends.hf.backend import HfBackend
from gpu_pool.backends.hf.directory import read_directory
from gpu_pool.backends.hf.json_file import Unusable
from gpu_pool.backends.hf.sentence_layout import SentenceLayout
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
    """The files of a causal model that are checked."""
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


def content(name: str, value: object) -> Callable[[Path], None]:
    return lambda folder: write(folder / name, value)


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (without("config.json"), "config.json is missing"),
        (content("config.json", []), "config.json is no JSON object"),
        (content("config.json", {"architectures": ["BertModel"]}), "its architecture is BertModel: a causal"),
        (without("model.safetensors"), "it has no model.safetensors"),
        (pickle_only, "its weights are a pickle (pytorch_model.bin), which could run code"),
        (shard, "two.safetensors, which model.safetensors.index.json names, is missing"),
        (without("tokenizer.json"), "it has no tokenizer"),
        (content("modules.json", [{}]), "modules.json is no list of modules"),
        (content("modules.json", MODULES[:1]), "does not name a Transformer and its Pooling"),
        (shutil.rmtree, "there is no such directory"),
        (lambda _: None, "needs the package 'transformers'; install the extra 'hf'"),
    ],
)
def test_unusable_directory_is_a_start_error(
    causal: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], fault: str
) -> None:
    """The message names the directory and the fault, before torch or transformers are imported."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "gpu_pool.backends.hf.loading", raising=False)
    change(causal)

    with pytest.raises(StartError) as caught:
        HfBackend(str(causal), "cpu", 1).load()

    assert str(caught.value).startswith("Backend 'hf:")
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("modules.json", [*MODULES, {"path": "3", "type": "x.Dense"}], "its module Dense is not supported"),
        ("modules.json", [{"path": "../..", "type": "x.Transformer"}, *MODULES[1:]], "which is outside of it"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "its pooling (pooling_mode_max_tokens)"),
        ("1_Pooling/config.json", {}, "its pooling (none)"),
    ],
)
def test_unsupported_embedding_steps_are_rejected(sentences: Path, name: str, value: object, fault: str) -> None:
    """Without a step the vectors would be plausible and wrong; paths outside the directory are rejected."""
    write(sentences / name, value)

    with pytest.raises(Unusable) as caught:
        read_directory(sentences)

    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("pooling", "mode"), [({"pooling_mode_mean_tokens": True}, "mean"), ({"pooling_mode": "cls"}, "cls")]
)
def test_sentence_layout(sentences: Path, pooling: dict[str, object], mode: str) -> None:
    """Folder, pooling mode, longest text and lower-casing are read."""
    write(sentences / "1_Pooling" / "config.json", pooling)

    assert read_directory(sentences).sentences == SentenceLayout(sentences, mode, 256, False)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_version_is_a_hash_of_the_files(causal: Path, name: str) -> None:
    """The version changes with the configuration, the tokenizer or the weights; shards count as weights."""
    before, again = read_directory(causal).version, read_directory(causal).version
    write(causal / name, (causal / name).read_text() + " ")
    after = read_directory(causal).version

    assert before == again != after
    assert before.startswith("my-model-")
    shard(causal)
    write(causal / "two.safetensors", "weights")
    assert read_directory(causal).sentences is None
