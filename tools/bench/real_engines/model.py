"""A small Llama model with random weights, written as GGUF for llama.cpp and as a directory for vLLM.

Both have the same weights, from one seed, and a byte-level tokenizer without training. Logits are far apart, so that the
order of summation in a batch does not change the most likely token. Only ASCII letters and digits are ever the most likely
token: each token of an output is one character, and an output never ends by itself.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SEED = 1
CONTEXT = 4096
HIDDEN, LAYERS, HEADS, KEY_HEADS, INNER = 256, 4, 4, 2, 768
EPSILON, ROPE_BASE = 1e-5, 10_000.0
SPREAD = 0.5
"""Standard deviation of the rows of the output matrix: logits differ by units, float32 rounds at 1e-5 of them."""
BEGIN, END, TURN, TURN_END = SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"))
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Weights = Mapping[str, "np.ndarray[Any, np.dtype[np.float32]]"]


def vocabulary() -> list[str]:
    """The tokens in the order of their ids: special ones, bytes, merged ones."""
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]


def random_weights(seed: int) -> dict[str, Any]:
    """Float32 weights under their names in a Hugging Face checkpoint."""
    random, tokens = np.random.default_rng(seed), vocabulary()

    def matrix(outputs: int, inputs: int, deviation: float | None = None) -> Any:
        scale = inputs**-0.5 if deviation is None else deviation
        return (random.standard_normal((outputs, inputs)) * scale).astype(np.float32)

    narrow = HIDDEN // HEADS * KEY_HEADS
    weights = {"model.embed_tokens.weight": matrix(len(tokens), HIDDEN, 1.0)}
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (narrow, HIDDEN),
            "self_attn.v_proj": (narrow, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    weights["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    output = matrix(len(tokens), HIDDEN, SPREAD)
    # A row of zeros has the logit 0, which is never the highest.
    output[[not (token.isascii() and token.isalnum() and len(token) == 1) for token in tokens]] = 0
    weights["lm_head.weight"] = output
    return weights


def write_directory(folder: Path, seed: int = SEED) -> Path:
    """Write a model directory for vLLM and transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = vocabulary()
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": BEGIN, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "chat_template": TEMPLATE}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": EPSILON,
        "rope_theta": ROPE_BASE,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(seed), folder / "model.safetensors", {"format": "pt"})
    return folder


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _gguf_name(name: str) -> str:
    part = name.removesuffix(".weight")
    if part in GGUF_NAMES:
        return f"{GGUF_NAMES[part]}.weight"
    _, _, layer, inner = part.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[inner]}.weight"


def _interleaved(weight: Any, heads: int) -> Any:
    """Rotary pairs side by side, as GGUF has them, instead of in two halves of a head."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, seed: int = SEED) -> Path:
    """Write the same model for llama.cpp."""
    from gguf import GGUFWriter, TokenType  # noqa: PLC0415 - installed with the engine

    path.parent.mkdir(parents=True, exist_ok=True)
    writer, tokens = GGUFWriter(path, "llama"), vocabulary()
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(TEMPLATE)
    heads = {"q_proj": HEADS, "k_proj": KEY_HEADS}
    for name, weight in random_weights(seed).items():
        count = heads.get(name.split(".")[-2])
        writer.add_tensor(_gguf_name(name), weight if count is None else _interleaved(weight, count))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
