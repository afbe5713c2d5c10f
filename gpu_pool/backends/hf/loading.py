"""From a directory that looks whole to a model in memory, by transformers: local files, safetensors, no code of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.backends.hf.causal import CausalModel
from gpu_pool.backends.hf.directory import ModelDirectory, Unusable
from gpu_pool.backends.hf.embedding import EmbeddingModel

SAFELY: Final = {"local_files_only": True, "trust_remote_code": False}
UNUSED: Final = ("pooler.",)
"""Weights that an embedding model may lack: its pooling is another."""
_FAULTS: Final = (OSError, ValueError, ImportError, KeyError, SafetensorError)
"""What transformers raises for a directory that it cannot read. A device that fails raises RuntimeError."""
_ENDLESS: Final = 1_000_000
"""Contexts from here on are transformers' way of saying that it knows none."""


class HfModel(Protocol):
    """What is made of a directory of either kind."""

    def texts(self, items: Sequence[Item], progress: Callable[[], None], /) -> list[ItemResult]: ...

    def vectors(self, items: Sequence[Item], progress: Callable[[], None], /) -> list[ItemResult]: ...

    def warmup(self) -> None: ...


def load_model(found: ModelDirectory, device: str, dtype: str, threads: int) -> HfModel:
    """Raises Unusable where the directory is at fault, RuntimeError from torch where the device is."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    tokenizer = _told(lambda: AutoTokenizer.from_pretrained(found.folder, **SAFELY), "its tokenizer")
    if found.sentences is None:
        network = _network(AutoModelForCausalLM, found, place, dtype)
        return CausalModel(network, tokenizer, place, _ends(network, tokenizer), _context(network))
    network = _network(AutoModel, found, place, dtype, UNUSED)
    longest = min(found.sentences.max_tokens or _ENDLESS, _context(network), tokenizer.model_max_length)
    return EmbeddingModel(network, tokenizer, place, found.sentences, longest)


def _network(kind: Any, found: ModelDirectory, place: torch.device, dtype: str, unused: tuple[str, ...] = ()) -> Any:
    """The network with all its weights: transformers would fill what is missing with chance, and only warn."""
    wanted = "auto" if dtype == "auto" and place.type == "cuda" else getattr(torch, dtype, torch.float32)
    network, told = _told(
        lambda: kind.from_pretrained(
            found.folder, dtype=wanted, use_safetensors=True, output_loading_info=True, **SAFELY
        ),
        "its model",
    )
    missing = sorted(name for name in told["missing_keys"] if not name.startswith(unused))
    if missing:
        raise Unusable(f"its weights lack {len(missing)} of the network's tensors, such as {missing[0]}")
    return network.to(place).eval().requires_grad_(requires_grad=False)


def _told(load: Callable[[], Any], what: str) -> Any:
    try:
        return load()
    except _FAULTS as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise Unusable(f"transformers cannot load {what} ({first})") from error


def _ends(network: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text: those of the generation's settings, of the model's, and the tokenizer's own."""
    settings = (getattr(network, "generation_config", None), network.config)
    named = [getattr(each, "eos_token_id", None) for each in settings] + [tokenizer.eos_token_id]
    flat = [token for each in named for token in (each if isinstance(each, list) else [each])]
    return frozenset(token for token in flat if token is not None)


def _context(network: Any) -> int:
    config = network.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or _ENDLESS)
