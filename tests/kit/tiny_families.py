# SPDX-License-Identifier: Apache-2.0
"""Settings of a tiny random model of every family that the engine serves, by a name for tests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

__all__ = ["FAMILIES", "PLAIN", "WINDOW", "WINDOWED", "tiny_config", "tiny_random_model"]

# Tokens that a sliding-window layer sees.
WINDOW = 32

_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": None,
}
_MIXED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

# name → (model type, settings beside the common ones)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "pad_token_id": 0}),
    "granite": ("granite", {"logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, **_MOE}),
    "phi3": ("phi3", {"pad_token_id": 0, "head_dim": None, "hidden_size": 64}),
    "glm4_moe": (
        "glm4_moe",
        {"n_routed_experts": 4, "partial_rotary_factor": 0.5, "use_qk_norm": True, **_MOE},
    ),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "topk_method": "group_limited_greedy", **_MOE}),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, **_MOE}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "phi3-window": (
        "phi3",
        {"pad_token_id": 0, "head_dim": None, "hidden_size": 64, "sliding_window": WINDOW},
    ),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "gemma2": ("gemma2", {**_MIXED, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {**_MIXED, "query_pre_attn_scalar": 16}),
    "olmo3": ("olmo3", {**_MIXED, "head_dim": None, "hidden_size": 64}),
    "cohere2": ("cohere2", {**_MIXED, "logit_scale": 1.0}),
    "gpt_oss": ("gpt_oss", {**_MIXED, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
WINDOWED = tuple(name for name, (_, settings) in FAMILIES.items() if settings.get("sliding_window"))
PLAIN = tuple(name for name in FAMILIES if name not in WINDOWED)


def tiny_config(name: str, **changes: Any) -> Any:
    """Two or three layers, four heads over two KV heads (most of them), with `changes`."""
    kind, settings = FAMILIES[name]
    common: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 640,
        "tie_word_embeddings": False,
        # Sharp enough that attention, and so every token of KV, decides about the next token.
        "initializer_range": 0.2,
    }
    merged = common | settings | changes
    return AutoConfig.for_model(
        kind, **{key: value for key, value in merged.items() if key != "head_dim" or value}
    )


def tiny_random_model(name: str, **changes: Any) -> Any:
    """A model with random weights (by torch's seed) that depend on nothing but the arguments."""
    model = AutoModelForCausalLM.from_config(tiny_config(name, **changes))
    # Biases, norms and sinks start as constants or small, which would hide mistakes in them.
    for parameter, value in model.named_parameters():
        if value.ndim == 1:
            torch.nn.init.normal_(
                value, mean=float("norm" in parameter), std=0.5 if "sinks" in parameter else 0.2
            )
    return model
