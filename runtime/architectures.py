# SPDX-License-Identifier: Apache-2.0
"""Which model architectures the paged attention computes rightly, and what each keeps of a token.

Everything else is refused by name: an attention that is not "causal, or causal within a window" would be computed
without any error, and wrongly. doc/models.md is this table for people.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from kvrail.runtime.errors import ConfigError
from kvrail.transfer.layout import PageLayout

__all__ = ["FAMILIES", "has_experts", "kv_layout", "layer_windows", "refuse_unsupported", "shrunk_window"]

# Which layers of a family have the config's `sliding_window`, as its model code decides it: none, all of them, or
# those that `layer_types` names.
FAMILIES: dict[str, Literal["none", "all", "named"]] = {
    "cohere2": "named",
    "deepseek_v2": "none",
    "deepseek_v3": "none",
    "gemma2": "named",
    "gemma3_text": "named",
    "glm4_moe": "none",
    "gpt_oss": "named",
    "granite": "none",
    "llama": "none",
    "minimax_m2": "none",
    "mistral": "all",
    "mixtral": "all",
    "olmo3": "named",
    "phi3": "all",
    "qwen2": "named",
    "qwen3": "named",
    "qwen3_moe": "all",
    "smollm3": "named",
}
# Rotary scalings that depend on nothing but a token's position. The others ("dynamic", "longrope") depend on
# the longest sequence of the batch, so a token's KV would depend on who else is in the batch.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def refuse_unsupported(config: Any, name: str) -> None:
    """Raise ConfigError for an architecture that the paged attention would compute wrongly."""
    kind = config.model_type
    if kind not in FAMILIES:
        raise ConfigError(
            f"--model {name}: model type {kind!r} is not supported ({', '.join(sorted(FAMILIES))} are)"
        )
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        raise ConfigError(f"--model {name}: layers of type {', '.join(sorted(others))} are not supported")
    if getattr(config, "use_bidirectional_attention", None):
        raise ConfigError(f"--model {name}: attention to later tokens is not supported")
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"--model {name}: quantized safetensors are not supported; use the unquantized model"
        )
    for rope in _rope_types(config):
        if rope not in ROPE_TYPES:
            raise ConfigError(
                f"--model {name}: rotary scaling {rope!r} is not supported ({', '.join(ROPE_TYPES)} are)"
            )


def has_experts(config: Any) -> bool:
    """Whether tokens are routed to some of several experts."""
    return any(
        getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )


def layer_windows(config: Any) -> list[int | None]:
    """For each layer the number of tokens that a token sees, itself among them; None: all earlier ones."""
    layers = int(config.num_hidden_layers)
    how = FAMILIES[config.model_type]
    window = getattr(config, "sliding_window", None)
    if how == "none" or window is None or not getattr(config, "use_sliding_window", True):
        return [None] * layers
    if how == "all":
        return [int(window)] * layers
    return [int(window) if kind == "sliding_attention" else None for kind in config.layer_types[:layers]]


def kv_layout(config: Any, *, model_id: str, dtype: str, page_tokens: int) -> PageLayout:
    """What this model keeps of a token: full layers in pages, sliding-window layers in the ring of a state slot."""
    windows = layer_windows(config)
    heads = int(config.num_attention_heads)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "kv_lora_rank", None):
        # Latent attention arrives expanded, with keys and values of their own for each head.
        kv_heads = heads
        head_dim = max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    return PageLayout.with_rings(
        model_id=model_id,
        layers=windows.count(None),
        kv_heads=int(kv_heads),
        head_dim=int(head_dim),
        dtype=dtype,
        page_tokens=page_tokens,
        window_layers=len(windows) - windows.count(None),
        window=max((window for window in windows if window is not None), default=0),
    )


@contextlib.contextmanager
def shrunk_window(model: Any, window: int) -> Iterator[None]:
    """Give the sliding-window layers of a loaded model a window of `window` tokens for a while.

    So a check of a few tokens sees what happens at the window's edge, whatever its real length.
    """
    real = getattr(model.config, "sliding_window", None)
    if real is None:
        yield
        return
    parts = [part for part in model.modules() if isinstance(getattr(part, "sliding_window", None), int)]
    parts.append(model.config)
    try:
        for part in parts:
            part.sliding_window = min(window, real)
        yield
    finally:
        for part in parts:
            part.sliding_window = real


def _rope_types(config: Any) -> list[str]:
    """The rotary scaling of the model, or of each kind of its layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    return [str(part.get("rope_type", "default")) for part in parts]
