# SPDX-License-Identifier: Apache-2.0
"""What two vLLM engines must agree on for KV bytes to mean the same, read from vLLM's own configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvrail.runtime.checkpoint import fingerprint_of
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.vllm.kv_tensors import Geometry
from kvrail.transfer.layout import BlockLayout

__all__ = ["block_layout", "block_tokens", "check_parallel", "first_needed"]


def check_parallel(config: Any, *, by_layer: bool = False) -> None:
    """Raise ConfigError for ways of spreading a model that the connector does not know, pushing layers or chunks."""
    parallel = config.parallel_config
    if by_layer and getattr(parallel, "use_ubatching", False):
        # A layer is reported once for each of them, and the first time a part of its blocks is not written yet.
        raise ConfigError(
            'KvrailConnector cannot push by layer ("push": "layer") with steps cut into microbatches'
        )
    for name, what in (
        ("pipeline_parallel_size", "pipeline"),
        ("prefill_context_parallel_size", "prefill context"),
        ("decode_context_parallel_size", "decode context"),
    ):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"KvrailConnector does not support {what} parallelism ({name} > 1)")


def block_tokens(kv_cache_config: Any) -> int:
    """Tokens of a block; raises ConfigError unless all KV cache groups are attention with blocks of one size."""
    sizes: dict[int, str] = {}
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        kind = type(spec).__name__
        if "Mamba" in kind or not hasattr(spec, "num_kv_heads"):
            raise ConfigError(
                f"KvrailConnector moves attention KV only; layers such as {group.layer_names[0]} keep a {kind}"
            )
        sizes[int(spec.block_size)] = group.layer_names[0]
    if len(sizes) != 1:
        raise ConfigError(f"KvrailConnector needs blocks of one size, and these are of several: {sizes}")
    (size,) = sizes
    hashed = getattr(kv_cache_config, "hash_block_size", None)
    if hashed not in (None, size):
        raise ConfigError(
            f"KvrailConnector needs prefix-cache hashes of whole blocks ({size}), not of {hashed} tokens"
        )
    return size


def first_needed(spec: Any) -> Callable[[int], int]:
    """Of a KV cache group: the first token whose KV is still needed when so many tokens are computed."""
    window, chunk = getattr(spec, "sliding_window", None), getattr(spec, "attention_chunk_size", None)
    if window:
        return lambda computed: max(0, computed - int(window) + 1)
    if chunk:
        return lambda computed: computed // int(chunk) * int(chunk)
    return lambda computed: 0


def block_layout(
    config: Any,
    kv_cache_config: Any,
    geometry: Geometry,
    *,
    version: str,
    rank: int,
    layers: Mapping[str, Any],
) -> BlockLayout:
    """The layout that links compare. `layers`: vLLM's attention layers by name."""
    groups = kv_cache_config.kv_cache_groups
    facts = {
        "engine": f"vllm {version}",
        "model": _model(config.model_config),
        "dtype": str(config.model_config.dtype),
        "cache_dtype": str(config.cache_config.cache_dtype),
        "cache_layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
        "tensor_parallel_size": str(config.parallel_config.tensor_parallel_size),
        "tensor_parallel_rank": str(rank),
        "attention": ", ".join(sorted({_kernel(layer) for layer in layers.values()})),
        "speculative": str(getattr(config, "speculative_config", None) is not None),
        "layers": _digest([part.layers for part in geometry.ranges]),
    }
    for number, group in enumerate(groups):
        facts[f"group_{number}"] = _group(group)
    return BlockLayout(
        page_tokens=block_tokens(kv_cache_config),
        groups=len(groups),
        unit_bytes=geometry.unit_bytes,
        ranges=tuple(part.tensors for part in geometry.ranges),
        order=geometry.order,
        facts=facts,
    )


def _model(model_config: Any) -> str:
    folder = Path(model_config.model)
    if (folder / "config.json").is_file():
        return fingerprint_of(folder)
    return f"{model_config.model} {model_config.revision or ''}".strip()


def _kernel(layer: Any) -> str:
    """The attention backend, and how it packs keys where that depends on the CPU."""
    backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else type(layer)
    name = backend.get_name() if hasattr(backend, "get_name") else backend.__name__
    isa = getattr(layer, "isa", None)
    return f"{name} ({isa})" if isa else str(name)


def _group(group: Any) -> str:
    spec = group.kv_cache_spec
    window = getattr(spec, "sliding_window", None)
    return (
        f"{type(spec).__name__} of {len(group.layer_names)} layers, {spec.num_kv_heads} heads of {spec.head_size}, "
        f"{spec.dtype}, window {window}, {_digest(list(group.layer_names))}"
    )


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]
