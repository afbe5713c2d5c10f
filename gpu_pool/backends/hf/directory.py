"""A model directory and its faults, reported before torch and transformers are imported.

Weights must be safetensors: the other format is a pickle, which can run code when it is read. Of the sentence-
transformers layout (`modules.json` names the steps) a Transformer, pooling by mean or by the first token, and Normalize
are supported; any other step is rejected by name, since leaving it out would give another vector. A fault completes a
sentence that begins with the directory's name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal


class Unusable(Exception):
    """The directory cannot be used; the message says why, without its name and without a full stop."""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises Unusable."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise Unusable(f"{path.name} is no JSON object")
    return found


def read_json(path: Path) -> Any:
    """The JSON in a file. Raises Unusable."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise Unusable(f"{path.name} is missing") from None
    except OSError as error:
        raise Unusable(f"{path.name} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise Unusable(f"{path.name} is no JSON") from None


Pooling = Literal["mean", "cls"]
_MODES: Final[dict[str, Pooling]] = {
    "mean": "mean",
    "cls": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}


@dataclass(frozen=True)
class SentenceLayout:
    """The folder of the transformer, its pooling, and the most tokens of a text (None: the model's limit)."""

    folder: Path
    pooling: Pooling
    max_tokens: int | None
    lower_case: bool


def read_layout(path: Path) -> SentenceLayout | None:
    """The layout, or None without `modules.json`. Raises Unusable."""
    if not (path / "modules.json").exists():
        return None
    folders = _folders(path, read_json(path / "modules.json"))
    if "Transformer" not in folders or "Pooling" not in folders:
        raise Unusable("modules.json does not name a Transformer and its Pooling")
    settings_file = folders["Transformer"] / "sentence_bert_config.json"
    settings = read_object(settings_file) if settings_file.is_file() else {}
    longest = settings.get("max_seq_length")
    return SentenceLayout(
        folders["Transformer"],
        _pooling(read_object(folders["Pooling"] / "config.json")),
        longest if isinstance(longest, int) and longest > 0 else None,
        bool(settings.get("do_lower_case", False)),
    )


def _folders(path: Path, modules: Any) -> dict[str, Path]:
    """Kind of module -> its folder, in the order in which they run."""
    try:
        named = [(str(each["type"]).rpartition(".")[2], str(each.get("path", ""))) for each in modules]
    except (TypeError, KeyError, AttributeError):
        raise Unusable("modules.json is no list of modules") from None
    for kind, folder in named:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise Unusable(f"its module {kind} is not supported: Transformer, Pooling and Normalize are")
        if not (path / folder).resolve().is_relative_to(path.resolve()):
            raise Unusable(f"modules.json names the folder {folder!r}, which is outside of it")
    return {kind: path / folder for kind, folder in named}


def _pooling(config: dict[str, Any]) -> Pooling:
    wanted = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if "pooling_mode" in config:  # The newer format.
        wanted = [str(config["pooling_mode"])]
    if len(wanted) == 1 and wanted[0] in _MODES:
        return _MODES[wanted[0]]
    raise Unusable(f"its pooling ({', '.join(wanted) or 'none'}) is not supported: mean and cls are")


WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PICKLES: Final = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_CAUSAL: Final = re.compile(r"ForCausalLM|LMHeadModel")
_HEADER_BYTES: Final = 8  # A safetensors file begins with the length of its JSON header.
_TAIL_BYTES: Final = 65_536


@dataclass(frozen=True)
class ModelDirectory:
    """A complete model directory. `folder` holds configuration, weights and tokenizer; it is `path` or inside it.

    `sentences` says how vectors are made, None for a causal language model. `version` is the directory's name and a
    short hash of its content.
    """

    path: Path
    folder: Path
    sentences: SentenceLayout | None
    version: str


def read_directory(path: Path) -> ModelDirectory:
    """Check the directory. Raises Unusable with what is missing or not supported."""
    if not path.is_dir():
        raise Unusable("there is no such directory")
    sentences = read_layout(path)
    folder = path if sentences is None else sentences.folder
    config = read_object(folder / "config.json")
    if sentences is None:
        _check_causal(config)
    weights = _weights(folder)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise Unusable(f"it has no tokenizer, such as {TOKENIZERS[0]}")
    return ModelDirectory(path, folder, sentences, f"{path.resolve().name}-{_digest(folder, weights)}")


def _check_causal(config: dict[str, Any]) -> None:
    names = config.get("architectures") or ["none"]
    if config.get("is_encoder_decoder") or not _CAUSAL.search(str(names[0])):
        raise Unusable(
            f"its architecture is {names[0]}: a causal language model is needed, or the layout of "
            "sentence-transformers with its modules.json"
        )


def _weights(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return _shards(folder)
    pickles = [path.name for pattern in PICKLES for path in sorted(folder.glob(pattern))]
    if pickles:
        raise Unusable(f"its weights are a pickle ({pickles[0]}), which could run code: convert them to safetensors")
    raise Unusable(f"it has no {WEIGHTS}")


def _shards(folder: Path) -> list[Path]:
    named = read_object(folder / INDEX).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise Unusable(f"{INDEX} names no files")
    shards = [folder / Path(str(name)).name for name in sorted(set(named.values()))]
    for shard in shards:
        if not shard.is_file():
            raise Unusable(f"{shard.name}, which {INDEX} names, is missing")
    return shards


def _digest(folder: Path, weights: list[Path]) -> str:
    """Eight hex digits. Weights may have many GB, so only the size, header and end of a file are hashed."""
    digest = hashlib.sha256()
    for part in _hashed_parts(folder, weights):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:8]


def _hashed_parts(folder: Path, weights: list[Path]) -> Iterator[bytes]:
    for name in ("config.json", "generation_config.json", *TOKENIZERS):
        if (folder / name).is_file():
            yield (folder / name).read_bytes()
    for path in weights:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = int.from_bytes(file.read(_HEADER_BYTES), "little")
            yield size.to_bytes(8, "little") + file.read(min(header, size))
            file.seek(max(0, size - _TAIL_BYTES))
            yield file.read()
