"""A model directory and its faults, reported before torch and transformers are imported.

Weights must be safetensors: the other format is a pickle, which can run code when it is read. A fault completes a
sentence that begins with the directory's name.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpu_pool.backends.hf.json_file import Unusable, read_object
from gpu_pool.backends.hf.sentence_layout import SentenceLayout, read_layout

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
    names = config.get("architectures") or ["none"]
    if sentences is None and (config.get("is_encoder_decoder") or not _CAUSAL.search(str(names[0]))):
        raise Unusable(
            f"its architecture is {names[0]}: a causal language model is needed, or the layout of "
            "sentence-transformers with its modules.json"
        )
    weights = _weights(folder)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise Unusable(f"it has no tokenizer, such as {TOKENIZERS[0]}")
    # Weights may have many GB, so only the size, header and end of a file are hashed.
    texts = (folder / name for name in ("config.json", "generation_config.json", *TOKENIZERS))
    parts = [text.read_bytes() for text in texts if text.is_file()]
    for weight_path in weights:
        size = weight_path.stat().st_size
        with weight_path.open("rb") as file:
            header = int.from_bytes(file.read(_HEADER_BYTES), "little")
            parts.append(size.to_bytes(8, "little") + file.read(min(header, size)))
            file.seek(max(0, size - _TAIL_BYTES))
            parts.append(file.read())
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return ModelDirectory(path, folder, sentences, f"{path.resolve().name}-{digest.hexdigest()[:8]}")


def _weights(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        named = read_object(folder / INDEX).get("weight_map")
        if not isinstance(named, dict) or not named:
            raise Unusable(f"{INDEX} names no files")
        shards = [folder / Path(str(name)).name for name in sorted(set(named.values()))]
        for shard in shards:
            if not shard.is_file():
                raise Unusable(f"{shard.name}, which {INDEX} names, is missing")
        return shards
    pickles = [path.name for pattern in PICKLES for path in sorted(folder.glob(pattern))]
    if pickles:
        raise Unusable(f"its weights are a pickle ({pickles[0]}), which could run code: convert them to safetensors")
    raise Unusable(f"it has no {WEIGHTS}")
