# SPDX-License-Identifier: Apache-2.0
"""Layers with joined projections give what the models' own give; the kernels inside are their plain meanings here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from kit.tiny_families import FAMILIES, tiny_random_model
from kvrail.kernels.fused import FusedAttention, FusedGate, FusedNorm, fuse_layers, fuse_norms
from kvrail.kernels.reference import apply_gate, apply_norm, apply_rotation

KNOWN = ("llama", "mistral", "qwen2", "qwen3")


class Plain:
    """Stands for kernels.elementwise.Elementwise, which needs a GPU."""

    norm = staticmethod(apply_norm)
    gate = staticmethod(apply_gate)

    @staticmethod
    def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        x.copy_(apply_rotation(x, cosines, sines))


def _attend(module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: float, **_: Any) -> Any:
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    hidden = torch.ones(scores.shape[2:]).triu(1).bool()
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    assert 0 <= module.layer_idx < 4
    return (weights @ value).transpose(1, 2), None


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("biased", [False, True])
@torch.inference_mode()
def test_the_whole_model_gives_the_same(kind, biased) -> None:
    torch.manual_seed(4)
    changes = {"attention_bias": True} if biased and kind in ("llama", "qwen3") else {}
    model = tiny_random_model(kind, vocab_size=97, sliding_window=None, **changes).eval()
    AttentionInterface.register("plain_for_fusing", _attend)
    model.set_attn_implementation("plain_for_fusing")
    ids = torch.randint(0, 97, (1, 23))
    expected = model(input_ids=ids, use_cache=False).logits
    count = sum(parameter.numel() for parameter in model.parameters())
    assert fuse_norms(model, Plain()) > 0
    assert fuse_layers(model, _attend, Plain()) == 2 * model.config.num_hidden_layers
    found = model(input_ids=ids, use_cache=False).logits
    assert float((found - expected).abs().max()) <= 1e-4
    # Nothing is held twice.
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    parts = [type(part) for part in model.modules()]
    assert parts.count(FusedAttention) == parts.count(FusedGate) == model.config.num_hidden_layers
    assert FusedNorm in parts


@pytest.mark.parametrize(
    "kind", sorted(set(FAMILIES) - set(KNOWN) - {"mistral-window", "qwen2-window", "qwen3-window"})
)
def test_models_whose_code_is_not_known_stay(kind) -> None:
    model = tiny_random_model(kind, vocab_size=97)
    before = [type(part) for part in model.modules()]
    assert fuse_layers(model, _attend, Plain()) == 0
    assert [type(part) for part in model.modules()] == before


def test_another_activation_or_odd_widths_stay() -> None:
    model = tiny_random_model("llama", vocab_size=97, hidden_act="gelu", head_dim=24)
    assert fuse_layers(model, _attend, Plain()) == 0
