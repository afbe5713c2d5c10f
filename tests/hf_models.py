"""Model directories for tests: small causal models with random weights and a tokenizer trained on a few sentences."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

SENTENCES = (
    "Once upon a time there was a machine that answered many callers.",
    "What happens when the queue is full? Nothing is lost: the machine waits.",
    "Ein Gerät, das zählt; 日本語のテキスト; et voilà, l'été.",
)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
STRICT = "{{ raise_exception('no system') if messages[0].role == 'system' else messages[0].content }}"
CONTEXT = 192


def make_causal(folder: Path, kind: str = "llama", template: str | None = TEMPLATE, seed: int = 1) -> Path:
    """Write a small model: `llama` (rotary positions), `gpt2` (learned positions), `mistral` (sliding window of 16)."""
    tokenizer = _tokenizer(template)
    torch.manual_seed(seed)
    _network(kind, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def change_config(folder: Path, name: str = "config.json", **changes: Any) -> None:
    """Change values of a JSON file; None removes a key."""
    path = folder / name
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return str(tokenizer.to_str())


def _tokenizer(template: str | None) -> Any:
    trained = Tokenizer.from_str(_tokenizer_json())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def _network(kind: str, vocab_size: int) -> Any:
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1}
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=vocab_size, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4, initializer_range=0.5, **ends
        )
        return GPT2LMHeadModel(config)
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.5,
        **ends,
    }
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**shape, sliding_window=16))
    return LlamaForCausalLM(LlamaConfig(**shape))
