# SPDX-License-Identifier: Apache-2.0
"""A random llama whose KV is wide: small to load, yet a prompt of some hundred tokens takes a while to push."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from kit.tiny_model import byte_level_tokenizer, write_model_folder

__all__ = ["FIRST_TEXT_TOKEN", "VOCABULARY", "write_slow_model"]

# Of the byte-level tokenizer: three special tokens, "<think>", and one token a byte.
VOCABULARY = byte_level_tokenizer().get_vocab_size(with_added_tokens=True)
FIRST_TEXT_TOKEN = 4
_HIDDEN, _INNER = 64, 128


def write_slow_model(folder: Path, *, layers: int = 4, heads: int = 8, head_dim: int = 256) -> Path:
    """A checkpoint in fp32; KV of one token takes 8 * layers * heads * head_dim bytes (64 KiB by default).

    Written without torch: importing it costs a test run more than all of this.
    """
    write_model_folder(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": [2, 0],
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.normal(0, 0.2, (rows, columns)).astype(np.float32)

    wide = heads * head_dim
    shapes = {
        "self_attn.q_proj": (wide, _HIDDEN),
        "self_attn.k_proj": (wide, _HIDDEN),
        "self_attn.v_proj": (wide, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, wide),
        "mlp.gate_proj": (_INNER, _HIDDEN),
        "mlp.up_proj": (_INNER, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INNER),
    }
    ones = np.ones(_HIDDEN, dtype=np.float32)
    tensors = {
        "model.embed_tokens.weight": matrix(VOCABULARY, _HIDDEN),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(VOCABULARY, _HIDDEN),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}"
        tensors |= {f"{name}.{part}.weight": matrix(*shape) for part, shape in shapes.items()}
        tensors |= {f"{name}.{norm}.weight": ones for norm in ("input_layernorm", "post_attention_layernorm")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
