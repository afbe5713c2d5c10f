"""From a checked directory to a model in memory, with transformers: local files, safetensors, no code of the directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from safetensors import SafetensorError
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from gpu_pool.backends.device import select_device
from gpu_pool.backends.hf.causal import ENDLESS, CausalModel
from gpu_pool.backends.hf.directory import ModelDirectory
from gpu_pool.backends.hf.embedding import EmbeddingModel
from gpu_pool.backends.hf.json_file import Unusable

SAFELY: Final = {"local_files_only": True, "trust_remote_code": False}
UNUSED: Final = ("pooler.",)
"""Weights that an embedding model may lack, since its pooling is another."""
HfModel = CausalModel | EmbeddingModel
"""The loaded model of a directory, of either kind."""
_FAULTS: Final = (OSError, ValueError, ImportError, KeyError, SafetensorError)
"""Errors of transformers for a directory that it cannot read. A failing device raises RuntimeError."""


def load_model(found: ModelDirectory, device: str, dtype: str, threads: int) -> HfModel:
    """Raises Unusable if the directory is at fault, StartError without the device, RuntimeError from torch if it fails."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    # For 16-bit attention on Hopper GPUs torch prefers cuDNN, which plans anew for each new length, so at each token
    # until its length was seen. On an H200 a text of 16 tokens took 1,361 ms at first and 713 ms in the median, without
    # cuDNN 135 and 123 ms; at 25 requests/s the p95 was 3,648 ms with 16 errors, without cuDNN 897 ms and no error.
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    place = select_device(device)
    tokenizer = _load(lambda: AutoTokenizer.from_pretrained(found.folder, **SAFELY), "its tokenizer")
    if found.sentences is None:
        network = _network(AutoModelForCausalLM, found, place, dtype)
        # The tokens that end a text are in the generation config, the model config and the tokenizer.
        settings = (getattr(network, "generation_config", None), network.config)
        named = [getattr(each, "eos_token_id", None) for each in settings] + [tokenizer.eos_token_id]
        flat = [token for each in named for token in (each if isinstance(each, list) else [each])]
        ends = frozenset(token for token in flat if token is not None)
        return CausalModel(network, tokenizer, place, ends, _context(network))
    network = _network(AutoModel, found, place, dtype, UNUSED)
    longest = min(found.sentences.max_tokens or ENDLESS, _context(network), tokenizer.model_max_length)
    return EmbeddingModel(network, tokenizer, place, found.sentences, longest)


def _network(kind: Any, found: ModelDirectory, place: torch.device, dtype: str, unused: tuple[str, ...] = ()) -> Any:
    """The network with all its weights: transformers would initialize missing ones at random with a warning."""
    wanted = "auto" if dtype == "auto" and place.type == "cuda" else getattr(torch, dtype, torch.float32)
    network, info = _load(
        lambda: kind.from_pretrained(
            found.folder, dtype=wanted, use_safetensors=True, output_loading_info=True, **SAFELY
        ),
        "its model",
    )
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(unused))
    if missing:
        raise Unusable(f"its weights lack {len(missing)} of the network's tensors, such as {missing[0]}")
    return network.to(place).eval().requires_grad_(requires_grad=False)


def _load(load: Callable[[], Any], what: str) -> Any:
    try:
        return load()
    except _FAULTS as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise Unusable(f"transformers cannot load {what} ({first})") from error


def _context(network: Any) -> int:
    config = network.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or ENDLESS)
