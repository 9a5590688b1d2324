# SPDX-License-Identifier: Apache-2.0
"""Which model architectures the paged attention computes rightly; everything else is refused by name."""

from __future__ import annotations

from typing import Any

from kvrail.runtime.errors import ConfigError

__all__ = ["refuse_unsupported"]

# Families whose attention is exactly "causal over all earlier tokens" and reaches it through the registry.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Rotary scalings that depend on nothing but a token's position. The others ("dynamic", "longrope") depend on
# the longest sequence of the batch, so a token's KV would depend on who else is in the batch.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def refuse_unsupported(config: Any, name: str) -> None:
    """Raise ConfigError for an architecture that the paged attention would compute wrongly."""
    kind = config.model_type
    if kind not in MODEL_TYPES:
        raise ConfigError(
            f"--model {name}: model type {kind!r} is not supported ({', '.join(MODEL_TYPES)} are)"
        )
    # Qwen configs carry a window that `use_sliding_window` turns off.
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None or "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError(f"--model {name}: sliding-window attention ({window} tokens) is not supported")
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"--model {name}: quantized safetensors are not supported; use the unquantized model"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        raise ConfigError(
            f"--model {name}: rotary scaling {rope!r} is not supported ({', '.join(ROPE_TYPES)} are)"
        )
