# SPDX-License-Identifier: Apache-2.0
"""Parts of transformers models with fewer and larger GPU kernels: norms, attention projections, gated layers.

Only classes whose code is known word for word are replaced, by name: others may share no more than the name of their
parts. What is checked afterwards is the whole model (runtime/model.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kvrail.kernels.elementwise import Elementwise

__all__ = ["FusedAttention", "FusedGate", "FusedNorm", "fuse_layers", "fuse_norms"]

# Those that mean x / rms(x) * weight, with `variance_epsilon` under the root; others share the name only.
_PLAIN = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
# Linear q, k, v; in Qwen3 a norm of each head; rotary positions of whole heads; attention; linear out.
_ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
# down(act(gate(x)) * up(x)).
_GATES = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")


class FusedNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32 inside and rounded once, to the type of x."""

    def __init__(self, weight: nn.Parameter, epsilon: float, kernels: Elementwise | None = None) -> None:
        super().__init__()
        self.weight = weight
        self._epsilon = epsilon
        self._kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., n] → the same shape."""
        if x.device.type == "cpu" and x.dtype == torch.float32:
            # torch has no such kernel for CPUs.
            squares: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
            return (x * squares.div_(x.shape[-1]).add_(self._epsilon).rsqrt_()).mul_(self.weight)
        if self._kernels is not None:
            return self._kernels.norm(x, self.weight, self._epsilon)
        return F.rms_norm(x, self.weight.shape, self.weight, self._epsilon)


class FusedAttention(nn.Module):
    """Takes the place of an attention module: one product for q, k and v, which are turned where they lie."""

    def __init__(self, old: Any, attend: Callable[..., Any], kernels: Elementwise) -> None:
        super().__init__()
        # What transformers' attention functions look at.
        self.layer_idx, self.config, self.is_causal = old.layer_idx, old.config, old.is_causal
        self.head_dim, self.scaling = old.head_dim, old.scaling
        self.heads = old.q_proj.out_features // old.head_dim
        self.kv_heads = old.k_proj.out_features // old.head_dim
        self.qkv_proj = _joined((old.q_proj, old.k_proj, old.v_proj))
        self.o_proj = old.o_proj
        self.q_norm, self.k_norm = getattr(old, "q_norm", None), getattr(old, "k_norm", None)
        self._attend, self._kernels = attend, kernels

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, T, hidden] → the same shape."""
        cosines, sines = (one[0].contiguous() for one in position_embeddings)
        heads = self.qkv_proj(hidden_states)[0].view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        if self.q_norm is None or self.k_norm is None:
            turned = heads[:, : self.heads + self.kv_heads]
            self._kernels.rotate(turned, cosines, sines)
            query, key = turned.split((self.heads, self.kv_heads), dim=1)
        else:
            query = self.q_norm(heads[:, : self.heads])
            key = self.k_norm(heads[:, self.heads : self.heads + self.kv_heads])
            self._kernels.rotate(query, cosines, sines)
            self._kernels.rotate(key, cosines, sines)
        value = heads[:, self.heads + self.kv_heads :]
        sides = (one.transpose(0, 1)[None] for one in (query, key, value))
        out, _ = self._attend(self, *sides, attention_mask, scaling=self.scaling, **more)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


class FusedGate(nn.Module):
    """Takes the place of a gated layer: one product for gate and up."""

    def __init__(self, old: Any, kernels: Elementwise) -> None:
        super().__init__()
        self.gate_up_proj = _joined((old.gate_proj, old.up_proj))
        self.down_proj = old.down_proj
        self._kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden] → the same shape."""
        out: torch.Tensor = self.down_proj(self._kernels.gate(self.gate_up_proj(x)))
        return out


def fuse_norms(model: nn.Module, kernels: Elementwise | None = None) -> int:
    """Replace the norms of `model` that are known to be plain ones. Returns how many."""
    count = 0
    for parent, name, child in _children(model, _PLAIN):
        own = kernels if child.weight.numel() % 8 == 0 else None
        setattr(parent, name, FusedNorm(child.weight, float(child.variance_epsilon), own))
        count += 1
    return count


def fuse_layers(model: nn.Module, attend: Callable[..., Any], kernels: Elementwise) -> int:
    """Replace known attention and gated layers of `model`, a model without windows. Returns how many.

    `attend`: the attention function, as transformers would call it. The joined weights take the place of the old ones:
    there is never more than one layer's twice.
    """
    count = 0
    for parent, name, child in _children(model, _ATTENTIONS):
        norms = [getattr(child, norm, None) for norm in ("q_norm", "k_norm")]
        known = all(norm is None for norm in norms) or all(isinstance(norm, FusedNorm) for norm in norms)
        if known and _joinable((child.q_proj, child.k_proj, child.v_proj)) and child.head_dim % 16 == 0:
            setattr(parent, name, FusedAttention(child, attend, kernels))
            count += 1
    for parent, name, child in _children(model, _GATES):
        silu = type(child.act_fn).__name__ in ("SiLU", "SiLUActivation")
        if silu and _joinable((child.gate_proj, child.up_proj)) and child.gate_proj.out_features % 8 == 0:
            setattr(parent, name, FusedGate(child, kernels))
            count += 1
    return count


def _children(model: nn.Module, names: Sequence[str]) -> Iterator[tuple[nn.Module, str, Any]]:
    """Parent, name and child for each child of a class called one of `names`; it may be replaced meanwhile."""
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__ in names
    ]
    for parent, name in found:
        yield parent, name, getattr(parent, name)


def _joinable(parts: Sequence[Any]) -> bool:
    """Whether these are plain linear layers, with biases in all of them or in none."""
    plain = all(type(part) is nn.Linear for part in parts)
    return plain and len({part.bias is None for part in parts}) == 1


def _joined(parts: Sequence[nn.Linear]) -> nn.Linear:
    """One linear layer that gives what `parts` give, one behind the other. They go on with views of its weights."""
    first = parts[0]
    sizes = [part.out_features for part in parts]
    whole = nn.Linear(first.in_features, sum(sizes), bias=first.bias is not None, device="meta")
    for kind in ("weight",) if first.bias is None else ("weight", "bias"):
        numbers = torch.cat([getattr(part, kind).detach() for part in parts])
        setattr(whole, kind, nn.Parameter(numbers, requires_grad=False))
        for part, own in zip(parts, torch.split(numbers, sizes), strict=True):
            setattr(part, kind, nn.Parameter(own, requires_grad=False))
    if first.weight.is_cuda:
        # So that the pieces that were given back do not add up to a second model.
        torch.cuda.empty_cache()
    return whole
