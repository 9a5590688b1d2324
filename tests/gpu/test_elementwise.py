# SPDX-License-Identifier: Apache-2.0
"""The kernels between matrix products against their plain meaning, and whole layers that are made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kit.tiny_families import tiny_random_model
from kvrail.kernels.elementwise import Elementwise
from kvrail.kernels.fused import FusedAttention, FusedGate, FusedNorm
from kvrail.kernels.reference import apply_gate, apply_norm, apply_rotation
from kvrail.runtime.checkpoint import open_checkpoint
from kvrail.runtime.model import PagedModel

# Half of the last place of each type.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
VOCABULARY = 997


@pytest.fixture(scope="session", params=[torch.bfloat16, torch.float16], ids=str)
def kernels(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Elementwise, torch.dtype]:
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
    return Elementwise(0, request.param, tmp_path_factory.mktemp("cubins")), request.param


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Rounded once, from a sum in another order."""
    bound = ROUNDING[found.dtype] * expected.abs() * 1.02 + 1e-5
    assert bool(((found.float() - expected).abs() <= bound).all())


@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("n", [8, 128, 576, 4096, 12000])
def test_norm(kernels, rows, n) -> None:
    made, dtype = kernels
    torch.manual_seed(n)
    wide = torch.randn(rows, n + 8, device="cuda").to(dtype)
    weight = torch.randn(n, device="cuda").to(dtype)
    for x in (wide[:, :n].contiguous(), wide[:, :n], wide[:, 8:]):
        _close(made.norm(x, weight, 1e-5), apply_norm(x, weight, 1e-5))
    assert made.norm(wide[:0, :n], weight, 1e-5).shape == (0, n)


@pytest.mark.parametrize("tokens", [1, 7, 200])
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (9, 64), (40, 128), (5, 256), (96, 128)])
def test_rotation_turns_its_heads_alone(kernels, tokens, heads, dim) -> None:
    made, dtype = kernels
    torch.manual_seed(heads)
    whole = torch.randn(tokens, heads + 2, dim, device="cuda").to(dtype)
    before = whole.clone()
    cosines, sines = torch.rand(2, tokens, dim, device="cuda").to(dtype)
    made.rotate(whole[:, 1 : heads + 1], cosines, sines)
    # Two products and a sum, each of which may cancel the other: the bound is on them and not on what is left.
    expected = apply_rotation(before[:, 1 : heads + 1], cosines, sines)
    assert float((whole[:, 1 : heads + 1].float() - expected).abs().max()) <= ROUNDING[dtype] * 8
    assert torch.equal(whole[:, 0], before[:, 0])
    assert torch.equal(whole[:, -1], before[:, -1])


@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("n", [8, 1536, 14336])
def test_gate(kernels, rows, n) -> None:
    made, dtype = kernels
    torch.manual_seed(n)
    x = (torch.randn(1, rows, 2 * n, device="cuda") * 4).to(dtype)
    found = made.gate(x)
    assert found.shape == (1, rows, n)
    _close(found, apply_gate(x))


def test_what_is_not_made_of_vectors_is_refused(kernels) -> None:
    made, dtype = kernels
    x = torch.zeros(4, 3, 32, dtype=dtype, device="cuda")
    angles = x[:, 0].contiguous()
    with pytest.raises(ValueError, match="vectors of 8"):
        made.norm(x[..., :12], angles[0, :12], 1e-5)
    with pytest.raises(ValueError, match="vectors of 8"):
        made.norm(x.float(), angles[0], 1e-5)
    for bad in (x[..., 1:17], x[..., :16], x[..., :8]):
        with pytest.raises(ValueError, match=r"vectors of 8|cannot turn"):
            made.rotate(bad, angles, angles)
    with pytest.raises(ValueError, match="cannot turn"):
        made.rotate(x, angles[:2], angles[:2])
    with pytest.raises(ValueError, match="cannot gate"):
        made.gate(x[..., :8])


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("attention", ["torch", "flashinfer"])
def test_known_models_are_fused_and_right(kernels, tmp_path: Path, kind, attention) -> None:
    """Loading compares with the untouched model, whose norms, biases and all are random here."""
    _, dtype = kernels
    torch.manual_seed(2)
    changes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 256}
    changes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": None}
    tiny_random_model(kind, **changes).save_pretrained(tmp_path)
    name = str(dtype).removeprefix("torch.")
    made = PagedModel.load(open_checkpoint(str(tmp_path)), name, 16, device="cuda", attention=attention)
    parts = [type(part) for part in made._model.modules()]
    layers = made._model.config.num_hidden_layers
    fused = 0 if kind == "phi3" else layers
    assert (parts.count(FusedAttention), parts.count(FusedGate)) == (fused, fused)
    assert (FusedNorm in parts) == bool(fused)
